"""Rows of images, decoded to squares by threads and written as a packed set: a batch at a time is in memory."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ptlf.core.errors import UserError, unknown, warn
from ptlf.stream.decode import FITS, BadImage, Fit, to_square
from ptlf.stream.pack import Numbering, Pack, write_pack
from ptlf.stream.rows import ImageSplit, Row

OnError = Literal["refuse", "skip"]

BATCH = 128  # images decoded at a time, and so many of their files in memory
BATCH_BYTES = 16 << 20  # at most, of squares
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
    step = min(BATCH, max(1, BATCH_BYTES // (size * size * 3)))
    rows = iter(images.read())

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
    pack: Pack, splits: Mapping[str, ImageSplit], options: PackOptions, number: Numbering | None = None
) -> Pack:
    """Decode and pack the splits; `pack` describes the set, without splits.

    number: of the rows' names and labels, as `number_classes`; None: all images are of one task.
    """
    if pack.size < 1:
        raise UserError(f"size must be at least 1, not {pack.size}")

    def chunks(part: ImageSplit) -> Iterator[tuple[np.ndarray, Sequence[Any]]]:
        for batch in decode_squares(part, pack.size, options.fit, options.workers):
            refuse_or_skip(batch.problems, pack.skipped, options.on_error)
            labels = [*zip(batch.names, batch.labels, strict=True)] if number else [0] * len(batch.images)
            yield batch.images, labels

    streams = {split: (part.count, chunks(part)) for split, part in splits.items()}
    how: dict[str, Any] = {"overwrite": options.overwrite, "progress": options.progress}
    made = write_pack(replace(pack, fit=options.fit), streams, number=number, **how)
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


refuse_broken = partial(refuse_or_skip, skipped=[], on_error=None)


def note_skipped(name: str, skipped: Sequence[dict[str, str]], total: int, where: str = "") -> None:
    """where: all of them are named."""
    if skipped:
        lines = [f"{entry['file']}: {entry['why']}" for entry in skipped]
        more = [f"and {len(lines) - SHOWN_SKIPS} more{where}"] if len(lines) > SHOWN_SKIPS else []
        warn("\n  ".join([f"{name}: skipped {len(lines)}, of {total} images:", *lines[:SHOWN_SKIPS], *more]))
