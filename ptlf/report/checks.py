"""A gallery is whole and its numbers point to what is there, before anything is drawn."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from ptlf.core.reading import NUMBER, check_shape
from ptlf.run.results import Json

PLACE = (0, 10**6)
LOOK = {"neighbours": [[PLACE]], "points": [[NUMBER]]}
SPRITE = {"image": str, "size": (1, 100_000), "columns": (1, 100_000)}
GALLERY: Json = {"sprite": SPRITE, "groups": [str], "labels": [str], "looks": {"*": LOOK}}
GALLERY |= {"queries": [PLACE], "point_groups": [PLACE], "tiles": [[PLACE]]}


def check_gallery(gallery: Any) -> Json:
    """Raises a ValueError."""
    check_shape(gallery, GALLERY)
    tiles, queries, points, looks = (gallery[key] for key in ("tiles", "queries", "point_groups", "looks"))
    tile_pixels(gallery["sprite"], len(tiles))
    tile, group, label = ((0, len(gallery[name]) - 1) for name in ("tiles", "groups", "labels"))
    check_shape(gallery, {"queries": [tile], "point_groups": [group], "looks": {"*": {"neighbours": [[tile]]}}})
    for row in tiles:
        check_shape(dict(zip(("group", "label"), row, strict=True)), {"group": group, "label": label}, "tiles")
    fits = bool(queries) and ("after" not in looks or "before" in looks)
    for look in looks.values():
        fits &= len(look["neighbours"]) == len(queries) and all(look["neighbours"])
        fits &= len(look["points"]) in (0, len(points)) and all(len(point) == 2 for point in look["points"])
    if not fits:
        raise ValueError("its queries, neighbours and points do not fit together")
    return gallery


def tile_pixels(sheet: Json, count: int, most: int | None = None) -> np.ndarray:
    """The first `count` tiles (N, S, S, 3) of a sheet of images, with at most `most` pixels to a side."""
    columns, size = sheet["columns"], min(sheet["size"], most or sheet["size"])
    try:
        data = base64.b64decode(sheet["image"].partition(",")[2])
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            rows = image.height // sheet["size"]
            if columns * sheet["size"] != image.width or columns * rows < count:
                raise ValueError(f"sprite of {image.width} x {image.height} pixels has no room for {count} tiles")
            pixels = np.asarray(image.convert("RGB").resize((columns * size, rows * size)))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"sprite.image cannot be read: {error}") from None
    return pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)[:count]
