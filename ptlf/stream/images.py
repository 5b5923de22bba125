"""One reader of images in whatever form people have them: `FORMS`, arrays, lists, data sets of libraries."""

import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ptlf.core.errors import UserError, import_optional, info, short_repr
from ptlf.core.files import check_regular, open_regular
from ptlf.core.reading import explain
from ptlf.stream.decode import CHANNELS, formats
from ptlf.stream.disk import files_below, image_files, natural, not_an_image, quote_names, subfolders
from ptlf.stream.pack import open_pack
from ptlf.stream.rows import ImageSplit, Row, array_split, list_split, plain_label, with_labels, with_names

FORMS = "a folder of images, a packed set, an .npz or .npy file, a Hugging Face `save_to_disk` folder or .parquet files"
# Of rows that are dictionaries, and of columns.
IMAGE_KEYS = ("image", "img", "jpg", "png")
LABEL_KEYS = ("label", "labels", "fine_label", "cls", "class")
# Arrays of an .npz file: (images, labels) by split, as numpy users, MedMNIST and Keras name them.
# `names`, if it is there, has the classes that labels number.
ARRAYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("arr_0", "arr_1")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
SAVED = ("state.json", "dataset_dict.json")  # in a folder of `save_to_disk`
TESTS = ("test", "val", "validation", "valid", "dev")
ROWS_READ = 64  # of a Parquet file at a time


def open_images(images: Any) -> dict[str, ImageSplit]:
    """By split: "train", and "test" if a path has test images too."""
    if isinstance(images, str | os.PathLike):
        return open_path(Path(images))
    if isinstance(images, tuple) and len(images) == 2 and is_labels(images[1], images[0]):
        return {"train": with_labels(open_images(images[0])["train"], images[1])}
    if isinstance(images, Mapping) and "train" in images:
        tests = [images[key] for key in ("test", "validation") if key in images]
        parts = zip(("train", "test"), (images["train"], *tests), strict=False)
        return {split: open_images(part)["train"] for split, part in parts}
    if array := isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim != 4 and (images.ndim != 3 or images.shape[2] in CHANNELS):
            shape = tuple(images.shape)
            raise UserError(f"an array of images must be (N, H, W, 3), not {shape}; for one image, give [image]")
    elif not hasattr(images, "__len__") or not hasattr(images, "__getitem__") or isinstance(images, Mapping):
        kinds = "a path, an array (N, H, W, 3), a list or a data set with a length"
        raise UserError(f"images cannot be read from a {type(images).__name__}; give {kinds}")
    if len(images) == 0:
        raise UserError(f"a {type(images).__name__} holds no images")
    if array:
        return {"train": array_split(images)}

    def read() -> Iterator[Row]:
        return (to_row(images[index], f"image {index + 1}", features) for index in range(len(images)))

    features = getattr(images, "features", None)  # of a Hugging Face data set; one of torchvision's has `classes`
    names = class_names(features) if isinstance(features, Mapping) else getattr(images, "classes", None)
    if not isinstance(names, list | tuple) or not names or not isinstance(next(read()).label, int):
        return {"train": ImageSplit(len(images), read)}
    return {"train": with_names(ImageSplit(len(images), read), [str(name) for name in names])}


def open_path(path: Path) -> dict[str, ImageSplit]:
    if (path / "pack.json").is_file():
        pack = open_pack(path.absolute().parent, path.absolute().name)
        splits = {split: array_split(pack.images(split), split, first=0) for split in pack.splits}
        if pack.folders == "tasks":
            return splits
        return {split: with_labels(part, pack.labels(split), pack.names) for split, part in splits.items()}
    if not path.exists():
        raise UserError(f"there is no folder or file {path}")
    if is_saved(path):
        return {split: within(part, path) for split, part in open_images(load_saved(path)).items()}
    if files := parquet_files(path):
        folder = path if path.is_dir() else path.parent
        return {split: within(parquet_split(part), folder) for split, part in files.items()}
    if path.is_dir():
        return folder_splits(path)
    if path.suffix == ".npy":
        with readable(path, ".npy"):
            check_regular(path)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        return open_images(array)
    if path.suffix == ".npz":
        return npz_splits(path)
    if Image.registered_extensions().get(path.suffix.lower(), "").replace("MPO", "JPEG") in formats():
        return {"train": list_split([Row(path.name, path)])}
    raise UserError(f"{path} holds no images that can be read; give {FORMS}")


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is no readable {kind} file: {explain(error)}") from None


def npz_splits(path: Path) -> dict[str, ImageSplit]:
    with readable(path, ".npz"), open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
        used = {name for pairs in ARRAYS.values() for pair in pairs for name in pair} | {"names"}
        members, arrays = file.files, {name: file[name] for name in file.files if name in used}
    names = [str(name) for name in arrays["names"]] if "names" in arrays else None
    splits: dict[str, ImageSplit] = {}
    for split, choices in ARRAYS.items():
        if pair := next((pair for pair in choices if pair[0] in arrays), None):
            splits[split] = open_images(arrays[pair[0]])["train"]
            if pair[1] in arrays:
                splits[split] = with_labels(splits[split], arrays[pair[1]], names)
    if "train" not in splits:
        wanted = quote_names(images for images, _ in ARRAYS["train"])
        raise UserError(f"{path} has no array called {wanted}; it has: {quote_names(members)}")
    return splits


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED)


def load_saved(path: Path) -> Any:
    """What `save_to_disk` wrote, with images as the bytes of their files."""
    datasets = import_optional("datasets", f"reading {path}", "datasets")
    with readable(path, "`save_to_disk`"):
        check_regular(*files_below(path))
        found = datasets.load_from_disk(str(path))
    parts = found if isinstance(found, dict) else {"train": found}
    for split, part in parts.items():
        for name in [name for name, feature in part.features.items() if isinstance(feature, datasets.Image)]:
            parts[split] = parts[split].cast_column(name, datasets.Image(decode=False))
    return parts


def parquet_files(path: Path) -> dict[str, list[Path]]:
    """A Parquet file, or those of a folder and its `train`, `test` and `data`, by split; none beside images."""
    if not path.is_dir():
        return {"train": [path]} if path.suffix.lower() == ".parquet" else {}
    inside = subfolders(path)
    if not {*inside} <= {"train", "data", *TESTS}:
        return {}
    below = [entry for folder in (path, *(path / name for name in inside)) for entry in folder.glob("[!.]*")]
    if any(entry.suffix.lower() in Image.registered_extensions() for entry in below):
        return {}
    groups: dict[str, list[Path]] = {}
    for file in sorted(below, key=lambda file: natural(str(file))):
        if file.suffix.lower() == ".parquet":
            words = re.split("[^a-z]+", str(file.relative_to(path)).lower())
            groups.setdefault(next((word for word in ("train", *TESTS) if word in words), "train"), []).append(file)
    parts = [groups[word] for word in ("train", *TESTS) if word in groups]
    return dict(zip(("train", "test"), parts, strict=False))


def parquet_split(files: Sequence[Path]) -> ImageSplit:
    datasets = import_optional("datasets", f"reading {files[0].name}", "datasets")
    parquet = import_optional("pyarrow.parquet", f"reading {files[0].name}", "datasets")

    def read() -> Iterator[Row]:
        for file in files:
            with readable(file, "Parquet"):
                batches = parquet.ParquetFile(file).iter_batches(ROWS_READ)
                rows = (row for batch in batches for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield to_row(row, f"{file.name}, row {number}", features)

    count = 0
    for file in files:
        with readable(file, "Parquet"):
            check_regular(file)
            opened = parquet.ParquetFile(file)
            count, features = count + opened.metadata.num_rows, datasets.Features.from_arrow_schema(opened.schema_arrow)
    if not count:
        raise UserError(f"{files[0]} holds no images: it has no rows")
    return with_names(ImageSplit(count, read), class_names(features))


def within(part: ImageSplit, folder: Path) -> ImageSplit:
    """Files that the rows name are looked for in the folder: a table of a stranger's could name any of this machine."""

    def check(row: Row) -> Row:
        image = row.image
        if isinstance(image, Mapping) and not image.get("bytes"):
            image = image.get("path")
        if not isinstance(image, str) or "\0" in image:
            return row
        if not (folder / image).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{row.name} names the file {short_repr(image)}, which is not in {folder}; pack the images")
        return row._replace(image=folder / image)

    return replace(part, read=lambda: map(check, part.read()))


def to_row(item: Any, name: str, features: Mapping[str, Any] | None = None) -> Row:
    """An image, a pair (image, label), or a dictionary with an image and perhaps a label."""
    if isinstance(item, str | os.PathLike):
        return Row(str(item), item)
    if isinstance(item, Mapping) and not {"bytes", "path"} & item.keys():
        kinds = [key for key, feature in (features or {}).items() if type(feature).__name__ == "Image"]
        image = next((key for key in (*kinds, *IMAGE_KEYS) if key in item), None)
        if image is None:
            raise UserError(f"{name} is a row without {' or '.join(IMAGE_KEYS)}; it has: {', '.join(map(str, item))}")
        label = label_column(features or item)
        return Row(name, item[image], plain_label(item[label]) if label else None)
    if isinstance(item, tuple | list) and len(item) >= 2:
        return Row(name, item[0], plain_label(item[1]))
    return Row(name, item)


def label_column(columns: Mapping[str, Any]) -> str | None:
    named = [key for key, feature in columns.items() if hasattr(feature, "names")]
    return next((key for key in (*LABEL_KEYS, *named) if key in columns), None)


def class_names(features: Mapping[str, Any]) -> list[str] | None:
    label = label_column(features)
    return getattr(features[label], "names", None) if label else None


def is_labels(labels: Any, images: Any) -> bool:
    """Whether the second of a pair can be the labels of the first."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        return labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)
    plain = isinstance(labels, list | tuple) and all(isinstance(label, str | int | float) for label in labels)
    return plain and hasattr(images, "__len__")


def folder_splits(path: Path) -> dict[str, ImageSplit]:
    """All files below it, or below its `train` and `test`. If all images lie in folders, those are the classes."""
    trees = split_folders(path)
    classes = folder_of_folders(trees["train"])

    def file_row(file: Path, tree: Path) -> Row:
        first, *rest = file.relative_to(tree).parts
        return Row(file.relative_to(path).as_posix(), file, first if classes and rest else None)

    return {split: list_split([file_row(file, tree) for file in image_files(tree)]) for split, tree in trees.items()}


def split_folders(source: Path) -> dict[str, Path]:
    """The `train` and `test` (or `val`) of the source, if there are folders in `train`; else the source is "train"."""
    if not source.is_dir():
        raise UserError(f"{source} is no folder; give one that holds a folder per class or task")
    train, tests = source / "train", [folder for name in ("test", "val") if (folder := source / name).is_dir()]
    known = subfolders(train) if train.is_dir() else []
    if not known:
        return {"train": source}
    usable = [folder for folder in tests if {*known} & {*subfolders(folder)}]
    if tests and not usable:
        raise UserError(f"{tests[0]} holds none of the folders of {train}")
    return {"train": train, **({"test": usable[0]} if usable else {})}


def folder_of_folders(path: Path) -> bool:
    """Whether all images lie in folders."""
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    folders = [entry.is_dir() for entry in entries if entry.is_dir() or not not_an_image(entry.name)]
    return bool(folders) and all(folders)


def is_image_folder(path: Path) -> bool:
    """Whether its images are files below it."""
    return path.is_dir() and not ((path / "pack.json").is_file() or is_saved(path) or parquet_files(path))


def find_images(value: str, root: Path) -> Path:
    """A path, or the name of a packed set in the data root."""
    if (path := Path(value).expanduser()).exists():
        return path
    if (root / value / "pack.json").is_file():
        return root / value
    raise UserError(f"there is no folder or file {value}, and no packed set of that name in {root}")


def own_side(images: Any, default: int) -> int:
    """The shorter side of the first image of a packed set or of arrays; of files the default."""
    first = next(iter(open_images(images)["train"].read())).image
    if isinstance(first, np.ndarray | torch.Tensor):
        return min(sorted(first.shape)[-2:])
    with suppress(Exception), ExitStack() as opened:
        image = first
        if not isinstance(first, Image.Image):
            image = opened.enter_context(Image.open(opened.enter_context(open_regular(first)), formats=formats()))
        if min(image.size) != default:
            sides = f"the first image has {image.width} x {image.height} px"
            info(f"{sides}, all become squares of {default} px; --size (size=...) chooses another side, for all tasks")
    return default
