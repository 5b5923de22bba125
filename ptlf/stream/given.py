"""Images in whatever form people have them: read one by one, and packed, with bounded memory.

A path (a folder, a packed set, an .npz or .npy file), a uint8 array, a list of paths, pictures or arrays, a torch
`Dataset` or a Hugging Face dataset. Sizes may differ: every image is made square as `ptlf data pack` does.
"""

import itertools
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.archives import Chunk
from ptlf.stream.datasets import packed
from ptlf.stream.decode import BATCH_BYTES, BadImage, Fit, ImageFile, decode_image, from_picture
from ptlf.stream.disk import disk_errors, files_below
from ptlf.stream.folders import PackOptions, note_skipped, pack_files, pack_folder
from ptlf.stream.pack import Pack, check_free, check_name, natural, open_pack, quoted, write_pack
from ptlf.stream.task import Dataset, Images

IMAGE_KEYS, LABEL_KEYS = ("image", "img"), ("label", "labels", "fine_label")  # of rows that are dictionaries
# Arrays of an .npz file: (images, labels) by split, as numpy users, MedMNIST and Keras name them.
# `names`, if it is there, has the classes that labels number.
ARRAYS = {
    "train": (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"), ("arr_0", "arr_1")),
    "test": (("test_images", "test_labels"), ("x_test", "y_test")),
}
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
CHANNELS = (1, 3, 4)
MOST_BYTES = 4 << 30  # of a labelled set that is read into memory


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


class Squares(NamedTuple):
    """A batch of images, without those that cannot be read."""

    names: list[str]
    images: np.ndarray  # (n, S, S, 3) uint8
    labels: list[Any]
    problems: list[tuple[str, str]]  # name and reason


def pack_images(
    images: Any,
    target: Path,
    size: int,
    *,
    test: Any = None,
    names: Sequence[str] | None = None,
    labelled: bool | None = None,
    test_fraction: float = 0.0,
    **options: Any,
) -> Pack:
    """Pack images in any form into the new folder `target`, as squares of `size` pixels.

    images: a path, an array (N, H, W, 3), a list, a Dataset, or a pair (images, labels).
    test: test images, in any of these forms.
    names: of the classes, which labels number; without labels, the name of the one task (default: the target's).
    labelled: None: labels are used if there are any, and folders in a folder are classes; False: they are not.
    test_fraction: share of each class held out for testing.
    options: of `PackOptions`: on_error, fit, workers, overwrite, progress.
    Labelled images make a set of classes, others a set with one task, which has no test images.
    """
    packing, target = PackOptions(**options), Path(target)
    check_name(target.name)
    check_free(target, packing.overwrite)
    if isinstance(images, str | os.PathLike) and is_plain_folder(path := Path(images)) and test is None:
        return pack_path(path, target, size, names, labelled, test_fraction, packing)
    splits = given(images)
    if test is not None:
        if "test" in splits:
            raise UserError("test images are given, but the images have a test split of their own; leave one out")
        splits["test"] = given(test)["train"]
    if names is not None and labelled is not False:
        splits = {split: replace(part, names=part.names or names) for split, part in splits.items()}
    has_labels = next(iter(splits["train"].read()), Row("", None)).label is not None
    if labelled and not has_labels:
        raise UserError(f"{described(images)} has no labels; give a folder per class, or pairs (image, label)")
    source = str(Path(images).resolve()) if isinstance(images, str | os.PathLike) else described(images)
    if not has_labels or labelled is False:
        if test_fraction or test is not None:
            raise UserError(f"test images need labels, and {described(images)} has none")
        pack = Pack(target, size, "tasks", tuple(names or (target.name,)), source=source)
        return write_given(pack, {"train": splits["train"]}, packing)
    if test_fraction:
        if "test" in splits:
            raise UserError("test_fraction is given, but there are test images; use one of them")
        splits = hold_out(splits["train"], test_fraction)
    known = splits["train"].names
    pack = Pack(target, size, "classes", [] if known is None else tuple(known), source=source)
    return write_given(pack, splits, packing)


def pack_path(
    path: Path,
    target: Path,
    size: int,
    names: Sequence[str] | None,
    labelled: bool | None,
    test_fraction: float,
    packing: PackOptions,
) -> Pack:
    """A folder of image files, decoded by several processes: one of folders is of classes, if `labelled` is None."""
    if labelled or (labelled is None and folder_of_folders(path)):
        how: dict[str, Any] = {"size": size, "names": names, "test_fraction": test_fraction, **vars(packing)}
        return pack_folder(path, target.parent, target.name, **how)
    if test_fraction:
        raise UserError(f"test images need labels, and {path} has none; put the images into one folder per class")
    files = [ImageFile(0, str(file)) for file in image_files(path)]
    task = Pack(target, size, "tasks", tuple(names or (target.name,)), source=str(path.resolve()))
    return pack_files(task, {"train": files}, packing)


def write_given(pack: Pack, splits: Mapping[str, Given], options: PackOptions) -> Pack:
    if pack.size < 1:
        raise UserError(f"size must be at least 1, not {pack.size}")
    pack = replace(pack, fit=options.fit)
    numbers = {name: number for number, name in enumerate(pack.names)}

    def number_of(name: str, label: Any, known: Sequence[str] | None) -> int:
        if pack.folders == "tasks":
            return 0
        if label is None:
            raise UserError(f"{name} has no label, but others have; give all of them labels, or none")
        if known is not None:
            return int(label)
        if str(label) not in numbers:
            numbers[str(label)] = len(numbers)
            pack.names.append(str(label))  # type: ignore[attr-defined]
        return numbers[str(label)]

    def chunks(part: Given) -> Iterator[Chunk]:
        for batch in squares(part, pack.size, pack.fit):
            refuse_or_skip(batch.problems, pack.skipped, options.on_error)
            pairs = zip(batch.names, batch.labels, strict=True)
            yield batch.images, np.array([number_of(*pair, part.names) for pair in pairs], np.int64)

    streams = {split: (part.count, chunks(part)) for split, part in splits.items()}
    made = write_pack(pack, streams, overwrite=options.overwrite, progress=options.progress)
    note_skipped(made, sum(part.count for part in splits.values()))
    return made


def refuse_or_skip(problems: Sequence[tuple[str, str]], skipped: list[dict[str, str]], on_error: str) -> None:
    if problems and on_error == "refuse":
        file, why = problems[0]
        raise UserError(f"{file} cannot be used: {why}; repair or remove it, or give --on-error skip")
    skipped.extend({"file": file, "why": why} for file, why in problems)


def squares(images: Given, size: int, fit: Fit = "crop") -> Iterator[Squares]:
    """Batches of squares, in order. Decoded by threads: Pillow works outside Python's lock."""
    step = min(256, max(1, BATCH_BYTES // (size * size * 3)))
    rows = iter(images.read())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while batch := list(itertools.islice(rows, step)):
            made = list(pool.map(lambda row: attempt(row.image, size, fit), batch))
            kept = [(row, square) for row, square in zip(batch, made, strict=True) if isinstance(square, np.ndarray)]
            problems = [(row.name, str(why)) for row, why in zip(batch, made, strict=True) if isinstance(why, BadImage)]
            stacked = np.stack([square for _, square in kept]) if kept else np.zeros((0, size, size, 3), np.uint8)
            yield Squares([row.name for row, _ in kept], stacked, [row.label for row, _ in kept], problems)


def attempt(image: Any, size: int, fit: Fit) -> np.ndarray | BadImage:
    try:
        return to_square(image, size, fit)
    except BadImage as problem:
        return problem


def to_square(image: Any, size: int, fit: Fit = "crop") -> np.ndarray:
    """(S, S, 3) uint8 of a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor ([C, ]H, W)."""
    if isinstance(image, str | os.PathLike):
        try:
            return decode_image(Path(image).read_bytes(), size, fit)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from None
    if isinstance(image, bytes):
        return decode_image(image, size, fit)
    if isinstance(image, Mapping):  # a Hugging Face image that was not decoded
        return to_square(image.get("bytes") or image.get("path"), size, fit)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.permute(1, 2, 0) if image.ndim == 3 and image.shape[0] in CHANNELS else image).numpy()
    if isinstance(image, np.ndarray):
        image = to_bytes(image)
        if image.dtype == np.uint8 and image.shape == (size, size, 3):
            return image
        try:
            image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
        except (TypeError, ValueError) as error:
            raise BadImage(str(error)) from None
    if not isinstance(image, Image.Image):
        raise BadImage(f"a {type(image).__name__} is no image; give a path, a PIL image, an array or a tensor")
    try:
        return from_picture(image, size, fit)
    except BadImage:
        raise
    except Exception as error:  # Pillow can raise almost any exception on malformed bytes
        raise BadImage(f"{type(error).__name__}: {error}") from None


def to_bytes(image: np.ndarray) -> np.ndarray:
    """uint8 or uint16 as it is; floating-point values must lie in [0, 1]."""
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in CHANNELS) or 0 in image.shape:
        raise BadImage(f"an array of shape {image.shape} is no image (H, W), (H, W, 3) or (H, W, 4)")
    if image.dtype in (np.uint8, np.uint16):
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise BadImage(f"pixels are {image.dtype}; give uint8 in 0..255, or floating point in 0..1")
    low, high = float(image.min()), float(image.max())
    if not 0 <= low <= high <= 1:  # NaN too
        raise BadImage(f"floating-point pixels lie in {low:.3g}..{high:.3g}; give them in 0..1, or uint8 in 0..255")
    return np.rint(image * 255).astype(np.uint8)


def given(images: Any) -> dict[str, Given]:
    """By split: "train", and "test" if a path has test images too."""
    if isinstance(images, str | os.PathLike):
        return given_path(Path(images))
    if isinstance(images, tuple) and len(images) == 2 and is_labels(images[1], images[0]):
        return {"train": labelled_rows(given(images[0])["train"], plain_labels(images[1]))}
    if isinstance(images, Mapping) and "train" in images:
        tests = [images[key] for key in ("test", "validation") if key in images]
        parts = zip(("train", "test"), (images["train"], *tests), strict=False)
        return {split: given(part)["train"] for split, part in parts}
    if isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim != 4 and (images.ndim != 3 or images.shape[2] in CHANNELS):
            shape = tuple(images.shape)
            raise UserError(f"an array of images must be (N, H, W, 3), not {shape}; for one image, give [image]")
        return {"train": Given(len(images), lambda: numbered(images))}
    if not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        kinds = "a path, an array (N, H, W, 3), a list or a data set with a length"
        raise UserError(f"images cannot be read from a {type(images).__name__}; give {kinds}")
    if len(images) == 0:
        raise UserError(f"{described(images)} holds no images")
    count = len(images)

    def rows() -> Iterator[Row]:
        return (to_row(images[index], index) for index in range(count))

    return {"train": Given(count, rows, class_names(images, next(rows())))}


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
    """A number or text; None for a negative number, with which data sets mark unlabelled images."""
    label = label.item() if hasattr(label, "item") and getattr(label, "size", 1) != 0 else label
    if label is None or isinstance(label, str):
        return label
    if not isinstance(label, int | float):
        raise UserError(f"a label must be a number or text, not a {type(label).__name__}")
    return None if label < 0 else int(label) if label == int(label) else label


def plain_labels(labels: Any) -> list[Any]:
    values = labels.reshape(-1).tolist() if isinstance(labels, np.ndarray | torch.Tensor) else labels
    return [plain_label(label) for label in values]


def is_labels(labels: Any, images: Any) -> bool:
    """Whether the second of a pair can be the labels of the first."""
    if isinstance(labels, np.ndarray | torch.Tensor):
        return labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)
    plain = isinstance(labels, list | tuple) and all(isinstance(label, str | int | float) for label in labels)
    return plain and hasattr(images, "__len__")


def labelled_rows(part: Given, labels: Sequence[Any]) -> Given:
    """With labels beside the images; classes are sorted, numbers by value."""
    if len(labels) != part.count:
        raise UserError(f"there are {part.count} images and {len(labels)} labels")
    kinds = sorted({label for label in labels if label is not None}, key=lambda label: (isinstance(label, str), label))
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


def described(images: Any) -> str:
    return str(images) if isinstance(images, str | os.PathLike) else f"a {type(images).__name__}"


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


def sample_images(
    path: Path, size: int, most: int, random: np.random.Generator, fit: Fit = "crop"
) -> tuple[np.ndarray, int]:
    """`most` of the training images, (most, S, S, 3) uint8, and how many there are. Fewer are used several times."""
    images = given(path)["train"]
    rounds = -(-most // images.count)
    drawn = np.concatenate([random.permutation(images.count) for _ in range(rounds)])[:most]
    chosen, places = np.unique(drawn, return_inverse=True)
    wanted = set(chosen.tolist())

    def rows() -> Iterator[Row]:
        return (row for index, row in enumerate(images.read()) if index in wanted)

    return read_all(Given(len(chosen), rows), size, fit)[0][places], images.count


def read_all(images: Given, size: int, fit: Fit = "crop") -> tuple[np.ndarray, list[Any]]:
    """All images (N, S, S, 3) uint8 and their labels, in memory. A broken image is refused."""
    pixels = np.empty((images.count, size, size, 3), np.uint8)
    labels: list[Any] = []
    for batch in squares(images, size, fit):
        for file, why in batch.problems:
            raise UserError(f"{file} cannot be used: {why}; repair or remove it")
        pixels[len(labels) : len(labels) + len(batch.images)] = batch.images
        labels += batch.labels
    return pixels, labels


def labelled_dataset(path: Path, size: int, test_fraction: float, fit: Fit = "crop") -> Dataset:
    """A labelled set with test images, read into memory; a packed set of this size stays a memory map."""
    if (path / "pack.json").is_file():
        data = packed(path.absolute().parent, path.name)
        if data.size == size and data.test is not None and data.folders == "classes":
            return data
    splits = given(path)
    if next(iter(splits["train"].read())).label is None:
        raise UserError(f"{path} has no labels; give a folder per class")
    if "test" not in splits:
        splits = hold_out(splits["train"], test_fraction)
    needed = sum(part.count for part in splits.values()) * size * size * 3
    if needed > MOST_BYTES:
        advice = (
            f"pack it with `ptlf data pack {path} --name NAME --size {size} --test-fraction 0.2` and give that name"
        )
        raise UserError(f"{path} takes {needed / 1e9:.1f} GB at {size} px; {advice}")
    read = {split: read_all(part, size, fit) for split, part in splits.items()}
    known = splits["train"].names
    names = list(known) if known is not None else sorted({str(label) for label in read["train"][1]}, key=natural)
    images = {}
    for split, (pixels, labels) in read.items():
        if known is None and (extra := {str(label) for label in labels} - set(names)):
            raise UserError(f"{path} has test images of {quoted(sorted(extra))}, of which there are no training images")
        numbers = labels if known is not None else [names.index(str(label)) for label in labels]
        images[split] = Images(pixels, np.array(numbers, np.int64))
    return Dataset(path.name, tuple(names), images["train"], images["test"])


def find_images(value: str, root: Path) -> Path:
    """A path, or the name of a packed set in the data root."""
    if (path := Path(value).expanduser()).exists():
        return path
    if (root / value / "pack.json").is_file():
        return root / value
    raise UserError(
        f"{value} is neither a folder or file here nor a packed set in {root}; `ptlf data list` names those"
    )


def given_path(path: Path) -> dict[str, Given]:
    if (path / "pack.json").is_file():
        return given_pack(open_pack(path.absolute().parent, path.absolute().name))
    if path.is_dir():
        return given_folder(path)
    if not path.exists():
        raise UserError(f"there is no folder or file {path}")
    if path.suffix == ".npy":
        return given(load_npy(path))
    if path.suffix == ".npz":
        return given_npz(path)
    if Image.registered_extensions().get(path.suffix.lower()):
        return {"train": Given(1, lambda: [Row(path.name, path)])}
    raise UserError(f"{path} holds no images that can be read; give a folder, a packed set, an .npz or an .npy file")


def given_folder(path: Path) -> dict[str, Given]:
    """All files below it; `train/` and `test/` (or `val/`), if it has both, are splits."""
    classes = folder_of_folders(path)
    tests = [name for name in ("test", "val") if (path / name).is_dir()]
    trees = {"train": path}
    if (path / "train").is_dir() and tests:
        trees = {"train": path / "train", "test": path / tests[0]}

    def part(tree: Path) -> Given:
        files = image_files(tree)
        return Given(len(files), lambda: (file_row(file, path, classes) for file in files))

    return {split: part(tree) for split, tree in trees.items()}


def own_side(images: Any) -> int | None:
    """The shorter side, in pixels, of the first image of a packed set or of arrays; files say nothing of the others."""
    if isinstance(images, str | os.PathLike) and is_plain_folder(Path(images)):
        return None
    first = next(iter(given(images)["train"].read())).image
    return min(sorted(first.shape)[-2:]) if isinstance(first, np.ndarray | torch.Tensor) else None


def is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not (path / "pack.json").is_file()


def folder_of_folders(path: Path) -> bool:
    """Whether all files that are not hidden lie in folders: then those are the classes."""
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    return bool(entries) and all(entry.is_dir() for entry in entries)


def image_files(path: Path) -> list[Path]:
    with disk_errors(path):
        files = files_below(path)
    if not files:
        raise UserError(f"{path} holds no images")
    return files


def file_row(file: Path, folder: Path, classes: bool) -> Row:
    """The class is the first folder below the given one, or the second if the first is a split."""
    inside = file.relative_to(folder)
    parts = inside.parts[1:] if inside.parts[0] in ("train", "test", "val") and len(inside.parts) > 2 else inside.parts
    return Row(inside.as_posix(), file, parts[0] if classes and len(parts) > 1 else None)


def given_pack(pack: Pack) -> dict[str, Given]:
    """A set with a folder per task is unlabelled."""

    def rows(split: str) -> Iterator[Row]:
        labels = pack.labels(split) if pack.folders == "classes" else itertools.repeat(None)
        for index, (image, label) in enumerate(zip(pack.images(split), labels, strict=False)):
            yield Row(f"{split} {index}", image, None if label is None else int(label))

    names = pack.names if pack.folders == "classes" else None
    return {split: Given(part.count, partial(rows, split), names) for split, part in pack.splits.items()}


def load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is no readable .npy file: {error}") from None


def given_npz(path: Path) -> dict[str, Given]:
    """The arrays are read image by image: a file may be larger than the memory."""
    try:
        with zipfile.ZipFile(path) as file:
            inside = [name.removesuffix(".npy") for name in file.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no readable .npz file: {error}") from None
    found: dict[str, Given] = {}
    classes = [str(name) for name in npz_rows(path, "names")] if "names" in inside else None
    for split, choices in ARRAYS.items():
        pair = next(((images, labels) for images, labels in choices if images in inside), None)
        if pair is None:
            continue
        images, labels = pair
        count = header_of(path, images)[0][0]
        part = Given(count, partial(npz_images, path, images))
        if labels in inside:
            part = labelled_rows(part, named_labels(path, labels, classes))
        found[split] = part
    if "train" not in found:
        wanted = quoted(images for images, _ in ARRAYS["train"])
        raise UserError(f"{path} has no array called {wanted}; it has: {quoted(inside)}")
    if "test" in found:
        names = found["train"].names
        if found["test"].names != names:
            raise UserError(f"{path} has other classes in its test images than in its training images")
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
