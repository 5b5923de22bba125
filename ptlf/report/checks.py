"""What a report reads of a run's files is there and of its type, before anything is drawn."""

import re
from typing import Any

from ptlf.run.results import Json, epoch_lines

NUMBER = (int, float)
DAMAGE = (ValueError, LookupError, TypeError, AttributeError)  # what a check raises
# A type; a dictionary with these keys, or "*" for any; a list of like values.
RESULTS: Json = {
    **dict.fromkeys(("status", "name"), str),
    **dict.fromkeys(("class_order", "tasks", "eval_splits", "units"), list),
    "environment": dict,
    "config": {**dict.fromkeys(("stream", "freezing", "objective", "encoder"), dict), "training": {"epochs": int}},
    "probes": {"*": {"settings": dict, "matrix": [[(*NUMBER, type(None))]]}},
    "freezing": [{"task": int, "order": list, "ratios": {"*": NUMBER}, "events": [{"epoch": int, "frozen": list}]}],
    "cost": {"train_seconds": NUMBER, "backward_flops": NUMBER},
}
EPOCHS = [dict.fromkeys(("task", "epoch", "seconds", "frozen", "backward_flops", "kept_bytes"), NUMBER)]
GALLERY: Json = {
    "sprite": {"image": str, **dict.fromkeys(("size", "columns", "width", "height"), int)},
    "tiles": [[int]],
    "queries": [int],
    "point_groups": [int],
    "looks": {"*": {"neighbours": [[int]], "points": [[NUMBER]]}},
}


def check(value: Any, shape: Any, where: str) -> None:
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = getattr(kind, "__name__", "number")
        raise ValueError(f"{where} is {str(value)[:40]!r}, not a {wanted}")
    if isinstance(shape, dict):
        for key, inner in shape.items():
            for name in value if key == "*" else [key]:
                check(value[name], inner, f"{where}.{name}".removeprefix("."))
    elif isinstance(shape, list):
        for item in value:
            check(item, shape[0], where)


def check_results(results: Json) -> None:
    check(results, RESULTS, "")
    check(epoch_lines(results), EPOCHS, "cost.per_epoch")
    for probe, values in results["probes"].items():
        if any(len(row) != len(results["eval_splits"]) for row in values["matrix"]):
            raise ValueError(f"{probe}.matrix has a row that is not of {len(results['eval_splits'])} eval_splits")


def check_gallery(gallery: Any) -> Json:
    check(gallery, GALLERY, "")
    if not re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", gallery["sprite"]["image"]):
        raise ValueError("sprite.image is no picture")
    for group, label in gallery["tiles"]:
        gallery["groups"][group], gallery["labels"][label]
    for look in gallery["looks"].values():
        for row in [*look["neighbours"], gallery["queries"]]:
            for tile in row:
                gallery["tiles"][tile]
        if any(len(point) != 2 for point in look["points"]):
            raise ValueError("points are not pairs")
        if look["points"] and len(look["points"]) != len(gallery["point_groups"]):
            raise ValueError(f"{len(look['points'])} points, {len(gallery['point_groups'])} groups of points")
    return gallery
