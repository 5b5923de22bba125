"""Images in .npy and .npz files, read one by one: a file may be larger than the memory."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.stream.disk import quote_names
from ptlf.stream.rows import ImageSplit, Row, plain_labels, with_labels

# Arrays of an .npz file: (images, labels) by split, as numpy users, MedMNIST and Keras name them.
# `names`, if it is there, has the classes that labels number.
ARRAYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("arr_0", "arr_1")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is no readable .npy file: {error}") from None


def open_npz(path: Path) -> dict[str, ImageSplit]:
    try:
        with zipfile.ZipFile(path) as file:
            members = [name.removesuffix(".npy") for name in file.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no readable .npz file: {error}") from None
    splits: dict[str, ImageSplit] = {}
    names = [str(name) for name in npz_rows(path, "names")] if "names" in members else None
    for split, choices in ARRAYS.items():
        pair = next((pair for pair in choices if pair[0] in members), None)
        if pair is not None:
            splits[split] = part = npz_split(path, pair[0])
            labels = list(npz_rows(path, pair[1])) if pair[1] in members else None
            if labels is not None:
                splits[split] = with_labels(part, named(plain_labels(np.array(labels)), names, f"{path}: {pair[1]!r}"))
    if "train" not in splits:
        wanted = quote_names(images for images, _ in ARRAYS["train"])
        raise UserError(f"{path} has no array called {wanted}; it has: {quote_names(members)}")
    return splits


def npz_split(path: Path, member: str) -> ImageSplit:
    with zipfile.ZipFile(path) as file, file.open(f"{member}.npy") as opened:
        count = read_header(opened, f"{path}, array {member!r},")[0][0]

    def read() -> Iterator[Row]:
        return (Row(f"image {index + 1}", image) for index, image in enumerate(npz_rows(path, member)))

    return ImageSplit(count, read)


def named(labels: list[Any], names: list[str] | None, array: str) -> list[Any]:
    """The labels, as the names that they number if there are names."""
    if names is None:
        return labels
    try:
        return [None if label is None else names[int(label)] for label in labels]
    except (IndexError, ValueError):
        raise UserError(f"{array} has labels that {len(names)} names do not name") from None


def read_header(opened: Any, what: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(opened)
        shape, fortran, dtype = HEADERS[version](opened)
    except (ValueError, KeyError) as error:
        raise UserError(f"{what} cannot be read: {error}") from None
    if dtype.hasobject or fortran or not shape or 0 in shape:
        raise UserError(f"{what} holds {dtype} {shape}; save arrays of numbers in C order that are not empty")
    return shape, dtype


def npz_rows(path: Path, member: str) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(path) as file, file.open(f"{member}.npy") as opened:
        (count, *shape), dtype = read_header(opened, f"{path}, array {member!r},")
        size = dtype.itemsize * int(np.prod(shape))
        for index in range(count):
            try:
                content = opened.read(size)
            except (OSError, zipfile.BadZipFile, EOFError) as error:
                raise UserError(f"{path}, array {member!r}, is damaged at row {index}: {error}") from None
            if len(content) < size:
                raise UserError(f"{path}, array {member!r}, ends at row {index} of {count}")
            yield np.frombuffer(content, dtype).reshape(shape)
