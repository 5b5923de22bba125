"""Sets that lie in several files: which of them are for training and which for testing, and their classes."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ptlf.core.processes import info
from ptlf.stream.disk import disk_errors
from ptlf.stream.pack import natural, quote_names
from ptlf.stream.rows import Classes, ImageSplit, Row

TESTS = ("test", "val", "validation", "valid", "dev")
FOLDERS = ("train", *TESTS, "data")  # in which a set's files may lie


@dataclass(frozen=True)
class Part:
    """The images of one split before their classes are numbered."""

    count: int
    read: Callable[[], Iterable[Row]]
    labels: Sequence[Any]  # None: the image has none
    names: Sequence[str] | None = None  # of the classes that labels number


def files_with(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files of a set: those with such an ending in the folder, or else in its folders `train`, `test`, `data` and
    the like. None if there are images or other folders beside them: then it is an image folder."""
    with disk_errors(path):
        files, folders = visible(path)
        if folders and {folder.name for folder in folders} <= set(FOLDERS):
            inside = [visible(folder) for folder in folders]
            files += [file for found, _ in inside for file in found]
            folders = [folder for _, found in inside for folder in found]
    pictures = Image.registered_extensions()
    if folders or any(file.suffix.lower() in pictures for file in files):
        return []
    mine = [file for file in files if file.name.lower().endswith(endings)]
    return sorted(mine, key=lambda file: natural(str(file)))


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


def labelled_splits(parts: Mapping[str, Part], path: Path) -> dict[str, ImageSplit]:
    """The splits, with the names of the classes if the set has them. Labels that cannot be used are refused here,
    before an image is read."""
    train = parts["train"]
    if all(label is None for label in train.labels):
        return {"train": ImageSplit(train.count, train.read)}
    classes = Classes(str(path), train.names)
    names = {split: part.names or train.names for split, part in parts.items()}
    for split, part in parts.items():
        for label in dict.fromkeys(label for label in part.labels if label is not None):
            classes.number(split, str(path), label, names[split])
    return {split: ImageSplit(part.count, part.read, names[split]) for split, part in parts.items()}
