"""Small random pictures, encoded and in folders."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)


def picture(width: int = 24, height: int = 24) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def tree(folder: Path, *classes: str, files: int = 3) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(files):
            picture(8, 8).save(folder / name / f"{index}.png")
    return folder
