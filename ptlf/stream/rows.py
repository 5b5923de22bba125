"""Images with their names and labels, one by one: the form to which every source of images is brought."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from ptlf.core.errors import UserError
from ptlf.core.words import short_repr
from ptlf.stream.disk import quote_names

# Of rows that are dictionaries, and of columns.
IMAGE_KEYS = ("image", "img", "jpg", "png")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class")


class Row(NamedTuple):
    name: str  # of a file, or "image 7"
    image: Any  # a path, bytes, a PIL image, an array or a tensor
    label: Any = None  # None: there is none


@dataclass(frozen=True)
class ImageSplit:
    """Images of one split. `read` begins from the first image at every call."""

    count: int
    read: Callable[[], Iterable[Row]]
    names: Sequence[str] | None = None  # of the classes, which labels number; None: labels are names
    labels: Sequence[Any] | None = None  # of all rows, where they are known without reading images

    def all_labels(self) -> Sequence[Any]:
        return [row.label for row in self.read()] if self.labels is None else self.labels


def list_split(rows: Sequence[Row]) -> ImageSplit:
    return ImageSplit(len(rows), lambda: rows, labels=[row.label for row in rows])


def array_split(images: Any) -> ImageSplit:
    def read() -> Iterator[Row]:
        return (Row(f"image {index + 1}", image) for index, image in enumerate(images))

    return ImageSplit(len(images), read)


def with_labels(part: ImageSplit, labels: Sequence[Any], names: Sequence[str] | None = None) -> ImageSplit:
    """The images with these labels beside them."""
    if len(labels) != part.count:
        raise UserError(f"there are {part.count} images and {len(labels)} labels")

    def read() -> Iterator[Row]:
        return (row._replace(label=label) for row, label in zip(part.read(), labels, strict=True))

    return ImageSplit(part.count, read, names, labels)


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


def plain_labels(labels: Any) -> list[Any]:
    values = labels.reshape(-1).tolist() if isinstance(labels, np.ndarray | torch.Tensor) else labels
    return [plain_label(label) for label in values]


class Classes:
    """Numbers the labels of the training images and then those of the test images, by the same classes.

    `names` are the classes, where they are known. Else they are those of the training images, in the order in which
    they come; `renumber` sorts them.
    """

    def __init__(self, source: str, names: Sequence[str] | None = None, *, counted: bool = False) -> None:
        """counted: labels that are numbers are places in `names`, whatever the set itself calls its classes."""
        self.source, self.known = source, names is not None
        self.names: list[str] = [*(names or ())]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.labels: list[Any] = [*self.names]
        self.by_place = counted or not all(name.isdecimal() for name in self.names)
        self.trained: set[int] = set()  # numbers of the classes of which there are training images

    def number(self, split: str, row: str, label: Any, names: Sequence[str] | None) -> int:
        """Of the label that a row of `split` has. names: those that labels of its set number."""
        if label is None:
            raise UserError(f"{row} has no label, but others have; give all of them labels, or none")
        if names is not None:
            if not isinstance(label, int) or label >= len(names):
                numbers = f"labels number its {len(names)} classes, from 0 to {len(names) - 1}"
                raise UserError(f"{row} has the label {short_repr(label)}, but {numbers}")
            label = names[label]
        place = self.place(label)
        if place is None and self.known:
            classes = quote_names(self.names)
            raise UserError(f"{row} of {self.source} is of {short_repr(label)}, which is none of: {classes}")
        if place is None and split == "train":
            place = self.places[str(label)] = len(self.names)
            self.names.append(str(label))
            self.labels.append(label)
        if split == "train" and place is not None:
            self.trained.add(place)
        if place is None or place not in self.trained:
            name = str(label) if place is None else self.names[place]
            problem = f"{self.source} has test images of {name!r}, of which there are no training images"
            raise UserError(f"{problem}; remove them, or add training images")
        return place

    def place(self, label: Any) -> int | None:
        text = str(label)
        if self.known and self.by_place and text.isdecimal():
            return int(text) if len(text) < 10 and int(text) < len(self.names) else None
        return self.places.get(text)

    def renumber(self, key: Callable[[Any], Any]) -> np.ndarray:
        """Sort classes that were not known before, by the key of their labels: the new number of each."""
        order = [*range(len(self.names))]
        if not self.known:
            order.sort(key=lambda place: key(self.labels[place]))
        self.names[:] = [self.names[place] for place in order]
        return np.argsort(np.array(order, np.int64))


def by_value(label: Any) -> tuple[bool, Any]:
    """Sort key of labels: numbers by value and before text."""
    return isinstance(label, str), label


def hold_out(images: ImageSplit, fraction: float) -> dict[str, ImageSplit]:
    """A training and a test split. A fraction of 1/k holds out every k-th image of each class; other fractions are
    spaced as evenly as possible."""
    if not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction}; it must lie between 0 and 1")
    share, seen, held = Fraction(fraction).limit_denominator(1000), dict[Any, int](), list[bool]()
    labels = images.all_labels()
    for label in labels:
        place = seen[label] = seen.get(label, 0) + 1
        held.append(int(place * share) > int((place - 1) * share))
    if all(held) or not any(held):
        raise UserError(f"test_fraction {fraction} leaves no {'train' if all(held) else 'test'} image; give another")

    def part(test: bool) -> ImageSplit:
        def read() -> Iterator[Row]:
            return (row for row, is_test in zip(images.read(), held, strict=True) if is_test == test)

        kept = [label for label, is_test in zip(labels, held, strict=True) if is_test == test]
        return ImageSplit(len(kept), read, images.names, kept)

    return {"train": part(False), "test": part(True)}
