"""A gallery is whole and its numbers point to what is there, before anything is drawn."""

import base64
import io
import re
from typing import Any

import numpy as np
from PIL import Image

from ptlf.core.reading import NUMBER, check_shape
from ptlf.run.results import Json

PLACE = (0, 10**6)
GALLERY: Json = {
    "sprite": {"image": str, **dict.fromkeys(("size", "columns", "width", "height"), (1, 100_000))},
    "groups": [str],
    "labels": [str],
    "tiles": [[PLACE]],
    "queries": [PLACE],
    "point_groups": [PLACE],
    "looks": {"*": {"neighbours": [[PLACE]], "points": [[NUMBER]]}},
}


def check_gallery(gallery: Any) -> Json:
    check_shape(gallery, GALLERY)
    tile_pixels(gallery["sprite"], len(gallery["tiles"]))
    for group, label in gallery["tiles"]:
        gallery["groups"][group], gallery["labels"][label]
    for group in gallery["point_groups"]:
        gallery["groups"][group]
    for look in gallery["looks"].values():
        for row in [*look["neighbours"], gallery["queries"]]:
            for tile in row:
                gallery["tiles"][tile]
        if any(len(point) != 2 for point in look["points"]):
            raise ValueError("points are not pairs")
        if look["points"] and len(look["points"]) != len(gallery["point_groups"]):
            raise ValueError(f"{len(look['points'])} points, {len(gallery['point_groups'])} groups of points")
    return gallery


def tile_pixels(sheet: Json, count: int, most: int | None = None) -> list[np.ndarray]:
    """The first `count` tiles of a sheet of images, with at most `most` pixels to a side."""
    columns, rows = sheet["columns"], sheet["height"] // sheet["size"]
    if not re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", sheet["image"]):
        raise ValueError("sprite.image is no picture")
    if columns * sheet["size"] != sheet["width"] or columns * rows < count:
        raise ValueError(f"sprite has no room for {count} tiles")
    size = min(sheet["size"], most or sheet["size"])
    try:
        with Image.open(io.BytesIO(base64.b64decode(sheet["image"].partition(",")[2]))) as image:
            if image.size != (sheet["width"], sheet["height"]):
                raise ValueError(f"sprite.image has {image.width} x {image.height} pixels")
            pixels = np.asarray(image.convert("RGB").resize((columns * size, rows * size)))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"sprite.image cannot be read: {error}") from None
    return [*pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)[:count]]
