"""Images in .npy and .npz files, read one by one: a file may be larger than the memory."""

import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.stream.pack import quote_names
from ptlf.stream.rows import Classes, ImageSplit, Row, labelled_rows, numbered, plain_labels

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


def given_npz(path: Path) -> dict[str, ImageSplit]:
    """The arrays are read image by image: a file may be larger than the memory."""
    try:
        with zipfile.ZipFile(path) as file:
            inside = [name.removesuffix(".npy") for name in file.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no readable .npz file: {error}") from None
    found: dict[str, ImageSplit] = {}
    numbering = Classes(str(path))
    names = [str(name) for name in npz_rows(path, "names")] if "names" in inside else None
    for split, choices in ARRAYS.items():
        pair = next(((images, labels) for images, labels in choices if images in inside), None)
        if pair is None:
            continue
        images, labels = pair
        count = header_of(path, images)[0][0]
        part = ImageSplit(count, partial(npz_images, path, images))
        if labels in inside:
            values = named_labels(path, labels, names)
            for label in dict.fromkeys(value for value in values if value is not None):
                numbering.number(split, str(path), label, None)
            part = labelled_rows(part, values)
        found[split] = part
    if "train" not in found:
        wanted = quote_names(images for images, _ in ARRAYS["train"])
        raise UserError(f"{path} has no array called {wanted}; it has: {quote_names(inside)}")
    return found


def named_labels(path: Path, member: str, names: Sequence[str] | None) -> list[Any]:
    """The labels in an .npz file; with `names`, the names that they number."""
    labels = plain_labels(np.array(list(npz_rows(path, member))))
    if names is None:
        return labels
    try:
        return [None if label is None else names[int(label)] for label in labels]
    except (IndexError, ValueError):
        raise UserError(f"{path}: array {member!r} has labels that {len(names)} names do not name") from None


def header_of(path: Path, member: str) -> tuple[tuple[int, ...], np.dtype]:
    with zipfile.ZipFile(path) as file, file.open(f"{member}.npy") as opened:
        return read_header(opened, f"{path}, array {member!r},")


def read_header(opened: Any, what: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(opened)
        shape, fortran, dtype = HEADERS[version](opened)
    except (ValueError, KeyError) as error:
        raise UserError(f"{what} cannot be read: {error}") from None
    if dtype.hasobject or fortran or not shape or 0 in shape:
        raise UserError(f"{what} holds {dtype} {shape}; save arrays of numbers in C order that are not empty")
    return shape, dtype


def npz_images(path: Path, member: str) -> Iterator[Row]:
    return numbered(npz_rows(path, member))


def npz_rows(path: Path, member: str) -> Iterator[Any]:
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
