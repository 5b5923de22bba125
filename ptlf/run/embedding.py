"""Features of any number of images into one file: names, features, and labels if there are any.

`.npz` holds `names`, `features` (N, D) float32 and perhaps `labels` (text); `.parquet` the columns `name`, `label` and
`features`. Images are decoded and features written in batches; only names and labels are held in memory.
"""

import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ptlf.core.errors import UserError
from ptlf.core.files import whole_file
from ptlf.core.processes import warn
from ptlf.run.inference import LoadedEncoder, load_encoder
from ptlf.stream.disk import progress_bar
from ptlf.stream.folders import SHOWN_SKIPS
from ptlf.stream.images import find_images, open_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import refuse_or_skip
from ptlf.stream.rows import ImageSplit, Row

NO_PYARROW = "writing .parquet needs pyarrow: `pip install 'ptlf[export]'`, or give an .npz file"


class Writer(Protocol):
    def write(self, names: list[str], labels: list[str | None], features: np.ndarray) -> None: ...
    def close(self) -> None: ...


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
    """Write the features of all images. How many there are, how long each is, and which were skipped."""
    if out.suffix not in WRITERS:
        raise UserError(f"--out {out} must end with {' or '.join(WRITERS)}")
    parts = all_parts(images)
    encoder = load_encoder(folder, device=device, trust_code=trust_code)
    skipped: list[dict[str, str]] = []
    written = 0
    with (
        progress_bar(f"embedding with {folder.name}", sum(part.count for part in parts), progress) as advance,
        whole_file(out) as file,
    ):
        writer: Writer = WRITERS[out.suffix](file, encoder.feature_dim)
        for part in parts:
            for names, labels, features in embedded(encoder, part, batch, skipped, on_error):
                writer.write(names, labels, features)
                written += len(names)
                advance(len(names))
        if not written:
            raise UserError(f"none of the {len(skipped)} images can be read: {skipped[0]['file']}: {skipped[0]['why']}")
        writer.close()
    for entry in skipped[:SHOWN_SKIPS]:
        warn(f"skipped {entry['file']}: {entry['why']}")
    return written, encoder.feature_dim, skipped


def all_parts(images: Sequence[str]) -> list[ImageSplit]:
    """The splits of all paths; names begin with the path if there are several."""
    parts = []
    for value in images:
        for part in open_images(find_images(value, data_root())).values():
            parts.append(prefixed(part, value) if len(images) > 1 else part)
    return parts


def prefixed(part: ImageSplit, path: str) -> ImageSplit:
    def read() -> Iterator[Row]:
        return (row._replace(name=f"{path.rstrip('/')}/{row.name}") for row in part.read())

    return replace(part, read=read)


def embedded(
    encoder: LoadedEncoder, part: ImageSplit, batch: int, skipped: list[dict[str, str]], on_error: str
) -> Iterator[tuple[list[str], list[str | None], np.ndarray]]:
    def on_problem(problems: list[tuple[str, str]]) -> None:
        refuse_or_skip(problems, skipped, on_error)

    for found, features in encoder.embedded(part, batch, on_problem):
        yield found.names, [class_name(part, label) for label in found.labels], features


def class_name(part: ImageSplit, label: Any) -> str | None:
    return None if label is None else str(label) if part.names is None else part.names[label]


class NpzWriter:
    """Features are first written to a file beside it: the length of the array is known at the end only."""

    def __init__(self, path: Path, dim: int) -> None:
        self.path, self.dim = path, dim
        self.names: list[str] = []
        self.labels: list[str | None] = []
        self.rows = path.with_name(f"{path.name}.rows")
        self.file = open(self.rows, "w+b")  # noqa: SIM115
        os.unlink(self.rows)  # the open file stays, and is gone whatever happens

    def write(self, names: list[str], labels: list[str | None], features: np.ndarray) -> None:
        self.names += names
        self.labels += labels
        self.file.write(np.ascontiguousarray(features, np.float32).data)

    def close(self) -> None:
        arrays = {"names": np.array(self.names)}
        if any(label is not None for label in self.labels):
            arrays["labels"] = np.array([label or "" for label in self.labels])
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(self.names), self.dim)}
        self.file.seek(0)
        with self.file, zipfile.ZipFile(self.path, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            with archive.open("features.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                shutil.copyfileobj(self.file, member, 1 << 20)


class ParquetWriter:
    """Columns `name`, `label` (null where there is none) and `features`, a list of `dim` floats."""

    def __init__(self, path: Path, dim: int) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UserError(NO_PYARROW) from None
        self.arrow, self.dim = pyarrow, dim
        vectors = pyarrow.list_(pyarrow.float32(), dim)
        columns = [("name", pyarrow.string()), ("label", pyarrow.string()), ("features", vectors)]
        self.schema = pyarrow.schema(columns)
        self.file = parquet.ParquetWriter(path, self.schema)

    def write(self, names: list[str], labels: list[str | None], features: np.ndarray) -> None:
        text = self.arrow.string()
        flat = self.arrow.array(features.astype(np.float32).reshape(-1))
        vectors = self.arrow.FixedSizeListArray.from_arrays(flat, self.dim)
        columns = [self.arrow.array(names, text), self.arrow.array(labels, text), vectors]
        self.file.write_table(self.arrow.table(columns, schema=self.schema))

    def close(self) -> None:
        self.file.close()


WRITERS: dict[str, Any] = {".npz": NpzWriter, ".parquet": ParquetWriter}
