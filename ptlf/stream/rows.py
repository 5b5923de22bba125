"""Images with their names and labels, one by one: the common form of all that people have."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ptlf.core.errors import UserError
from ptlf.core.words import short_repr
from ptlf.stream.folders import held_out
from ptlf.stream.pack import quote_names

# Of rows that are dictionaries, and of columns.
IMAGE_KEYS = ("image", "img", "jpg", "png")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class")
CHANNELS = (1, 3, 4)


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


def to_row(item: Any, index: int) -> Row:
    """An image, a pair (image, label), or a dictionary with an image and perhaps a label."""
    name = f"image {index + 1}"
    if isinstance(item, str | os.PathLike):
        return Row(str(item), item)
    if isinstance(item, Mapping) and not {"bytes", "path"} & item.keys():
        image = next((key for key in IMAGE_KEYS if key in item), None)
        if image is None:
            raise UserError(f"{name} is a row without {' or '.join(IMAGE_KEYS)}; it has: {', '.join(map(str, item))}")
        label = next((item[key] for key in LABEL_KEYS if key in item), None)
        return Row(name, item[image], plain_label(label))
    if isinstance(item, tuple | list) and len(item) >= 2:
        return Row(name, item[0], plain_label(item[1]))
    return Row(name, item)


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


def is_labels(labels: Any, images: Any) -> bool:
    """Whether the second of a pair can be the labels of the first."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        return labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)
    plain = isinstance(labels, list | tuple) and all(isinstance(label, str | int | float) for label in labels)
    return plain and hasattr(images, "__len__")


def labelled_rows(part: ImageSplit, labels: Sequence[Any]) -> ImageSplit:
    """With labels beside the images."""
    if len(labels) != part.count:
        raise UserError(f"there are {part.count} images and {len(labels)} labels")

    def rows() -> Iterator[Row]:
        return (row._replace(label=label) for row, label in zip(part.read(), labels, strict=True))

    return ImageSplit(part.count, rows)


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
        if place is None and (self.known or split == "train"):
            if self.known:
                raise UserError(
                    f"{row} of {self.source} is of {short_repr(label)}, which is none of: {quote_names(self.names)}"
                )
            place = self.places[str(label)] = len(self.names)
            self.names.append(str(label))
            self.labels.append(label)
        if split == "train" and place is not None:
            self.trained.add(place)
        if place not in self.trained:
            name = str(label) if place is None else self.names[place]
            found = f"{self.source} has test images of {name!r}, of which there are no training images"
            raise UserError(f"{found}; remove them, or add training images")
        return place

    def place(self, label: Any) -> int | None:
        text = str(label)
        if self.known and self.by_place and text.isdecimal():
            return int(text) if len(text) < 10 and int(text) < len(self.names) else None
        return self.places.get(text)

    def renumber(self, key: Callable[[Any], Any] = lambda label: (isinstance(label, str), label)) -> np.ndarray:
        """Sort classes that were not known before, numbers by value and before text: the new number of each."""
        order = [*range(len(self.names))]
        if not self.known:
            order.sort(key=lambda place: key(self.labels[place]))
        self.names[:] = [self.names[place] for place in order]
        return np.argsort(np.array(order, np.int64))


def class_names(images: Any, first: Row) -> Sequence[str] | None:
    """Of a Hugging Face data set (`features["label"].names`) or one of torchvision's (`classes`)."""
    features = getattr(images, "features", None)
    if isinstance(features, Mapping):
        key = next((key for key in LABEL_KEYS if key in features), None)
        names = getattr(features[key], "names", None) if key else None
    else:
        names = getattr(images, "classes", None)
    numbers = isinstance(names, list | tuple) and isinstance(first.label, int)
    return [str(name) for name in names] if numbers and names else None


def numbered(images: Iterable[Any]) -> Iterator[Row]:
    return (Row(f"image {index + 1}", image) for index, image in enumerate(images))


def hold_out(images: ImageSplit, fraction: float) -> dict[str, ImageSplit]:
    held = held_out((row.label for row in images.read()), fraction)
    if all(held) or not any(held):
        raise UserError(f"test_fraction {fraction} leaves no {'train' if all(held) else 'test'} image")

    def part(test: bool) -> ImageSplit:
        def read() -> Iterator[Row]:
            return (row for row, is_test in zip(images.read(), held, strict=True) if is_test == test)

        return ImageSplit(held.count(test), read, images.names)

    return {"train": part(False), "test": part(True)}
