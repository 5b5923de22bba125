"""Features of any number of images into one file: names, features, and labels if there are any.

`.npz` holds `names`, `features` (N, D) float32 and perhaps `labels` (text); `.parquet` the columns `name`, `label` and
`features`. Images are decoded and features written in batches; only names and labels are held in memory.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ptlf.core.errors import UserError, import_optional, warn
from ptlf.core.files import whole_file
from ptlf.run.inference import load_encoder
from ptlf.stream.disk import progress_bar
from ptlf.stream.images import find_images, open_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import SHOWN_SKIPS, refuse_or_skip

Labels = list[str | None]


def embed_images(
    folder: Path,
    images: Sequence[str],
    out: Path,
    *,
    batch: int = 256,
    device: str = "auto",
    on_error: str = "refuse",
    progress: bool = True,
    trust_code: bool = False,
) -> tuple[int, int, list[dict[str, str]]]:
    """Write the features of all images; names begin with their path if there are several paths. Returns how many images
    there are, how long each one's features are, and which were skipped."""
    if out.suffix not in WRITERS:
        raise UserError(f"--out {out} must end with {' or '.join(WRITERS)}")
    opened = [(path, open_images(find_images(path, data_root()))) for path in images]
    splits = [
        (f"{path.rstrip('/')}/" if len(images) > 1 else "", split) for path, found in opened for split in found.values()
    ]
    encoder = load_encoder(folder, device=device, trust_code=trust_code)
    skipped: list[dict[str, str]] = []
    total = 0
    with (
        progress_bar(f"embedding with {folder.name}", sum(split.count for _, split in splits), progress) as advance,
        whole_file(out) as file,
    ):
        writer = WRITERS[out.suffix](file, encoder.feature_dim)
        for prefix, split in splits:

            def on_problem(problems: list[tuple[str, str]], prefix: str = prefix) -> None:
                refuse_or_skip([(prefix + name, why) for name, why in problems], skipped, on_error)

            for squares, features in encoder.embedded(split, batch, on_problem):
                labels = [None if label is None else str(label) for label in squares.labels]
                writer.write([prefix + name for name in squares.names], labels, features)
                total += len(features)
                advance(len(features))
        if not total:
            raise UserError(f"none of the {len(skipped)} images can be read: {skipped[0]['file']}: {skipped[0]['why']}")
        writer.close()
    for entry in skipped[:SHOWN_SKIPS]:
        warn(f"skipped {entry['file']}: {entry['why']}")
    return total, encoder.feature_dim, skipped


class NpzWriter:
    """Features are first written to a file without a name: the length of the array is known at the end only."""

    def __init__(self, path: Path, dim: int) -> None:
        self.path, self.dim = path, dim
        self.names: list[str] = []
        self.labels: Labels = []
        self.rows = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115

    def write(self, names: list[str], labels: Labels, features: np.ndarray) -> None:
        self.names += names
        self.labels += labels
        self.rows.write(np.ascontiguousarray(features, np.float32).data)

    def close(self) -> None:
        arrays = {"names": np.array(self.names)}
        if any(label is not None for label in self.labels):
            arrays["labels"] = np.array([label or "" for label in self.labels])
        self.rows.flush()
        with self.rows, open(self.path, "wb") as file:
            features = np.memmap(self.rows, np.float32, "r", shape=(len(self.names), self.dim))
            np.savez(file, allow_pickle=False, features=features, **arrays)


class ParquetWriter:
    """Columns `name`, `label` (null where there is none) and `features`, a list of `dim` floats."""

    def __init__(self, path: Path, dim: int) -> None:
        self.arrow, parquet = (import_optional(name, ".parquet", "export") for name in ("pyarrow", "pyarrow.parquet"))
        text = self.arrow.string()
        vectors = self.arrow.list_(self.arrow.float32(), dim)
        self.schema = self.arrow.schema([("name", text), ("label", text), ("features", vectors)])
        self.file = parquet.ParquetWriter(path, self.schema)

    def write(self, names: list[str], labels: Labels, features: np.ndarray) -> None:
        flat = self.arrow.array(features.astype(np.float32).reshape(-1))
        vectors = self.arrow.FixedSizeListArray.from_arrays(flat, features.shape[1])
        self.file.write_table(self.arrow.table([names, labels, vectors], schema=self.schema))

    def close(self) -> None:
        self.file.close()


WRITERS: dict[str, type[NpzWriter | ParquetWriter]] = {".npz": NpzWriter, ".parquet": ParquetWriter}
