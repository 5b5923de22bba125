"""Rows of images, decoded to squares by threads and written as a packed set: a batch at a time is in memory."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ptlf.core.errors import UserError, unknown, warn
from ptlf.stream.decode import FITS, BadImage, Fit, to_square
from ptlf.stream.pack import Pack, write_pack
from ptlf.stream.rows import Classes, ImageSplit, Row, by_value

OnError = Literal["refuse", "skip"]

BATCH_BYTES = 16 << 20  # of squares
BYTES_HELD = 256 << 20  # of image files in memory, before they are decoded
MAX_WORKERS = 16
SHOWN_SKIPS = 20
SKIP = "give --on-error skip (on_error='skip')"


@dataclass(frozen=True)
class PackOptions:
    on_error: OnError = "refuse"  # for an image that cannot be decoded, and a folder without images
    fit: Fit = "crop"  # how images become squares
    workers: int | None = None  # decoding threads; None: one per core, at most 16
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise unknown("on_error", self.on_error, get_args(OnError))
        if self.fit not in FITS:
            raise unknown("fit", self.fit, FITS)
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, not {self.workers}")


class SquareBatch(NamedTuple):
    """A batch of images, without those that cannot be read."""

    names: list[str]
    images: np.ndarray  # (n, S, S, 3) uint8
    labels: list[Any]
    problems: list[tuple[str, str]]  # name and reason


def decode_squares(
    images: ImageSplit, size: int, fit: Fit = "crop", workers: int | None = None
) -> Iterator[SquareBatch]:
    """Batches of squares, in order. Threads suffice: Pillow decodes and resizes outside Python's lock."""
    step = min(256, max(1, BATCH_BYTES // (size * size * 3)))

    def attempt(row: Row) -> np.ndarray | BadImage:
        try:
            return to_square(row.image, size, fit)
        except BadImage as problem:
            return problem

    with ThreadPoolExecutor(workers or min(MAX_WORKERS, os.cpu_count() or 1)) as pool:
        for batch in batches(images.read(), step):
            # Pillow's warnings are about large images and odd metadata, which do no harm. Filters are the process's:
            # they are changed by one thread, while the others work.
            with warnings.catch_warnings(action="ignore"):
                made = list(pool.map(attempt, batch))
            kept = [(row, square) for row, square in zip(batch, made, strict=True) if isinstance(square, np.ndarray)]
            problems = [(row.name, str(why)) for row, why in zip(batch, made, strict=True) if isinstance(why, BadImage)]
            stacked = np.stack([square for _, square in kept]) if kept else np.zeros((0, size, size, 3), np.uint8)
            yield SquareBatch([row.name for row, _ in kept], stacked, [row.label for row, _ in kept], problems)


def batches(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    """Batches of at most `most` rows, or about `BYTES_HELD` of undecoded images."""
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


def write_squares(
    pack: Pack,
    splits: Mapping[str, ImageSplit],
    options: PackOptions,
    classes: Classes | None = None,
    order: Callable[[Any], Any] = by_value,
) -> Pack:
    """Decode and pack the splits; `pack` describes the set, without splits.

    classes: of the labels; None: all images are of one task. order: sort key of labels whose classes are not known.
    """
    if pack.size < 1:
        raise UserError(f"size must be at least 1, not {pack.size}")
    pack = replace(pack, fit=options.fit, names=classes.names if classes else pack.names)

    def chunks(split: str, part: ImageSplit) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in decode_squares(part, pack.size, pack.fit, options.workers):
            refuse_or_skip(batch.problems, pack.skipped, options.on_error)
            pairs = zip(batch.names, batch.labels, strict=True)
            numbers = [classes.number(split, *pair, part.names) if classes else 0 for pair in pairs]
            yield batch.images, np.array(numbers, np.int64)

    splits = {"train": splits["train"], **splits}  # first: its classes are those of the set
    streams = {split: (part.count, chunks(split, part)) for split, part in splits.items()}
    renumber = (lambda: classes.renumber(order)) if classes else None
    made = write_pack(pack, streams, overwrite=options.overwrite, progress=options.progress, renumber=renumber)
    total = sum(part.count for part in splits.values())
    note_skipped(made.name, made.skipped, total, f", all named in {made.path / 'pack.json'}")
    return made


def refuse_or_skip(problems: Sequence[tuple[str, str]], skipped: list[dict[str, str]], on_error: str | None) -> None:
    """problems: names and reasons, of those images that were looked at together with the first. on_error: None refuses
    them where skipping is no way out."""
    if problems and on_error != "skip":
        (file, why), more = problems[0], len(problems) - 1
        others = f" and at least {more} more" if more else ""
        skip = f", or {SKIP}" if on_error else ""
        raise UserError(f"{file} cannot be used: {why}; repair or remove it{others}{skip}")
    skipped.extend({"file": file, "why": why} for file, why in problems)


def refuse_broken(problems: Sequence[tuple[str, str]]) -> None:
    refuse_or_skip(problems, [], None)


def note_skipped(name: str, skipped: Sequence[dict[str, str]], total: int, where: str = "") -> None:
    """where: all of them are named."""
    if skipped:
        lines = [f"{name}: skipped {len(skipped)}, of {total} images:"]
        lines += [f"{entry['file']}: {entry['why']}" for entry in skipped[:SHOWN_SKIPS]]
        if len(skipped) > SHOWN_SKIPS:
            lines.append(f"and {len(skipped) - SHOWN_SKIPS} more{where}")
        warn("\n  ".join(lines))
