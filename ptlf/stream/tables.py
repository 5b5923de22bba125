"""Hugging Face data sets on disk, as `save_to_disk` and the hub store them: .arrow and .parquet files.

A column has the images: bytes, {"bytes", "path"}, paths or arrays (H, W[, 3]). Another may have the labels.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.stream.rows import IMAGE_KEYS, LABEL_KEYS, ImageSplit, Row, plain_label
from ptlf.stream.splits import Part, by_split, files_with, labelled_splits

ENDINGS = (".parquet", ".arrow")
SAVED = ("state.json", "dataset_dict.json")  # in a folder of `save_to_disk`
BATCH = 64  # rows that are in memory at a time
NO_PYARROW = "needs pyarrow to be read: pip install pyarrow"


def table_files(path: Path) -> list[Path]:
    """The files of a table or of a folder of them; none if `path` is something else."""
    if path.is_file():
        return [path] if path.name.lower().endswith(ENDINGS) else []
    if not path.is_dir():
        return []
    if any((path / name).is_file() for name in SAVED):
        return sorted([*path.glob("*.arrow"), *path.glob("*/*.arrow")])
    return files_with(path, ENDINGS)


def given_tables(path: Path) -> dict[str, ImageSplit]:
    parts = {split: table_part(files) for split, files in by_split(table_files(path), path).items()}
    return labelled_splits(parts, path)


def table_part(files: Sequence[Path]) -> Part:
    schema = schema_of(files[0])
    with readable(files[0]):  # column names may be no text
        features = declared(schema)
        image, label = image_column(files[0], schema, features), label_column(schema, features)
    names = features.get(label, {}).get("names") if label else None
    names = [str(name) for name in names] if isinstance(names, list) and names else None

    def read() -> Iterator[Row]:
        for file in files:
            columns = [image, *([label] if label else [])]
            for index, row in enumerate(rows_of(file, columns)):
                number = plain_label(row[label]) if label else None
                yield Row(f"{file.name}, row {index + 1}", as_image(row[image], file), number)

    labels: list[Any]
    if label:
        labels = [plain_label(row[label]) for file in files for row in rows_of(file, [label])]
    else:
        labels = [None for file in files for _ in rows_of(file, [image])]
    if not labels:
        raise UserError(f"{files[0]} holds no images: it has no rows")
    return Part(len(labels), read, labels, names)


def arrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"a table of images {NO_PYARROW}") from None
    return pyarrow


def batches_of(file: Path, columns: Sequence[str] | None = None) -> Generator[Any, None, None]:
    """Record batches with these columns; without columns, one without rows."""
    package = arrow()
    with readable(file):
        if file.name.lower().endswith(".parquet"):
            with package.parquet.ParquetFile(file) as table:
                if columns is None:
                    yield table.schema_arrow.empty_table()
                    return
                yield from table.iter_batches(BATCH, columns=[*columns])
            return
        with package.memory_map(str(file)) as source, package.ipc.open_stream(source) as stream:
            if columns is None:
                yield stream.schema.empty_table()
                return
            for batch in stream:
                chosen = batch.select([*columns])
                yield from (chosen.slice(start, BATCH) for start in range(0, len(chosen), BATCH))


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn the errors of a damaged file into a UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError, MemoryError, arrow().ArrowException) as error:
        raise UserError(f"{file} cannot be read as a table: {' '.join(str(error).split())[:200]}") from None


def rows_of(file: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for batch in batches_of(file, columns):
        with readable(file):
            batch.validate(full=True)  # offsets and text: reading wrong ones would end the process
            rows = batch.to_pylist()
        yield from rows


def schema_of(file: Path) -> Any:
    with closing(batches_of(file)) as found:
        return next(found).schema


def declared(schema: Any) -> dict[str, Mapping[str, Any]]:
    """What the data set says of columns it has, as {"label": {"_type": "ClassLabel", "names": [...]}}."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"].items()
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    columns = {field.name for field in schema}
    return {name: about for name, about in found if isinstance(about, Mapping) and name in columns}


def image_column(file: Path, schema: Any, features: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = {field.name: str(field.type) for field in schema}
    images = [name for name, about in features.items() if about.get("_type") == "Image"]
    images += [name for name in IMAGE_KEYS if name in kinds]
    images += [name for name, kind in kinds.items() if kind.startswith(("struct<bytes", "binary", "large_binary"))]
    if not images:
        wanted = f"called {' or '.join(IMAGE_KEYS)}, or of bytes"
        raise UserError(f"{file} has no column of images, {wanted}; it has: {', '.join(kinds)}")
    return images[0]


def label_column(schema: Any, features: Mapping[str, Mapping[str, Any]]) -> str | None:
    columns = [field.name for field in schema]
    labels = [name for name in LABEL_KEYS if name in columns]
    labels += [name for name, about in features.items() if about.get("_type") == "ClassLabel"]
    return labels[0] if labels else None


def as_image(value: Any, file: Path) -> Any:
    """An image as `packing.to_square` takes it; paths are relative to the table's folder."""
    if isinstance(value, Mapping) and not value.get("bytes"):
        value = value.get("path")
    if isinstance(value, str):
        return file.parent / value
    if isinstance(value, list):
        try:
            pixels = np.array(value)
        except ValueError:  # rows of different lengths
            return value
        whole = np.issubdtype(pixels.dtype, np.integer) and pixels.size and 0 <= pixels.min() <= pixels.max() <= 255
        return pixels.astype(np.uint8) if whole else pixels
    return value
