"""A gallery is whole and its numbers point to what is there, before anything is drawn."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from ptlf.core.reading import NUMBER, check_shape
from ptlf.run.results import Json

PLACE = (0, 10**6)
GALLERY: Json = {
    "sprite": {"image": str, "size": (1, 100_000), "columns": (1, 100_000)},
    "groups": [str],
    "labels": [str],
    "queries": [PLACE],
    "point_groups": [PLACE],
    "tiles": [[PLACE]],
    "looks": {"*": {"neighbours": [[PLACE]], "points": [[NUMBER]]}},
}


def check_gallery(gallery: Any) -> Json:
    """Raises a ValueError."""
    check_shape(gallery, GALLERY)
    tiles, queries, points, looks = (gallery[key] for key in ("tiles", "queries", "point_groups", "looks"))
    tile_pixels(gallery["sprite"], len(tiles))
    near = [tile for look in looks.values() for row in look["neighbours"] for tile in row]
    groups, labels = [group for group, _ in tiles], [label for _, label in tiles]
    for name, numbers in {"groups": groups + points, "labels": labels, "tiles": queries + near}.items():
        if max(numbers, default=-1) >= len(gallery[name]):
            raise ValueError(f"there are {len(gallery[name])} {name}, and number {max(numbers)} is named")
    if not queries or ("after" in looks and "before" not in looks):
        raise ValueError("it has no queries, or no look before training")
    for look in looks.values():
        if len(look["neighbours"]) != len(queries) or not all(look["neighbours"]):
            raise ValueError(f"{len(queries)} queries, {len(look['neighbours'])} rows of neighbours, or an empty one")
        if any(len(point) != 2 for point in look["points"]) or len(look["points"]) not in (0, len(points)):
            raise ValueError(f"{len(look['points'])} points that are not pairs, or {len(points)} groups of points")
    return gallery


def tile_pixels(sheet: Json, count: int, most: int | None = None) -> np.ndarray:
    """The first `count` tiles (N, S, S, 3) of a sheet of images, with at most `most` pixels to a side."""
    columns, size = sheet["columns"], min(sheet["size"], most or sheet["size"])
    try:
        url = base64.b64decode(sheet["image"].partition(",")[2])
        with Image.open(io.BytesIO(url), formats=("PNG", "JPEG")) as image:
            rows = image.height // sheet["size"]
            if columns * sheet["size"] != image.width or columns * rows < count:
                raise ValueError(f"sprite of {image.width} x {image.height} pixels has no room for {count} tiles")
            pixels = np.asarray(image.convert("RGB").resize((columns * size, rows * size)))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"sprite.image cannot be read: {error}") from None
    return pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)[:count]
