"""Decode image files to square uint8 arrays, in this process or in several.

EXIF orientation is applied, transparency composited on white, 16-bit grey divided by 257, and CMYK, palette and grey
converted to RGB. Images are made square as `Fit` says, resized bicubic and antialiased. A broken or animated image is
refused with a reason.
"""

import functools
import io
import multiprocessing
import os
import signal
import threading
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ptlf.core.errors import UserError

Decoded: TypeAlias = tuple[np.ndarray, np.ndarray, list[tuple[str, str]]]  # images, labels, (file, why) of the failures

# How a rectangle becomes a square: its centre; all of it, distorted; all of it, between grey bars.
Fit = Literal["crop", "squash", "pad"]
FITS: tuple[Fit, ...] = get_args(Fit)
GREY = (127, 127, 127)
BATCH_BYTES = 4 << 20
RAW = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2")  # by some of them Pillow shows a small preview
BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF", b"avif": "AVIF"}


class BadImage(Exception):
    """Why an image cannot be used."""


class ImageFile(NamedTuple):
    label: int
    member: str  # path of the file, or its name inside `archive`
    archive: str | None = None  # a zip file


def decode_image(content: bytes, size: int, fit: Fit = "crop") -> np.ndarray:
    """(S, S, 3) uint8, or BadImage."""
    if not content:
        raise BadImage("empty file, 0 bytes")
    try:
        # Warnings are about large images and odd metadata, which do no harm.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            return from_picture(image, size, fit)
    except BadImage:
        raise
    except MemoryError:
        raise BadImage("too many pixels for the memory of this machine") from None
    except UnidentifiedImageError:
        if content[4:8] == b"ftyp" and (kind := BRANDS.get(content[8:12])):
            raise not_read(kind) from None
        raise BadImage("not an image in a known format") from None
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    except Exception as error:  # Pillow can raise almost any exception on malformed bytes
        raise BadImage(f"{type(error).__name__}: {error}") from None


def not_read(kind: str) -> BadImage:
    return BadImage(f"{kind} is not read here, convert it to JPEG or PNG")


def check_ending(name: str) -> None:
    if name.lower().endswith(RAW):
        raise not_read(f"a camera's RAW format ({Path(name).suffix})")


def from_picture(image: Image.Image, size: int, fit: Fit = "crop") -> np.ndarray:
    """(S, S, 3) uint8 of an opened image, or BadImage."""
    frames = getattr(image, "n_frames", 1)
    # The further frames of a camera's MPO file are a preview or a gain map, not an animation.
    if frames > 1 and image.format != "MPO":
        raise BadImage(f"animated or multi-page, {frames} frames")
    image.load()
    return np.asarray(square(to_rgb(ImageOps.exif_transpose(image)), size, fit))


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise BadImage(f"integer pixels {values.min()}..{values.max()} do not fit 16 bits")
        return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")  # 65535 / 257 = 255
    if image.mode == "F":
        raise BadImage("floating-point pixels have no defined range")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def square(image: Image.Image, size: int, fit: Fit = "crop") -> Image.Image:
    """Crop: resize the short side to `size` and crop the centre, in one resampling. Squash: resize both sides. Pad:
    resize the long side, the image in the middle of a grey square."""
    if fit == "squash":
        return image.resize((size, size), Image.Resampling.BICUBIC)
    if fit == "pad":
        width, height = (max(1, round(side * size / max(image.size))) for side in image.size)
        made = Image.new("RGB", (size, size), GREY)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        made.paste(resized, ((size - width) // 2, (size - height) // 2))
        return made
    short = min(image.size)
    left, top = (image.width - short) / 2, (image.height - short) / 2
    return image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))


def decode_batch(files: Sequence[ImageFile], size: int, fit: Fit = "crop") -> Decoded:
    images, labels, problems = [], [], []
    for file in files:
        try:
            check_ending(file.member)
            images.append(decode_image(read_bytes(file), size, fit))
            labels.append(file.label)
        except (BadImage, OSError) as problem:
            shown = f"{file.archive}:{file.member}" if file.archive else file.member
            problems.append((shown, getattr(problem, "strerror", None) or str(problem)))
    stacked = np.stack(images) if images else np.zeros((0, size, size, 3), np.uint8)
    return stacked, np.array(labels, np.int64), problems


def read_bytes(file: ImageFile) -> bytes:
    return Path(file.member).read_bytes() if file.archive is None else open_zip(file.archive).read(file.member)


@functools.lru_cache(maxsize=1)
def open_zip(archive: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(archive)


@contextmanager
def decoders(workers: int) -> Iterator[Callable[[Sequence[ImageFile], int, Fit], Iterator[Decoded]]]:
    """Yields `decode(files, size, fit)`: batches in the order of `files`, decoded by so many processes; one worker is a
    thread of this process."""
    spawn = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(1) if workers == 1 else ProcessPoolExecutor(workers, spawn, initializer=start_decoder)

    def decode(files: Sequence[ImageFile], size: int, fit: Fit) -> Iterator[Decoded]:
        running: deque[Future] = deque()
        step = min(256, max(1, BATCH_BYTES // (size * size * 3)))
        for start in range(0, len(files), step):
            running.append(pool.submit(decode_batch, files[start : start + step], size, fit))
            if len(running) >= 2 * workers:  # bounds the memory
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    try:
        yield decode
    except BrokenProcessPool as error:
        why = "out of memory, or a script that packs without `if __name__ == '__main__':`"
        raise UserError(f"a decoding process died: {why}; try --workers 1") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_decoder() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
