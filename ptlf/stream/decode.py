"""Decode image files to square uint8 arrays, in this process or in several.

EXIF orientation is applied, transparency composited on white, 16-bit grey divided by 257, and CMYK, palette and grey
converted to RGB. The short side is resized to S (bicubic, antialiased) and the centre cropped. A broken or animated
image is refused with a reason.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import signal
import threading
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ptlf.core.errors import UserError

Decoded: TypeAlias = tuple[np.ndarray, np.ndarray, list[tuple[str, str]]]  # images, labels, (file, why) of the failures

BATCH_BYTES = 4 << 20


class BadImage(Exception):
    """Why an image cannot be used."""


class ImageFile(NamedTuple):
    label: int
    member: str  # path of the file, or its name inside `archive`
    archive: str | None = None  # a zip file

    @property
    def shown(self) -> str:
        return f"{self.archive}:{self.member}" if self.archive else self.member


def decode_image(file: str | io.BytesIO, size: int) -> np.ndarray:
    """(S, S, 3) uint8, or BadImage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and odd metadata, which do no harm
            with Image.open(file) as image:
                frames = getattr(image, "n_frames", 1)
                # The further frames of a camera's MPO file are a preview or a gain map, not an animation.
                if frames > 1 and image.format != "MPO":
                    raise BadImage(f"animated or multi-page, {frames} frames")
                image.load()
                return np.asarray(square(to_rgb(ImageOps.exif_transpose(image)), size))
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image in a known format") from None
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    except Exception as error:  # Pillow can raise almost any exception on malformed bytes
        raise BadImage(f"{type(error).__name__}: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return grey16_to_rgb(np.asarray(image))
    if image.mode == "F":
        raise BadImage("floating-point pixels have no defined range")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def grey16_to_rgb(values: np.ndarray) -> Image.Image:
    if values.min() < 0 or values.max() > 65535:
        raise BadImage(f"integer pixels {values.min()}..{values.max()} do not fit 16 bits")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")  # 65535 / 257 = 255


def square(image: Image.Image, size: int) -> Image.Image:
    """Resize the short side to `size` and crop the centre, in one resampling."""
    if image.size == (size, size):
        return image
    short = min(image.size)
    left, top = (image.width - short) / 2, (image.height - short) / 2
    return image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))


# -------------------------------------------------------------------------------------------------------- many files


def decode_batch(files: Sequence[ImageFile], size: int) -> Decoded:
    images, labels, problems = [], [], []
    for file in files:
        try:
            images.append(decode_image(open_image(file), size))
            labels.append(file.label)
        except BadImage as problem:
            problems.append((file.shown, str(problem)))
    stacked = np.stack(images) if images else np.zeros((0, size, size, 3), np.uint8)
    return stacked, np.array(labels, np.int64), problems


def open_image(file: ImageFile) -> str | io.BytesIO:
    if file.archive is not None:
        return io.BytesIO(open_zip(file.archive).read(file.member))
    try:
        if os.path.getsize(file.member) == 0:
            raise BadImage("empty file, 0 bytes")
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    return file.member


@functools.lru_cache(maxsize=1)
def open_zip(archive: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(archive)


@contextmanager
def decoders(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of decoding processes; None for one worker: this process decodes."""
    if workers == 1:
        yield None
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_decoder)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a decoding process died: out of memory, or a script that packs without `if __name__ == '__main__':`; "
            "try --workers 1"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_decoder() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def decode_all(
    files: Sequence[ImageFile], size: int, pool: ProcessPoolExecutor | None, workers: int
) -> Iterator[Decoded]:
    """Batches in the order of `files`; at most 2 batches per worker are held in memory."""
    step = min(256, max(1, BATCH_BYTES // (size * size * 3)))
    batches = (files[start : start + step] for start in range(0, len(files), step))
    if pool is None:
        yield from (decode_batch(batch, size) for batch in batches)
        return
    running: deque[Future] = deque()
    for batch in batches:
        running.append(pool.submit(decode_batch, batch, size))
        if len(running) >= 2 * workers:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
