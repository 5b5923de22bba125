"""Files that the `datasets` library reads: Parquet, and Arrow as `save_to_disk` leaves it.

A column has the images: bytes, {"bytes", "path"}, paths or arrays (H, W[, 3]). Another may have the labels. Files are
read row by row, and nothing is copied into the library's cache.
"""

import glob
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from ptlf.core.errors import UserError, import_optional, info
from ptlf.stream.disk import disk_errors, natural, quote_names
from ptlf.stream.rows import IMAGE_KEYS, LABEL_KEYS, ImageSplit, Row, plain_label

T = TypeVar("T")

BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("state.json", "dataset_dict.json")  # in a folder of `save_to_disk`
TESTS = ("test", "val", "validation", "valid", "dev")
FOLDERS = {"train", *TESTS, "data"}  # in which a set's files may lie
BATCH = 64  # rows that are in memory at a time


def dataset_files(path: Path) -> list[Path]:
    """The files of a set: one file; or those in a folder, or in its folders `train`, `test`, `data` and the like. None
    if there are images or other folders beside them: then it is an image folder."""
    if not path.is_dir():
        return [path] if path.is_file() and path.suffix.lower() in BUILDERS else []
    with disk_errors(path):
        if any((path / name).is_file() for name in SAVED):
            return sorted([*path.glob("*.arrow"), *path.glob("*/*.arrow")])
        files, folders = visible(path)
        if folders and {folder.name for folder in folders} <= FOLDERS:
            inside = [visible(folder) for folder in folders]
            files += [file for found, _ in inside for file in found]
            folders = [folder for _, found in inside for folder in found]
    if folders or any(file.suffix.lower() in Image.registered_extensions() for file in files):
        return []
    files = [file for file in files if file.suffix.lower() in BUILDERS]
    return sorted(files, key=lambda file: natural(str(file)))


def visible(path: Path) -> tuple[list[Path], list[Path]]:
    """Files and folders that are not hidden."""
    kinds: tuple[list[Path], list[Path]] = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                kinds[entry.is_dir()].append(Path(entry))
    return kinds


def by_split(files: Sequence[Path], root: Path) -> dict[str, list[Path]]:
    """{"train": files} or {"train": files, "test": files}, by the words in their names below `root`."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        words = re.split("[^a-z]+", str(file.relative_to(root)).lower()) if file != root else []
        kind = next((word for word in ("train", *TESTS) if word in words), "other")
        groups.setdefault(kind, []).append(file)
    train = groups.pop("train", None) or groups.pop("other", None)
    test = next((groups.pop(kind) for kind in TESTS if kind in groups), None)
    if train is None:
        train, test = test, None
    if unused := [file.name for rest in groups.values() for file in rest]:
        info(f"not read from {root}: {quote_names(unused)}")
    return {"train": train or []} | ({"test": test} if test else {})


def open_dataset_files(path: Path) -> dict[str, ImageSplit]:
    """Labels are read at once, images when they are asked for."""
    splits = {split: files_split(files) for split, files in by_split(dataset_files(path), path).items()}
    train = splits["train"].names
    return {split: replace(part, names=part.names or train) for split, part in splits.items()}


def files_split(paths: Sequence[Path]) -> ImageSplit:
    files = [DatasetFile(path) for path in paths]
    labels = [label for file in files for label in file.labels()]
    if not labels:
        raise UserError(f"{paths[0]} holds no images: it has no rows")

    def read() -> Iterator[Row]:
        return (row for file in files for row in file.rows())

    return ImageSplit(len(labels), read, files[0].names, labels)


class DatasetFile:
    """One file as the `datasets` library opens it."""

    def __init__(self, path: Path) -> None:
        self.path, self.kind = path, BUILDERS[path.suffix.lower()]
        columns = self.guarded(lambda: self.open().features)
        self.image = self.image_column(columns)
        labels = [name for name in LABEL_KEYS if name in columns]
        labels += [name for name, feature in columns.items() if hasattr(feature, "names")]
        self.label = labels[0] if labels else None
        names = getattr(columns.get(self.label), "names", None)
        self.names = [str(name) for name in names] if names else None

    def open(self, **options: Any) -> Any:
        datasets = import_optional("datasets", f"reading {self.path.name}", "datasets")
        options |= {"batch_size": BATCH} if self.kind == "parquet" else {}
        files = [glob.escape(str(self.path))]
        opened = datasets.load_dataset(self.kind, data_files=files, split="train", streaming=True, **options)
        return opened.decode(False)

    def image_column(self, columns: Mapping[str, Any]) -> str:
        names = [name for name, feature in columns.items() if type(feature).__name__ == "Image"]
        names += [name for name in IMAGE_KEYS if name in columns]
        names += [name for name, kind in columns.items() if getattr(kind, "dtype", "") in ("binary", "large_binary")]
        names += [name for name, kind in columns.items() if isinstance(kind, Mapping) and "bytes" in kind]
        if not names:
            wanted = f"called {' or '.join(IMAGE_KEYS)}, or of bytes"
            raise UserError(f"{self.path} has no column of images, {wanted}; it has: {', '.join(map(str, columns))}")
        return names[0]

    def guarded(self, step: Callable[[], T]) -> T:
        """What the step returns. On a damaged file the library and those below it raise almost any exception."""
        log = logging.getLogger("datasets")  # it would tell of the same error at length
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        try:
            return step()
        except UserError:
            raise
        except Exception as error:
            why = " ".join((str(error) or type(error).__name__).split())[:200]
            raise UserError(f"{self.path} cannot be read as {self.kind}: {why}") from None
        finally:
            log.setLevel(level)

    def read(self, **options: Any) -> Iterator[Mapping[str, Any]]:
        rows = iter(self.guarded(lambda: self.open(**options)))
        while (row := self.guarded(lambda: next(rows, None))) is not None:
            yield row

    def labels(self) -> list[Any]:
        only = {"columns": [self.label]} if self.kind == "parquet" and self.label else {}
        return [plain_label(row[self.label]) if self.label else None for row in self.read(**only)]

    def rows(self) -> Iterator[Row]:
        for index, row in enumerate(self.read(), start=1):
            label = plain_label(row[self.label]) if self.label else None
            yield Row(f"{self.path.name}, row {index}", self.pixels(row[self.image]), label)

    def pixels(self, value: Any) -> Any:
        """An image as `decode.to_square` takes it; paths are relative to the file's folder."""
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str):
            return self.path.parent / value
        if isinstance(value, list):
            try:
                array = np.array(value)
            except ValueError:  # rows of different lengths
                return value
            whole = np.issubdtype(array.dtype, np.integer) and array.size and 0 <= array.min() <= array.max() <= 255
            return array.astype(np.uint8) if whole else array
        return value
