"""One reader of images in whatever form people have them.

A path (a folder, a packed set, an .npz or .npy file, Parquet or Arrow files), a uint8 array, a list of paths, pictures
or arrays, a torch `Dataset` or a Hugging Face dataset.
"""

import itertools
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.dataset_files import dataset_files, open_dataset_files
from ptlf.stream.decode import CHANNELS
from ptlf.stream.disk import image_files, not_an_image, note_passed, quote_names
from ptlf.stream.pack import Pack, open_pack
from ptlf.stream.rows import (
    IMAGE_KEYS,
    LABEL_KEYS,
    ImageSplit,
    Row,
    array_split,
    list_split,
    plain_label,
    plain_labels,
    with_labels,
)

FORMS = "a folder of images, a packed set, an .npz or .npy file, a Hugging Face `save_to_disk` folder or .parquet files"
SHARDS = 'ptlf.pack_images(datasets.load_dataset("webdataset", data_files=[...], split="train"), TARGET, SIZE)'
# Arrays of an .npz file: (images, labels) by split, as numpy users, MedMNIST and Keras name them.
# `names`, if it is there, has the classes that labels number.
ARRAYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("arr_0", "arr_1")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
DAMAGED = (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


def open_images(images: Any) -> dict[str, ImageSplit]:
    """By split: "train", and "test" if a path has test images too."""
    if isinstance(images, str | os.PathLike):
        return open_path(Path(images))
    if isinstance(images, tuple) and len(images) == 2 and is_labels(images[1], images[0]):
        return {"train": with_labels(open_images(images[0])["train"], plain_labels(images[1]))}
    if isinstance(images, Mapping) and "train" in images:
        tests = [images[key] for key in ("test", "validation") if key in images]
        parts = zip(("train", "test"), (images["train"], *tests), strict=False)
        return {split: open_images(part)["train"] for split, part in parts}
    if isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim != 4 and (images.ndim != 3 or images.shape[2] in CHANNELS):
            shape = tuple(images.shape)
            raise UserError(f"an array of images must be (N, H, W, 3), not {shape}; for one image, give [image]")
        if len(images) == 0:
            raise UserError("the array holds no images")
        return {"train": array_split(images)}
    if not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        kinds = "a path, an array (N, H, W, 3), a list or a data set with a length"
        raise UserError(f"images cannot be read from a {type(images).__name__}; give {kinds}")
    if len(images) == 0:
        raise UserError(f"{describe_source(images)} holds no images")
    count = len(images)

    def rows() -> Iterator[Row]:
        return (to_row(images[index], index) for index in range(count))

    return {"train": ImageSplit(count, rows, class_names(images, next(rows())))}


def open_path(path: Path) -> dict[str, ImageSplit]:
    if (path / "pack.json").is_file():
        return pack_splits(open_pack(path.absolute().parent, path.absolute().name))
    if not path.exists():
        raise UserError(f"there is no folder or file {path}")
    if dataset_files(path):
        return open_dataset_files(path)
    if path.is_dir():
        return folder_splits(path)
    if path.suffix == ".npy":
        try:
            return open_images(np.load(path, mmap_mode="r", allow_pickle=False))
        except DAMAGED as error:
            raise UserError(f"{path} is no readable .npy file: {error}") from None
    if path.suffix == ".npz":
        return npz_splits(path)
    if ".tar" in path.suffixes:
        raise UserError(f"{path} is not read here; for WebDataset shards, use {SHARDS}")
    if Image.registered_extensions().get(path.suffix.lower()):
        return {"train": list_split([Row(path.name, path)])}
    raise UserError(f"{path} holds no images that can be read; give {FORMS}")


def npz_splits(path: Path) -> dict[str, ImageSplit]:
    try:
        with np.load(path, allow_pickle=False) as file:
            used = {name for pairs in ARRAYS.values() for pair in pairs for name in pair} | {"names"}
            members, arrays = file.files, {name: file[name] for name in file.files if name in used}
    except DAMAGED as error:
        raise UserError(f"{path} is no readable .npz file: {error}") from None
    splits: dict[str, ImageSplit] = {}
    for split, choices in ARRAYS.items():
        if pair := next((pair for pair in choices if pair[0] in arrays), None):
            splits[split] = open_images(arrays[pair[0]])["train"]
            if pair[1] in arrays:
                labels = plain_labels(arrays[pair[1]])
                if "names" in arrays:
                    labels = named(labels, [str(name) for name in arrays["names"]], f"{path}: {pair[1]!r}")
                splits[split] = with_labels(splits[split], labels)
    if "train" not in splits:
        wanted = quote_names(images for images, _ in ARRAYS["train"])
        raise UserError(f"{path} has no array called {wanted}; it has: {quote_names(members)}")
    return splits


def named(labels: list[Any], names: list[str], array: str) -> list[Any]:
    """The names that the labels number."""
    try:
        return [None if label is None else names[int(label)] for label in labels]
    except (IndexError, ValueError):
        raise UserError(f"{array} has labels that {len(names)} names do not name") from None


def describe_source(images: Any) -> str:
    return str(images) if isinstance(images, str | os.PathLike) else f"a {type(images).__name__}"


def find_images(value: str, root: Path) -> Path:
    """A path, or the name of a packed set in the data root."""
    if (path := Path(value).expanduser()).exists():
        return path
    if (root / value / "pack.json").is_file():
        return root / value
    raise UserError(f"there is no folder or file {value}, and no packed set of that name in {root}")


def is_image_folder(path: Path) -> bool:
    """Whether its images are files below it."""
    return path.is_dir() and not (path / "pack.json").is_file() and not dataset_files(path)


def own_side(images: Any) -> int | None:
    """The shorter side, in pixels, of the first image of a packed set or of arrays; None for image files, whose sizes
    may differ."""
    if isinstance(images, str | os.PathLike) and is_image_folder(Path(images)):
        return None
    first = next(iter(open_images(images)["train"].read())).image
    return min(sorted(first.shape)[-2:]) if isinstance(first, np.ndarray | torch.Tensor) else None


def folder_splits(path: Path) -> dict[str, ImageSplit]:
    """All files below it; `train/` and `test/` (or `val/`), if it has both, are splits. If all images lie in folders,
    those are the classes: the first folder below the given one, or the second if the first is a split."""
    classes = folder_of_folders(path)
    tests = [name for name in ("test", "val") if (path / name).is_dir()]
    trees = {"train": path}
    if (path / "train").is_dir() and tests:
        trees = {"train": path / "train", "test": path / tests[0]}

    def file_row(file: Path) -> Row:
        inside = file.relative_to(path)
        in_split = inside.parts[0] in ("train", "test", "val") and len(inside.parts) > 2
        parts = inside.parts[1:] if in_split else inside.parts
        return Row(inside.as_posix(), file, parts[0] if classes and len(parts) > 1 else None)

    passed: list[Path] = []
    splits = {
        split: list_split([file_row(file) for file in image_files(tree, passed)]) for split, tree in trees.items()
    }
    note_passed(path, passed)
    return splits


def folder_of_folders(path: Path) -> bool:
    """Whether all images lie in folders."""
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    folders = [entry.is_dir() for entry in entries if entry.is_dir() or not not_an_image(entry.name)]
    return bool(folders) and all(folders)


def pack_splits(pack: Pack) -> dict[str, ImageSplit]:
    """A set with a folder per task is unlabelled."""
    classes = pack.folders == "classes"

    def rows(split: str) -> Iterator[Row]:
        labels = pack.labels(split).tolist() if classes else itertools.repeat(None)
        for index, (image, label) in enumerate(zip(pack.images(split), labels, strict=False)):
            yield Row(f"{split} {index}", image, label)

    names = pack.names if classes else None
    return {split: ImageSplit(part.count, partial(rows, split), names) for split, part in pack.splits.items()}


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


def is_labels(labels: Any, images: Any) -> bool:
    """Whether the second of a pair can be the labels of the first."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        return labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)
    plain = isinstance(labels, list | tuple) and all(isinstance(label, str | int | float) for label in labels)
    return plain and hasattr(images, "__len__")


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
