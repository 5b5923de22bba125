"""Images with their names and labels, one by one: the common form of all that people have."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from ptlf.core.errors import UserError

# Of rows that are dictionaries, and of columns.
IMAGE_KEYS = ("image", "img", "jpg", "png")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class")
CHANNELS = (1, 3, 4)


class Row(NamedTuple):
    name: str  # of a file, or "image 7"
    image: Any  # a path, bytes, a PIL image, an array or a tensor
    label: Any = None  # None: there is none


@dataclass(frozen=True)
class Given:
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


def labelled_rows(part: Given, labels: Sequence[Any], classes: Iterable[Any] | None = None) -> Given:
    """With labels beside the images; classes, by default those of the labels, are sorted, numbers by value."""
    if len(labels) != part.count:
        raise UserError(f"there are {part.count} images and {len(labels)} labels")
    known = {label for label in labels if label is not None} if classes is None else classes
    kinds = sorted(known, key=lambda label: (isinstance(label, str), label))
    names = [str(kind) for kind in kinds]
    numbers = {kind: number for number, kind in enumerate(kinds)}

    def rows() -> Iterator[Row]:
        for row, label in zip(part.read(), labels, strict=True):
            yield row._replace(label=None if label is None else numbers[label])

    return Given(part.count, rows, names or None)


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


def hold_out(images: Given, fraction: float) -> dict[str, Given]:
    """A fraction of 1/k holds out every k-th image of each class, as `ptlf data pack --test-fraction` does."""
    if not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction}; it must lie between 0 and 1")
    share = Fraction(fraction).limit_denominator(1000)
    seen: dict[Any, int] = {}
    held = []
    for row in images.read():
        place = seen[row.label] = seen.get(row.label, 0) + 1
        held.append(int(place * share) > int((place - 1) * share))
    if all(held) or not any(held):
        raise UserError(f"test_fraction {fraction} leaves no {'train' if all(held) else 'test'} image")

    def part(test: bool) -> Given:
        def read() -> Iterator[Row]:
            return (row for row, is_test in zip(images.read(), held, strict=True) if is_test == test)

        return Given(held.count(test), read, images.names)

    return {"train": part(False), "test": part(True)}
