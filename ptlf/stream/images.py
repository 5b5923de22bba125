"""Images in whatever form people have them, recognised and read one by one.

A path (a folder, a packed set, an .npz or .npy file, a Hugging Face data set on disk, .parquet files, WebDataset
shards), a uint8 array, a list of paths, pictures or arrays, a torch `Dataset` or a Hugging Face dataset.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.arrays import given_npz, load_npy
from ptlf.stream.disk import disk_errors, images_below, not_an_image, note_passed
from ptlf.stream.pack import Pack, open_pack
from ptlf.stream.rows import (
    CHANNELS,
    ImageSplit,
    Row,
    class_names,
    is_labels,
    labelled_rows,
    numbered,
    plain_labels,
    to_row,
)
from ptlf.stream.shards import given_shards, shard_files
from ptlf.stream.tables import given_tables, table_files

FORMS = (
    "a folder of images, a packed set, an .npz or .npy file, a folder of a Hugging Face `save_to_disk`, .parquet files "
    "or WebDataset shards (.tar)"
)


def open_images(images: Any) -> dict[str, ImageSplit]:
    """By split: "train", and "test" if a path has test images too."""
    if isinstance(images, str | os.PathLike):
        return given_path(Path(images))
    if isinstance(images, tuple) and len(images) == 2 and is_labels(images[1], images[0]):
        return {"train": labelled_rows(open_images(images[0])["train"], plain_labels(images[1]))}
    if isinstance(images, Mapping) and "train" in images:
        tests = [images[key] for key in ("test", "validation") if key in images]
        parts = zip(("train", "test"), (images["train"], *tests), strict=False)
        return {split: open_images(part)["train"] for split, part in parts}
    if isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim != 4 and (images.ndim != 3 or images.shape[2] in CHANNELS):
            shape = tuple(images.shape)
            raise UserError(f"an array of images must be (N, H, W, 3), not {shape}; for one image, give [image]")
        return {"train": ImageSplit(len(images), lambda: numbered(images))}
    if not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        kinds = "a path, an array (N, H, W, 3), a list or a data set with a length"
        raise UserError(f"images cannot be read from a {type(images).__name__}; give {kinds}")
    if len(images) == 0:
        raise UserError(f"{describe_source(images)} holds no images")
    count = len(images)

    def rows() -> Iterator[Row]:
        return (to_row(images[index], index) for index in range(count))

    return {"train": ImageSplit(count, rows, class_names(images, next(rows())))}


def describe_source(images: Any) -> str:
    return str(images) if isinstance(images, str | os.PathLike) else f"a {type(images).__name__}"


def find_images(value: str, root: Path) -> Path:
    """A path, or the name of a packed set in the data root."""
    if (path := Path(value).expanduser()).exists():
        return path
    if (root / value / "pack.json").is_file():
        return root / value
    raise UserError(
        f"{value} is neither a folder or file here nor a packed set in {root}; `ptlf data list` names those"
    )


def given_path(path: Path) -> dict[str, ImageSplit]:
    if (path / "pack.json").is_file():
        return given_pack(open_pack(path.absolute().parent, path.absolute().name))
    if not path.exists():
        raise UserError(f"there is no folder or file {path}")
    if table_files(path):
        return given_tables(path)
    if shard_files(path):
        return given_shards(path)
    if path.is_dir():
        return given_folder(path)
    if path.suffix == ".npy":
        return open_images(load_npy(path))
    if path.suffix == ".npz":
        return given_npz(path)
    if Image.registered_extensions().get(path.suffix.lower()):
        return {"train": ImageSplit(1, lambda: [Row(path.name, path)])}
    raise UserError(f"{path} holds no images that can be read; give {FORMS}")


def given_folder(path: Path) -> dict[str, ImageSplit]:
    """All files below it; `train/` and `test/` (or `val/`), if it has both, are splits."""
    classes = folder_of_folders(path)
    tests = [name for name in ("test", "val") if (path / name).is_dir()]
    trees = {"train": path}
    if (path / "train").is_dir() and tests:
        trees = {"train": path / "train", "test": path / tests[0]}

    passed: list[Path] = []

    def part(tree: Path) -> ImageSplit:
        files = image_files(tree, passed)
        return ImageSplit(len(files), lambda: (file_row(file, path, classes) for file in files))

    parts = {split: part(tree) for split, tree in trees.items()}
    note_passed(path, passed)
    return parts


def own_side(images: Any) -> int | None:
    """The shorter side, in pixels, of the first image of a packed set or of arrays; files say nothing of the others."""
    if isinstance(images, str | os.PathLike) and is_image_folder(Path(images)):
        return None
    first = next(iter(open_images(images)["train"].read())).image
    return min(sorted(first.shape)[-2:]) if isinstance(first, np.ndarray | torch.Tensor) else None


def is_image_folder(path: Path) -> bool:
    """Whether its images are files below it."""
    packed = (path / "pack.json").is_file()
    return path.is_dir() and not packed and not table_files(path) and not shard_files(path)


def folder_of_folders(path: Path) -> bool:
    """Whether all images lie in folders: then those are the classes."""
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    folders = [entry.is_dir() for entry in entries if entry.is_dir() or not not_an_image(entry.name)]
    return bool(folders) and all(folders)


def image_files(path: Path, passed: list[Path]) -> list[Path]:
    """passed: takes the files that are no images by their ending."""
    with disk_errors(path):
        files = images_below(path, passed)
    if not files:
        raise UserError(f"{path} holds no images")
    return files


def file_row(file: Path, folder: Path, classes: bool) -> Row:
    """The class is the first folder below the given one, or the second if the first is a split."""
    inside = file.relative_to(folder)
    parts = inside.parts[1:] if inside.parts[0] in ("train", "test", "val") and len(inside.parts) > 2 else inside.parts
    return Row(inside.as_posix(), file, parts[0] if classes and len(parts) > 1 else None)


def given_pack(pack: Pack) -> dict[str, ImageSplit]:
    """A set with a folder per task is unlabelled."""

    def rows(split: str) -> Iterator[Row]:
        labels = pack.labels(split) if pack.folders == "classes" else itertools.repeat(None)
        for index, (image, label) in enumerate(zip(pack.images(split), labels, strict=False)):
            yield Row(f"{split} {index}", image, None if label is None else int(label))

    names = pack.names if pack.folders == "classes" else None
    return {split: ImageSplit(part.count, partial(rows, split), names) for split, part in pack.splits.items()}
