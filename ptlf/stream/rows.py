"""Images with their names and labels, one by one: the form to which every source of images is brought."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch

from ptlf.core.errors import UserError, short_repr
from ptlf.stream.disk import natural, quote_names


class Row(NamedTuple):
    name: str  # of a file, or "image 7"
    image: Any  # a path, bytes, a PIL image, an array or a tensor
    label: Any = None  # the name or number of its class; None: there is none


@dataclass(frozen=True)
class ImageSplit:
    """Images of one split. `read` begins from the first image at every call."""

    count: int
    read: Callable[[], Iterable[Row]]
    names: Sequence[str] | None = None  # of all classes, in order; None: they are those of the labels


def list_split(rows: Sequence[Row], names: Sequence[str] | None = None) -> ImageSplit:
    return ImageSplit(len(rows), lambda: rows, names)


def array_split(images: Any, word: str = "image", first: int = 1) -> ImageSplit:
    return ImageSplit(len(images), lambda: (Row(f"{word} {n}", image) for n, image in enumerate(images, first)))


def with_labels(part: ImageSplit, labels: Any, names: Sequence[str] | None = None) -> ImageSplit:
    """The images with these labels, which number `names` if they are given."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        labels = labels.reshape(-1).tolist()
    if len(labels) != part.count:
        raise UserError(f"there are {part.count} images and {len(labels)} labels")

    def read() -> Iterator[Row]:
        return (row._replace(label=plain_label(label)) for row, label in zip(part.read(), labels, strict=True))

    return with_names(ImageSplit(part.count, read), names)


def with_names(part: ImageSplit, names: Sequence[str] | None) -> ImageSplit:
    """Labels that number `names` become those names."""
    if names is None:
        return part

    def name(row: Row) -> Row:
        if row.label is None:
            return row
        if not isinstance(row.label, int) or row.label >= len(names):
            numbers = f"labels number its {len(names)} classes, from 0 to {len(names) - 1}"
            raise UserError(f"{row.name} has the label {short_repr(row.label)}, but {numbers}")
        return row._replace(label=names[row.label])

    return ImageSplit(part.count, lambda: map(name, part.read()), names)


def subset(part: ImageSplit, keep: np.ndarray) -> ImageSplit:
    """keep: (count,) bool."""
    return ImageSplit(int(keep.sum()), lambda: compress(part.read(), keep), part.names)


def plain_label(label: Any) -> Any:
    """A number or text; None for a negative number or NaN, with which data sets mark unlabelled images."""
    label = label.item() if hasattr(label, "item") and getattr(label, "size", 1) != 0 else label
    if label is None or isinstance(label, str):
        return label
    if not isinstance(label, int | float):
        raise UserError(f"a label must be a number or text, not a {type(label).__name__}")
    if label < 0 or math.isnan(label):
        return None
    return int(label) if label == label // 1 else label


def number_classes(
    rows: Mapping[str, Sequence[tuple[str, Any]]],
    source: str,
    names: Sequence[str] | None = None,
    counted: bool = False,
) -> tuple[Sequence[str], dict[str, np.ndarray]]:
    """The classes, and by split the number of each row's class among them.

    rows: (name, label) by split. names: the classes, where they are known; else they are those of the training images,
    sorted. counted: labels that are numbers are places in `names`, even if those look like numbers themselves.
    """
    by_place = counted or not all(name.isdecimal() for name in names or ())

    def class_of(row: str, label: Any) -> str:
        if label is None:
            raise UserError(f"{row} has no label, but others have; give all of them labels, or none")
        text = str(label)
        if names is None or (text in known and not (counted and text.isdecimal())):
            return text
        if by_place and text.isdecimal() and int(text) < len(names):
            return names[int(text)]
        raise UserError(f"{row} of {source} is of {short_repr(label)}, which is none of: {quote_names(names)}")

    known = set(names or ())
    classes = {split: [class_of(*row) for row in part] for split, part in rows.items()}
    trained = set(classes["train"])
    for part in classes.values():
        if untrained := sorted(set(part) - trained, key=natural):
            problem = f"{source} has test images of {untrained[0]!r}, of which there are no training images"
            raise UserError(f"{problem}; remove them, or add training images")
    names = sorted(trained, key=natural) if names is None else names
    places = {name: place for place, name in enumerate(names)}
    return names, {split: np.array([places[name] for name in part], np.int64) for split, part in classes.items()}


def hold_out(splits: Mapping[str, ImageSplit], fraction: float) -> dict[str, ImageSplit]:
    """A training and a test split. A fraction of 1/k holds out every k-th image of each class, others likewise."""
    if "test" in splits:
        raise UserError("test_fraction is given, but there are test images; use one of them")
    if not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction}; it must lie between 0 and 1")
    images = splits["train"]
    share, seen, held = Fraction(fraction).limit_denominator(1000), dict[Any, int](), list[bool]()
    for row in images.read():
        place = seen[row.label] = seen.get(row.label, 0) + 1
        held.append(int(place * share) > int((place - 1) * share))
    if not any(held):
        raise UserError(f"test_fraction {fraction} leaves no test image; give another")
    return {"train": subset(images, ~np.array(held)), "test": subset(images, np.array(held))}
