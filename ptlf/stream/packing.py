"""Images in any form, made square and packed, or read into memory: as many at a time as a batch has."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.archives import Chunk
from ptlf.stream.datasets import packed
from ptlf.stream.decode import BATCH_BYTES, BadImage, Fit, ImageFile, check_ending, decode_image, from_picture
from ptlf.stream.disk import note_passed
from ptlf.stream.folders import OnError, PackOptions, broken, note_skipped, pack_files, pack_folder, tell_skipped
from ptlf.stream.images import describe_source, folder_of_folders, image_files, is_image_folder, open_images
from ptlf.stream.pack import Pack, check_name, check_writable_target, natural, write_pack
from ptlf.stream.rows import CHANNELS, Classes, ImageSplit, Row, hold_out
from ptlf.stream.task import Dataset, Images

MAX_BYTES = 4 << 30  # of a labelled set that is read into memory
BYTES_HELD = 256 << 20  # of image files in memory, before they are decoded


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
        Without names, the classes are those of the training images, sorted. Test images of others are refused.
    labelled: None: labels are used if there are any, and folders in a folder are classes; False: they are not.
    test_fraction: share of each class held out for testing.
    options: of `PackOptions`: on_error, fit, workers, overwrite, progress.
    Labelled images make a set of classes, others a set with one task, which has no test images.
    """
    packing, target = PackOptions(**options), Path(target)
    check_name(target.name)
    check_writable_target(target, packing.overwrite)
    if isinstance(images, str | os.PathLike) and is_image_folder(path := Path(images)) and test is None:
        return pack_path(path, target, size, names, labelled, test_fraction, packing)
    splits = open_images(images)
    if test is not None:
        if "test" in splits:
            raise UserError("test images are given, but the images have a test split of their own; leave one out")
        splits["test"] = open_images(test)["train"]
    has_labels = next(iter(splits["train"].read()), Row("", None)).label is not None
    if labelled and not has_labels:
        raise UserError(f"{describe_source(images)} has no labels; give a folder per class, or pairs (image, label)")
    source = str(Path(images).resolve()) if isinstance(images, str | os.PathLike) else describe_source(images)
    if not has_labels or labelled is False:
        if test_fraction or test is not None:
            raise UserError(f"test images need labels, and {describe_source(images)} has none")
        pack = Pack(target, size, "tasks", tuple(names or (target.name,)), source=source)
        return write_given(pack, {"train": splits["train"]}, packing)
    if test_fraction:
        if "test" in splits:
            raise UserError("test_fraction is given, but there are test images; use one of them")
        splits = hold_out(splits["train"], test_fraction)
    known = splits["train"].names if names is None else names
    classes = Classes(describe_source(images), known, counted=names is not None)
    return write_given(Pack(target, size, "classes", classes.names, source=source), splits, packing, classes)


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
    passed: list[Path] = []
    files = [ImageFile(0, str(file)) for file in image_files(path, passed)]
    note_passed(path, passed)
    task = Pack(target, size, "tasks", tuple(names or (target.name,)), source=str(path.resolve()))
    return pack_files(task, {"train": files}, packing)


def write_given(
    pack: Pack, splits: Mapping[str, ImageSplit], options: PackOptions, classes: Classes | None = None
) -> Pack:
    """classes: of the labels; None: all images are of one task."""
    if pack.size < 1:
        raise UserError(f"size must be at least 1, not {pack.size}")
    pack = replace(pack, fit=options.fit)

    def chunks(split: str, part: ImageSplit) -> Iterator[Chunk]:
        for batch in decode_squares(part, pack.size, pack.fit):
            refuse_or_skip(batch.problems, pack.skipped, options.on_error)
            pairs = zip(batch.names, batch.labels, strict=True)
            numbers = [classes.number(split, *pair, part.names) if classes else 0 for pair in pairs]
            yield batch.images, np.array(numbers, np.int64)

    splits = {"train": splits["train"], **splits}  # first: its classes are those of the set
    streams = {split: (part.count, chunks(split, part)) for split, part in splits.items()}
    how = {"overwrite": options.overwrite, "progress": options.progress}
    made = write_pack(pack, streams, **how, renumber=classes.renumber if classes else None)
    note_skipped(made, sum(part.count for part in splits.values()))
    return made


def refuse_or_skip(problems: Sequence[tuple[str, str]], skipped: list[dict[str, str]], on_error: str) -> None:
    if problems and on_error == "refuse":
        raise broken(problems, "used")
    skipped.extend({"file": file, "why": why} for file, why in problems)


class SquareBatch(NamedTuple):
    """A batch of images, without those that cannot be read."""

    names: list[str]
    images: np.ndarray  # (n, S, S, 3) uint8
    labels: list[Any]
    problems: list[tuple[str, str]]  # name and reason


def decode_squares(images: ImageSplit, size: int, fit: Fit = "crop") -> Iterator[SquareBatch]:
    """Batches of squares, in order. Decoded by threads: Pillow works outside Python's lock."""
    step = min(256, max(1, BATCH_BYTES // (size * size * 3)))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for batch in batches(images.read(), step):
            made = list(pool.map(lambda row: attempt(row.image, size, fit), batch))
            kept = [(row, square) for row, square in zip(batch, made, strict=True) if isinstance(square, np.ndarray)]
            problems = [(row.name, str(why)) for row, why in zip(batch, made, strict=True) if isinstance(why, BadImage)]
            stacked = np.stack([square for _, square in kept]) if kept else np.zeros((0, size, size, 3), np.uint8)
            yield SquareBatch([row.name for row, _ in kept], stacked, [row.label for row, _ in kept], problems)


def batches(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """At most so many rows, or about `BYTES_HELD` of undecoded images."""
    batch: list[Row] = []
    held = 0
    for row in rows:
        batch.append(row)
        held += len(row.image) if isinstance(row.image, bytes) else 0
        if len(batch) == most or held >= BYTES_HELD:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def attempt(image: Any, size: int, fit: Fit) -> np.ndarray | BadImage:
    try:
        return to_square(image, size, fit)
    except BadImage as problem:
        return problem


def to_square(image: Any, size: int, fit: Fit = "crop") -> np.ndarray:
    """(S, S, 3) uint8 of a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor ([C, ]H, W)."""
    if isinstance(image, str | os.PathLike):
        try:
            check_ending(str(image))
            return decode_image(Path(image).read_bytes(), size, fit)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            raise BadImage(getattr(error, "strerror", None) or str(error)) from None
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
        found = f"floating-point pixels lie in {low:.3g}..{high:.3g}"
        raise BadImage(f"{found}; give them in 0..1 (not normalised), or uint8 in 0..255")
    return np.rint(image * 255).astype(np.uint8)


def sample_images(
    path: Path, size: int, most: int, random: np.random.Generator, fit: Fit = "crop"
) -> tuple[np.ndarray, int]:
    """`most` of the training images, (most, S, S, 3) uint8, and how many there are. Fewer are used several times."""
    images = open_images(path)["train"]
    rounds = -(-most // images.count)
    drawn = np.concatenate([random.permutation(images.count) for _ in range(rounds)])[:most]
    chosen, places = np.unique(drawn, return_inverse=True)
    wanted = set(chosen.tolist())

    def rows() -> Iterator[Row]:
        return (row for index, row in enumerate(images.read()) if index in wanted)

    return read_all(ImageSplit(len(chosen), rows), size, fit)[0][places], images.count


def refuse(problems: Sequence[tuple[str, str]]) -> None:
    for file, why in problems:
        raise UserError(f"{file} cannot be used: {why}; repair or remove it")


def read_all(
    images: ImageSplit, size: int, fit: Fit = "crop", on_problems: Callable[[list[tuple[str, str]]], None] = refuse
) -> tuple[np.ndarray, list[Any]]:
    """All images (N, S, S, 3) uint8 and their labels, in memory, without the broken ones, unless they are refused."""
    pixels = np.empty((images.count, size, size, 3), np.uint8)
    labels: list[Any] = []
    for batch in decode_squares(images, size, fit):
        on_problems(batch.problems)
        pixels[len(labels) : len(labels) + len(batch.images)] = batch.images
        labels += batch.labels
    return pixels[: len(labels)], labels


def labelled_dataset(
    path: Path, size: int, test_fraction: float, fit: Fit = "crop", on_error: OnError | None = None
) -> Dataset:
    """A labelled set with test images, read into memory; a packed set of this size stays a memory map.

    on_error: for broken images; None: they are refused, and skipping is no way out.
    """
    if (path / "pack.json").is_file():
        data = packed(path.absolute().parent, path.name)
        if data.size == size and data.test is not None and data.folders == "classes":
            return data
    splits = open_images(path)
    if next(iter(splits["train"].read())).label is None:
        raise UserError(f"{path} has no labels; give a folder per class")
    if "test" not in splits:
        splits = hold_out(splits["train"], test_fraction)
    needed = sum(part.count for part in splits.values()) * size * size * 3
    if needed > MAX_BYTES:
        advice = (
            f"pack it with `ptlf data pack {path} --name NAME --size {size} --test-fraction 0.2` and give that name"
        )
        raise UserError(f"{path} takes {needed / 1e9:.1f} GB at {size} px; {advice}")
    skipped: list[dict[str, str]] = []
    how = partial(refuse_or_skip, skipped=skipped, on_error=on_error) if on_error else refuse
    read = {split: read_all(part, size, fit, how) for split, part in splits.items()}
    tell_skipped(path.name, skipped, sum(part.count for part in splits.values()))
    if not all(labels for _, labels in read.values()):
        raise UserError(f"no readable image is left in {path} for {'testing' if read['train'][1] else 'training'}")
    classes = Classes(str(path), splits["train"].names)
    numbers = {
        split: [classes.number(split, f"an image of {path}", label, splits[split].names) for label in read[split][1]]
        for split in ("train", "test")
    }
    stored = classes.renumber(lambda label: natural(str(label)))
    images = {split: Images(pixels, stored[numbers[split]]) for split, (pixels, _) in read.items()}
    return Dataset(path.name, tuple(classes.names), images["train"], images["test"])
