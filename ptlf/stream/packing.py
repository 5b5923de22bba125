"""Images in any form, made square and packed, or read into memory: a batch at a time is in memory."""

import functools
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ptlf.core.errors import UserError, unknown, warn
from ptlf.core.files import file_digest
from ptlf.freezing import format_bytes
from ptlf.stream.decode import FITS, BadImage, Fit, to_square
from ptlf.stream.disk import disk_errors, image_files, progress_bar, quote_names, staged, subfolders
from ptlf.stream.images import find_images, folder_of_folders, is_image_folder, open_images, split_folders
from ptlf.stream.pack import SCHEMA, Folders, Pack, Split, check_name, check_target, open_pack
from ptlf.stream.rows import ImageSplit, Row, hold_out, list_split, number_classes, subset, with_labels
from ptlf.stream.task import Dataset, Images, StreamConfig, packed

MAX_BYTES = 4 << 30  # of a labelled set that is read into memory
OnError = Literal["refuse", "skip"]

BATCH = 128  # images decoded at a time, and so many of their files in memory
BATCH_BYTES = 16 << 20  # at most, of squares
MAX_WORKERS = 16
SHOWN_SKIPS = 20


@dataclass(frozen=True)
class PackOptions:
    on_error: OnError = "refuse"  # for an image that cannot be decoded
    fit: Fit = "crop"  # how images become squares
    workers: int | None = None  # decoding threads; None: one per core, at most 16
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name, value, choices in (("on_error", self.on_error, get_args(OnError)), ("fit", self.fit, FITS)):
            if value not in choices:
                raise unknown(name, value, choices)
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, not {self.workers}")


class SquareBatch(NamedTuple):
    """A batch of images, without those that cannot be read."""

    names: list[str]
    images: np.ndarray  # (n, S, S, 3) uint8
    labels: list[Any]
    problems: list[tuple[str, str]]  # name and reason


def decode_squares(part: ImageSplit, size: int, fit: Fit = "crop", workers: int | None = None) -> Iterator[SquareBatch]:
    """Batches of squares, in order. Threads suffice: Pillow decodes and resizes outside Python's lock."""
    step = min(BATCH, max(1, BATCH_BYTES // (size * size * 3)))
    rows = iter(part.read())

    def attempt(row: Row) -> np.ndarray | BadImage:
        try:
            return to_square(row.image, size, fit)
        except BadImage as problem:
            return problem

    with ThreadPoolExecutor(workers or min(MAX_WORKERS, os.cpu_count() or 1)) as pool:
        while batch := list(islice(rows, step)):
            # Pillow's warnings are about large images and odd metadata, which do no harm. Filters are the process's:
            # they are changed by one thread, while the others work.
            with warnings.catch_warnings(action="ignore"):
                pairs = list(zip(batch, pool.map(attempt, batch), strict=True))
            kept = [row for row, made in pairs if isinstance(made, np.ndarray)]
            squares = [made for _, made in pairs if isinstance(made, np.ndarray)]
            problems = [(row.name, str(made)) for row, made in pairs if isinstance(made, BadImage)]
            stacked = np.stack(squares) if squares else np.zeros((0, size, size, 3), np.uint8)
            yield SquareBatch([row.name for row in kept], stacked, [row.label for row in kept], problems)


def write_squares(
    pack: Pack, splits: Mapping[str, ImageSplit], options: PackOptions, names: Sequence[str] | None = None
) -> Pack:
    """Decode and pack the splits; `pack` describes the set, without splits. names: that labels number."""
    if pack.size < 1:
        raise UserError(f"size must be at least 1, not {pack.size}")
    classes = splits["train"].names if names is None else names
    with disk_errors(pack.path), staged(pack.path) as folder:
        check_target(pack.path, options.overwrite)
        rows = {split: write_images(folder / f"{split}.npy", part, pack, options) for split, part in splits.items()}
        made, (classes, numbers) = {}, number_classes(rows, pack.source, classes, counted=names is not None)
        for split, labels in numbers.items():
            pixels, file = folder / f"{split}.npy", folder / f"{split}_labels.npy"
            np.save(buffer := io.BytesIO(), labels)
            file.write_bytes(buffer.getvalue())  # `np.save` into a file drops the errno of a failed write
            sizes = len(labels), pixels.name, pixels.stat().st_size
            made[split] = Split(*sizes, file_digest(pixels), file.name, file_digest(file))
        described = asdict(replace(pack, splits=made, names=classes, fit=options.fit))
        del described["path"]
        manifest = json.dumps({"schema": SCHEMA, "name": pack.name, **described}, indent=1)
        (folder / "pack.json").write_text(manifest, encoding="ascii")  # names of folders and files need not be UTF-8
    total = sum(part.count for part in splits.values())
    note_skipped(pack.name, pack.skipped, total, f", all named in {pack.path / 'pack.json'}")
    return open_pack(pack.path.parent, pack.name)


def write_images(file: Path, images: ImageSplit, pack: Pack, options: PackOptions) -> list[tuple[str, Any]]:
    """Into FILE.npy; the name and label of each that could be read."""
    rows: list[tuple[str, Any]] = []
    bar = progress_bar(f"packing {pack.name} {file.stem}", images.count, options.progress)
    with open(file, "wb") as out, bar as advance:
        out.write(npy_header(images.count, pack.size))
        for batch in decode_squares(images, pack.size, options.fit, options.workers):
            refuse_or_skip(batch.problems, pack.skipped, options.on_error)
            out.write(batch.images.tobytes())
            rows += zip(batch.names, batch.labels, strict=True)
            advance(len(batch.names))
        if not rows:
            raise UserError(f"no readable image is left in {file.stem}")
        out.seek(0)
        out.write(npy_header(len(rows), pack.size))
    return rows


def npy_header(count: int, size: int) -> bytes:
    """Its length does not depend on `count`, because numpy pads it, so it can be rewritten once the count is known."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, size, size, 3)}
    np.lib.format.write_array_header_1_0(buffer := io.BytesIO(), header)
    return buffer.getvalue()


def refuse_or_skip(problems: Sequence[tuple[str, str]], skipped: list[dict[str, str]], on_error: str | None) -> None:
    """problems: names and reasons. on_error: None refuses them where skipping is no way out."""
    if problems and on_error != "skip":
        (file, why), more = problems[0], [file for file, _ in problems[1:]]
        others = f" and at least {quote_names(more)}" if more else ""
        skip = ", or give --on-error skip (on_error='skip')" if on_error else ""
        raise UserError(f"{file} cannot be used: {why}; repair or remove it{others}{skip}")
    skipped.extend({"file": file, "why": why} for file, why in problems)


refuse_broken = partial(refuse_or_skip, skipped=[], on_error=None)


def note_skipped(name: str, skipped: Sequence[dict[str, str]], total: int, where: str = "") -> None:
    """where: all of them are named."""
    if skipped:
        lines = [f"{entry['file']}: {entry['why']}" for entry in skipped]
        more = [f"and {len(lines) - SHOWN_SKIPS} more{where}"] if len(lines) > SHOWN_SKIPS else []
        warn("\n  ".join([f"{name}: skipped {len(lines)}, of {total} images:", *lines[:SHOWN_SKIPS], *more]))


def pack_folder(
    source: Path,
    root: Path,
    name: str,
    *,
    size: int,
    folders: Folders = "classes",
    test_fraction: float = 0.0,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Pack:
    """Pack a folder of images: `train/NAME/...` (and `test/` or `val/`), or `NAME/...` directly.

    There is one folder per class or task, with files at any depth, of which hidden ones and such as notes.txt are left
    out. `names` selects and orders the folders. options: of `PackOptions`.
    """
    source, target, packing = Path(source), Path(root) / name, PackOptions(**options)
    check_name(name)
    check_target(target, packing.overwrite)
    if test_fraction and folders == "tasks":
        raise UserError("test_fraction needs folders='classes'; give tasks their own test/ folder")
    trees = split_folders(source)
    chosen = {split: names or subfolders(tree) for split, tree in trees.items()}
    if {*chosen["train"]} <= ({"train", "test", "val"} if trees["train"] == source else set()):
        raise UserError(f"{source} holds no folders with images; put the images into one folder per class or task")
    splits = {}
    for split, tree in trees.items():
        rows = [Row(str(file), file, name) for name in chosen[split] for file in image_files(tree / name)]
        splits[split] = list_split(rows, names)
    if test_fraction:
        splits = hold_out(splits, test_fraction)
    return write_squares(Pack(target, size, folders, (), source=str(source.resolve())), splits, packing)


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
    source = f"a {type(images).__name__}"
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
        raise UserError(f"{source} has no labels; give a folder per class, or pairs (image, label)")
    if not has_labels or labelled is False:
        if test_fraction or test is not None:
            raise UserError(f"test images need labels, and {source} has none")
        (task,), part = names or (target.name,), splits["train"]
        pack = Pack(target, size, "tasks", (), source=source)
        return write_squares(pack, {"train": with_labels(part, [task] * part.count)}, packing)
    if test_fraction:
        splits = hold_out(splits, test_fraction)
    return write_squares(Pack(target, size, "classes", (), source=source), splits, packing, names)


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
    some = subset(images, np.isin(np.arange(images.count), chosen))
    return read_all(some, size, fit, [])[0][places], images.count


def read_all(
    images: ImageSplit, size: int, fit: Fit, skipped: list[dict[str, str]], on_error: OnError | None = None
) -> tuple[np.ndarray, list[tuple[str, Any]]]:
    """All images (N, S, S, 3) uint8, with their names and labels, but for the broken ones that are skipped."""
    pixels = np.empty((images.count, size, size, 3), np.uint8)
    rows: list[tuple[str, Any]] = []
    for batch in decode_squares(images, size, fit):
        refuse_or_skip(batch.problems, skipped, on_error)
        pixels[len(rows) : len(rows) + len(batch.images)] = batch.images
        rows += zip(batch.names, batch.labels, strict=True)
    return pixels[: len(rows)], rows


def labelled_set(config: StreamConfig, root: Path, size: int, fit: Fit) -> Dataset | None:
    """`stream.labelled`: a packed set, or images in any form with labels, made square as the stream's own."""
    name = config.labelled
    if name is None or (root / name / "pack.json").is_file():
        return packed(root, name) if name else None
    return labelled_folder(name, root, size, fit)


@functools.lru_cache(maxsize=1)  # a run asks for its stream several times
def labelled_folder(name: str, root: Path, size: int, fit: Fit) -> Dataset:
    return labelled_dataset(find_images(name, root), size, 0.2, fit, "refuse")


def labelled_dataset(
    path: Path, size: int, test_fraction: float, fit: Fit = "crop", on_error: OnError | None = None
) -> Dataset:
    """A labelled set with test images, in memory, or a memory map if it is packed at this size. on_error: see above."""
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
