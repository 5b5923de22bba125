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
    """Raises a ValueError."""
    check_shape(gallery, GALLERY)
    tile_pixels(gallery["sprite"], len(gallery["tiles"]))
    groups, labels = zip(*gallery["tiles"], strict=True) if gallery["tiles"] else ((), ())
    looks, queries, points = gallery["looks"], gallery["queries"], gallery["point_groups"]
    near = [tile for look in looks.values() for row in look["neighbours"] for tile in row]
    for name, numbers, known in (
        ("groups", [*groups, *points], gallery["groups"]),
        ("labels", labels, gallery["labels"]),
        ("tiles", [*queries, *near], gallery["tiles"]),
    ):
        if any(number >= len(known) for number in numbers):
            raise ValueError(f"there are {len(known)} {name}, and number {max(numbers)} is named")
    if not queries or ("after" in looks and "before" not in looks):
        raise ValueError("it has no queries, or no look before training")
    for look in looks.values():
        if len(look["neighbours"]) != len(queries) or {0} & set(map(len, look["neighbours"])):
            raise ValueError(f"{len(queries)} queries, {len(look['neighbours'])} rows of neighbours, or an empty one")
        if any(len(point) != 2 for point in look["points"]) or len(look["points"]) not in (0, len(points)):
            raise ValueError(f"{len(look['points'])} points that are not pairs, or {len(points)} groups of points")
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
