"""Images in any form, made square and packed, or read into memory: as many at a time as a batch has."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.freezing import format_bytes
from ptlf.stream.datasets import packed
from ptlf.stream.decode import Fit
from ptlf.stream.disk import image_files
from ptlf.stream.folders import pack_folder
from ptlf.stream.images import describe_source, folder_of_folders, is_image_folder, open_images
from ptlf.stream.pack import Pack, check_target
from ptlf.stream.rows import ImageSplit, Row, hold_out, number_classes
from ptlf.stream.squares import OnError, PackOptions, decode_squares, note_skipped, refuse_or_skip, write_squares
from ptlf.stream.task import Dataset, Images

MAX_BYTES = 4 << 30  # of a labelled set that is read into memory


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
    check_target(target, packing.overwrite)
    described = source = describe_source(images)
    if isinstance(images, str | os.PathLike):
        path = Path(images)
        source = str(path.resolve())
        if is_image_folder(path) and test is None:
            if labelled or (labelled is None and folder_of_folders(path)):
                how: dict[str, Any] = {"size": size, "names": names, "test_fraction": test_fraction, **options}
                return pack_folder(path, target.parent, target.name, **how)
            images, labelled = image_files(path), False
    splits = open_images(images)
    if test is not None:
        if "test" in splits:
            raise UserError("test images are given, but the images have a test split of their own; leave one out")
        splits["test"] = open_images(test)["train"]
    has_labels = first_row(splits["train"]).label is not None
    if labelled and not has_labels:
        raise UserError(f"{described} has no labels; give a folder per class, or pairs (image, label)")
    if not has_labels or labelled is False:
        if test_fraction or test is not None:
            raise UserError(f"test images need labels, and {described} has none")
        pack = Pack(target, size, "tasks", tuple(names or (target.name,)), source=source)
        return write_squares(pack, {"train": splits["train"]}, packing)
    if test_fraction:
        splits = hold_out(splits, test_fraction)
    classes = splits["train"].names if names is None else names
    number = partial(number_classes, source=described, names=classes, counted=names is not None)
    return write_squares(Pack(target, size, "classes", (), source=source), splits, packing, number)


def first_row(images: ImageSplit) -> Row:
    return next(iter(images.read()))


def sample_images(
    path: Path, size: int, most: int, random: np.random.Generator, fit: Fit = "crop"
) -> tuple[np.ndarray, int]:
    """`most` of the training images, (most, S, S, 3) uint8, and how many there are. Fewer are used several times."""
    images = open_images(path)["train"]
    rounds = -(-most // images.count)
    drawn = np.concatenate([random.permutation(images.count) for _ in range(rounds)])[:most]
    chosen, places = np.unique(drawn, return_inverse=True)
    wanted = np.isin(np.arange(images.count), chosen)
    some = ImageSplit(len(chosen), lambda: compress(images.read(), wanted))
    return read_all(some, size, fit, [])[0][places], images.count


def read_all(
    images: ImageSplit, size: int, fit: Fit, skipped: list[dict[str, str]], on_error: OnError | None = None
) -> tuple[np.ndarray, list[tuple[str, Any]]]:
    """All images (N, S, S, 3) uint8 and their names and labels, in memory, without the broken ones, unless they are
    refused."""
    pixels = np.empty((images.count, size, size, 3), np.uint8)
    rows: list[tuple[str, Any]] = []
    for batch in decode_squares(images, size, fit):
        refuse_or_skip(batch.problems, skipped, on_error)
        pixels[len(rows) : len(rows) + len(batch.images)] = batch.images
        rows += zip(batch.names, batch.labels, strict=True)
    return pixels[: len(rows)], rows


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
    if first_row(splits["train"]).label is None:
        raise UserError(f"{path} has no labels; give a folder per class")
    if "test" not in splits:
        splits = hold_out(splits, test_fraction)
    total = sum(part.count for part in splits.values())
    if (needed := total * size * size * 3) > MAX_BYTES:
        pack = f"ptlf data pack {path} --name NAME --size {size} --test-fraction 0.2"
        raise UserError(f"{path} takes {format_bytes(needed)} at {size} px; pack it with `{pack}` and give that name")
    skipped: list[dict[str, str]] = []
    read = {split: read_all(part, size, fit, skipped, on_error) for split, part in splits.items()}
    note_skipped(path.name, skipped, total)
    if not all(rows for _, rows in read.values()):
        raise UserError(f"no readable image is left in {path} for {'testing' if read['train'][1] else 'training'}")
    rows = {split: part for split, (_, part) in read.items()}
    names, numbers = number_classes(rows, str(path), splits["train"].names)
    images = {split: Images(pixels, numbers[split]) for split, (pixels, _) in read.items()}
    return Dataset(path.name, tuple(names), images["train"], images["test"])
