"""Decode images in any form to square uint8 arrays, made square as `Fit` says, or refuse them with a reason.

EXIF orientation is applied, transparency composited on white, 16-bit grey divided by 257, and all converted to RGB.
"""

import io
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ptlf.core.files import open_regular

# How a rectangle becomes a square: its centre; all of it, distorted; all of it, between grey bars.
Fit = Literal["crop", "squash", "pad"]
FITS: tuple[Fit, ...] = get_args(Fit)
GREY = (127, 127, 127)
CHANNELS = (1, 3, 4)
RAW = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2")  # by some of them Pillow shows a small preview
BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF", b"avif": "AVIF"}


MAX_FILE_BYTES = 512 << 20  # of an image's file


@cache
def formats() -> tuple[str, ...]:
    """What is read; MPO files are JPEGs. Of its other formats, Pillow hands some (EPS) to another program."""
    Image.init()
    known = "AVIF BMP DIB GIF ICO JPEG JPEG2000 PCX PNG PPM SGI TGA TIFF WEBP"
    return tuple(name for name in known.split() if name in Image.OPEN)


class BadImage(Exception):
    """Why an image cannot be used."""


def not_read(kind: str) -> BadImage:
    return BadImage(f"{kind} is not read here, convert it to JPEG or PNG")


def from_picture(image: Image.Image, size: int, fit: Fit) -> np.ndarray:
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


def square(image: Image.Image, size: int, fit: Fit) -> Image.Image:
    bicubic = Image.Resampling.BICUBIC
    if fit == "crop":
        return ImageOps.fit(image, (size, size), bicubic)
    if fit == "pad":
        return ImageOps.pad(image, (size, size), bicubic, GREY)
    return image.resize((size, size), bicubic)


def to_square(image: Any, size: int, fit: Fit = "crop") -> np.ndarray:
    """(S, S, 3) uint8 of a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor ([C, ]H, W)."""
    if isinstance(image, Mapping):  # a Hugging Face image that was not decoded
        image = image.get("bytes") or image.get("path")
    try:
        if isinstance(image, str | os.PathLike):
            if str(image).lower().endswith(RAW):
                raise not_read(f"a camera's RAW format ({Path(image).suffix})")
            with open_regular(image) as file:
                if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                    raise BadImage(f"a file of more than {MAX_FILE_BYTES >> 20} MiB")
                image = file.read()
        if isinstance(image, bytes):
            if not image:
                raise BadImage("empty file, 0 bytes")
            with Image.open(io.BytesIO(image), formats=formats()) as opened:
                return from_picture(opened, size, fit)
        if isinstance(image, torch.Tensor):
            image = image.detach().cpu()
            image = (image.permute(1, 2, 0) if image.ndim == 3 and image.shape[0] in CHANNELS else image).numpy()
        if isinstance(image, np.ndarray):
            image = as_uint8(image)
            if image.dtype == np.uint8 and image.shape == (size, size, 3):
                return image
            image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
        if not isinstance(image, Image.Image):
            raise BadImage(f"a {type(image).__name__} is no image; give a path, a PIL image, an array or a tensor")
        return from_picture(image, size, fit)
    except BadImage:
        raise
    except MemoryError:
        raise BadImage("too many pixels for the memory of this machine") from None
    except UnidentifiedImageError:
        if image[4:8] == b"ftyp" and (kind := BRANDS.get(image[8:12])):
            raise not_read(kind) from None
        raise BadImage("not an image in a known format") from None
    except Exception as error:  # Pillow can raise almost any exception on malformed bytes
        raise BadImage(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}") from None


def as_uint8(image: np.ndarray) -> np.ndarray:
    """uint8 or uint16 as it is; floating-point values must lie in [0, 1]."""
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in CHANNELS) or 0 in image.shape:
        raise BadImage(f"an array of shape {image.shape} is no image (H, W), (H, W, 3) or (H, W, 4)")
    if image.dtype in (np.uint8, np.uint16):
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise BadImage(f"pixels are {image.dtype}; give uint8 in 0..255, or floating point in 0..1")
    low, high = float(image.min()), float(image.max())
    if not 0 <= low <= high <= 1:  # NaN too
        values = f"floating-point pixels lie in {low:.3g}..{high:.3g}"
        raise BadImage(f"{values}; give them in 0..1 (not normalised), or uint8 in 0..255")
    return np.rint(image * 255).astype(np.uint8)
