"""A gallery is whole and its numbers point to what is there, before anything is drawn."""

import re
from typing import Any

from ptlf.core.reading import NUMBER, check
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
    check(gallery, GALLERY)
    if not re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", gallery["sprite"]["image"]):
        raise ValueError("sprite.image is no picture")
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
