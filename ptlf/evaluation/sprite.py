"""Many small images as tiles of one image, embedded in a data URL."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

TILE, SPRITE_BYTES = 48, 110_000  # pixels; bytes before base64, which adds a third


def sprite(pixels: Sequence[np.ndarray]) -> dict[str, Any]:
    """pixels: (S, S, 3) uint8 each; tiles are laid out row by row. PNG if that is small enough, else JPEG."""
    size = min(TILE, pixels[0].shape[0])
    columns = int(np.ceil(np.sqrt(len(pixels))))
    sheet = Image.new("RGB", (columns * size, -(-len(pixels) // columns) * size))
    for number, tile in enumerate(pixels):
        image = Image.fromarray(np.asarray(tile)).resize((size, size), Image.Resampling.LANCZOS)
        sheet.paste(image, (number % columns * size, number // columns * size))
    formats: list[tuple[str, dict[str, Any]]] = [("png", {"optimize": True})]
    formats += [("jpeg", {"quality": quality, "subsampling": 0}) for quality in (90, 80, 65, 50, 30)]
    for kind, options in formats:
        buffer = io.BytesIO()
        sheet.save(buffer, format=kind, **options)
        if buffer.tell() <= SPRITE_BYTES:
            break
    url = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"image": url, "size": size, "columns": columns, "width": sheet.width, "height": sheet.height}
