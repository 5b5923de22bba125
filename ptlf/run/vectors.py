"""Files of vectors, as `ptlf embed` writes them: which encoder made them, and which are nearest to an image."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ptlf.core.errors import UserError, import_optional
from ptlf.core.files import whole_file
from ptlf.core.reading import check_shape, clean
from ptlf.encoders.weights import KEY, read_tensors
from ptlf.run.folder import ENCODER, encoder_digest
from ptlf.run.inference import WRITERS, load_encoder, mapped, read_card, writer_for
from ptlf.run.versions import find_maps, find_version, move, name_version, unit_rows
from ptlf.stream.images import readable

ABOUT = {"encoder": str, "dim": (1, 10**6), "run": str, "root": str, "task?": str, "checks": [[(int, float)]]}
ROWS, AGREE = 32768, 0.99  # vectors at a time; cosine of vectors of one image by one encoder, elsewhere
IN_MEMORY = 256 << 20  # bytes; larger arrays are memory-mapped


@dataclass(frozen=True)
class Vectors:
    path: Path
    names: Sequence[str]
    features: np.ndarray  # (N, dim) float32, perhaps a memory map
    labels: Sequence[str] | None
    about: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.path}, of {Path(self.about['run']).name}{after(self.about)}"


def after(about: dict[str, Any]) -> str:
    """In a sentence, which version of its run it is of."""
    return f" after {about['task']}" if about.get("task") else ""


def read_vectors(path: Path) -> Vectors:
    if path.suffix not in WRITERS:
        raise UserError(f"{path} is no file of vectors; give one that `ptlf embed` wrote, {' or '.join(WRITERS)}")
    with readable(path, f"{path.suffix} of vectors"):
        found = read_parquet(path) if path.suffix == ".parquet" else read_npz(path)
        features, names = found["features"], found["names"]
        if not found["about"]:
            raise UserError(f"{path} does not say which encoder it is of; write it again with `ptlf embed`")
        about = clean(json.loads(str(found["about"])))
        check_shape(about, ABOUT)
        if features.dtype != np.float32 or features.shape != (len(names), about["dim"]):
            raise ValueError(f"features {features.dtype} {features.shape} of {len(names)} names")
    return Vectors(path, names, features, found.get("labels"), about)


def read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        found: dict[str, Any] = {name: file[name].tolist() for name in ("names", "labels", "about") if name in file}
    if "names" not in found:
        raise ValueError("it has no array called names")
    return {"about": None, **found, "features": stored_array(path, "features")}


def stored_array(path: Path, name: str) -> np.ndarray:
    """Of an .npz; a memory map if it is large."""
    with zipfile.ZipFile(path) as file, file.open(entry := file.getinfo(f"{name}.npy")) as member:
        if entry.file_size <= IN_MEMORY or entry.compress_type != zipfile.ZIP_STORED:
            return np.lib.format.read_array(member, allow_pickle=False)
        np.lib.format.read_magic(member)
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
        begin = member.tell()
    with open(path, "rb") as raw:  # the member follows its own header, whose last parts have lengths of their own
        raw.seek(entry.header_offset + 26)
        begin += entry.header_offset + 30 + sum(np.frombuffer(raw.read(4), "<u2").tolist())
    return np.memmap(path, dtype, "r", begin, shape)


def read_parquet(path: Path) -> dict[str, Any]:
    table = import_optional("pyarrow.parquet", ".parquet", "export").read_table(path)
    names, labels = (table.column(name).to_pylist() for name in ("name", "label"))
    vectors, about = table.column("features").combine_chunks(), (table.schema.metadata or {}).get(KEY.encode(), b"")
    features = vectors.values.to_numpy().reshape(len(names), -1)
    return {"names": names, "labels": labels if any(labels) else None, "features": features, "about": about.decode()}


def check_same_encoder(files: Sequence[Vectors]) -> None:
    for one in files[1:]:
        if one.about["encoder"] != files[0].about["encoder"]:
            upgrade = f"`ptlf upgrade {one.about['run']} FILE --out NEW` brings a file to the version of today"
            raise UserError(f"vectors of two encoders cannot be compared: {files[0]}, and {one}; {upgrade}")


def upgrade_file(run: Path, path: Path, out: Path) -> tuple[Vectors, dict[str, Any]]:
    """Write the vectors in a file as vectors of the run's encoder of today, without images. Returns what was read, and
    what the new file says of itself."""
    old, today, write_rows = read_vectors(path), today_of(run), writer_for(out)
    maps, about = find_maps(run, old.about["encoder"], today, str(old)), old.about
    if maps:
        checks = move(maps, np.array(about["checks"], np.float32)).tolist()
        about = {**about, **name_version(run, today), "mapped_from": about["encoder"], "checks": checks}
    labels = [label or None for label in old.labels or [""] * len(old.names)]
    with whole_file(out) as file, write_rows(file, about["dim"], json.dumps(about)) as write:
        for piece in (slice(start, start + ROWS) for start in range(0, len(labels), ROWS)):
            write([*old.names[piece]], labels[piece], move(maps, old.features[piece]))
    return old, about


def upgrade_vectors(run: Path, vectors: np.ndarray, since: str) -> np.ndarray:
    """Vectors (N, dim) of the run's encoder after the task `since` as those of today."""
    maps = find_maps(run, find_version(run, since), today_of(run), f"vectors after {since}")
    if vectors.ndim != 2 or (maps and vectors.shape[1] != len(maps[0].shift)):
        raise UserError(f"vectors must be (N, {len(maps[0].shift) if maps else 'dim'}), not {vectors.shape}")
    return move(maps, vectors)


def today_of(run: Path) -> str:
    """The checksum of the run's encoder as it is now."""
    read_card(run / ENCODER)  # else it is no run
    return encoder_digest(read_tensors(run / ENCODER))


class Hit(NamedTuple):
    name: str
    similarity: float  # cosine
    label: str | None
    image: Path  # where it was when its vector was made


def nearest(files: Sequence[Vectors], queries: np.ndarray, k: int = 10) -> list[list[Hit]]:
    """Of each query (Q, dim), by cosine. A block of rows is read at a time."""
    unit, blocks = unit_rows(queries), [(f, row) for f in files for row in range(0, len(f.names), ROWS)]
    best, places = np.zeros((len(unit), 0), np.float32), np.zeros((len(unit), 0), int)  # a place: ROWS of each block
    for number, (file, row) in enumerate(blocks):
        scores = unit @ unit_rows(file.features[row : row + ROWS]).T
        new = np.broadcast_to(number * ROWS + np.arange(scores.shape[1]), scores.shape)
        best, places = np.concatenate([best, scores], 1), np.concatenate([places, new], 1)
        kept = np.argsort(-best, 1, kind="stable")[:, :k]
        best, places = np.take_along_axis(best, kept, 1), np.take_along_axis(places, kept, 1)

    def hit(score: float, place: int) -> Hit:
        file, row = blocks[place // ROWS][0], blocks[place // ROWS][1] + place % ROWS
        return Hit(
            file.names[row],
            score,
            file.labels[row] or None if file.labels else None,
            Path(file.about["root"], file.names[row]),
        )

    return [[*map(hit, *pair)] for pair in zip(best.tolist(), places.tolist(), strict=True)]


def search(
    vectors: Path | str | Sequence[Path | str], images: Any, run: Path | str | None = None, k: int = 10,
    device: str = "auto", *, trust_code: bool = False,
) -> list[list[Hit]]:  # fmt: skip
    """The images nearest to each query, from files of vectors that `ptlf embed` or `ptlf upgrade` wrote.

    images: the queries, in any form that `embed` takes. run: whose encoder is used; default: the one that the vectors
    name. If it has learnt more since, the queries are mapped into the space of the vectors.
    """
    files = [read_vectors(Path(path)) for path in ([vectors] if isinstance(vectors, str | Path) else vectors)]
    return nearest(files, encode_queries(files, images, run, device, trust_code=trust_code)[1], k)


def encode_queries(
    files: Sequence[Vectors], images: Any, run: Path | str | None, device: str, *, trust_code: bool
) -> tuple[list[str], np.ndarray]:
    """Names and vectors of the queries, in the space of the files."""
    check_same_encoder(files)
    about, path = files[0].about, files[0].path
    if run is None and not Path(about["run"]).is_dir():
        raise UserError(f"there is no run {about['run']}, which {path} is of; name it with --run RUN (run=...)")
    encoder = load_encoder(run or about["run"], device=device, trust_code=trust_code)
    encoder = mapped(encoder, about["encoder"], str(files[0]))
    if not encoder.maps and "mapped_from" not in about:
        checks = [unit_rows(np.array(each["checks"], np.float32)) for each in (about, encoder.about)]
        if (agreement := float((checks[0] * checks[1]).sum(1).min())) < AGREE:
            why = f"it encodes two images otherwise than when they were made (cosine {agreement:.3f})"
            raise UserError(f"the encoder is the one of {path}, but {why}; embed the images again")
    found = [(part.names, features) for part, features in encoder.embedded(images, 256)]
    return [name for names, _ in found for name in names], np.concatenate([features for _, features in found])
