"""What the encoder learned: nearest images and a map of the features, before and after the stream."""

import numpy as np
from matplotlib.figure import Figure as Canvas

from ptlf.report.checks import tile_pixels
from ptlf.report.drawing import HALF, Colours, frame
from ptlf.report.runs import Group
from ptlf.run.results import Json

MOMENTS = ("before", "after")
MAX_PIXELS = 48  # of a tile's side


def has_classes(group: Group) -> bool:
    """Whether the images have labels of their own; else their task takes that place."""
    return bool((shown_gallery(group) or {}).get("labelled", True))


def shown_gallery(group: Group) -> Json | None:
    """The gallery of the first seed that has one of the finished stream."""
    return next((run.gallery for run in group.runs if run.gallery and "after" in run.gallery["looks"]), None)


def has_maps(group: Group) -> bool:
    return all((shown_gallery(group) or {})["looks"].get(moment, {}).get("points") for moment in MOMENTS)


def same_class(gallery: Json, moment: str) -> int:
    label = [label for _, label in gallery["tiles"]]
    rows = zip(gallery["queries"], gallery["looks"][moment]["neighbours"], strict=True)
    return sum(label[query] == label[other] for query, row in rows for other in row)


def nearest_images(group: Group, colours: Colours) -> Canvas:
    """A row per query: itself, its nearest before, its nearest after. Another class (another task, for images without
    labels) is faded and underlined."""
    gallery = shown_gallery(group) or {}
    labels = [label for _, label in gallery["tiles"]]
    pixels = tile_pixels(gallery["sprite"], len(labels), MAX_PIXELS)
    queries, looks = gallery["queries"], [gallery["looks"][moment]["neighbours"] for moment in MOMENTS]
    count, total = len(looks[1][0]), len(queries) * len(looks[1][0])
    side, starts = (HALF - 20) / (2 * count + 1.6), (0.0, 1.3, count + 1.6)
    kind, (before, after) = "class" if has_classes(group) else "task", (same_class(gallery, m) for m in MOMENTS)
    title = f"Of the same {kind}: {before} of {total} {group.first_row}, {after} of {total} trained"
    canvas, axes = frame(colours, side * len(queries) + 14, left=12.0, bottom=4.0, title=title)
    for start, name in zip(starts, ("image", f"nearest, {group.first_row}", "nearest, trained"), strict=True):
        axes.text(start, -0.1, name, color=colours["soft"])
    for row, query in enumerate(queries):
        for start, tiles in zip(starts, ([query], *(look[row] for look in looks)), strict=True):
            for x, tile in enumerate(tiles):
                left, same = start + x, labels[tile] == labels[query]
                extent, alpha = (left + 0.03, left + 0.97, row + 0.94, row + 0.04), None if same else 0.4
                axes.imshow(pixels[tile], extent=extent, aspect="auto", alpha=alpha, interpolation="none")
                if not same:
                    axes.plot([left + 0.03, left + 0.97], [row + 0.97] * 2, color=colours["bad"])
    axes.set(xlim=(0, 2 * count + 1.6), ylim=(len(queries), -14 / side))
    axes.axis("off")
    return canvas


def feature_map(group: Group, colours: Colours) -> Canvas:
    """Two maps of the same images; near means similar. Axes have no meaning of their own."""
    gallery = shown_gallery(group) or {}
    names = range(1, len(gallery["groups"]) + 1)
    style = {"linestyle": "", "marker": "o"}
    keys = [(f"{'task ' * (task == 1)}{task}", style | {"color": colours[f"task{task - 1}"]}) for task in names]
    canvas, first = frame(colours, (HALF - 20) / 2, left=4.0, bottom=4.0, keys=keys, title=" ")
    box = first.get_position()
    canvas.delaxes(first)
    points = {moment: np.reshape(gallery["looks"][moment]["points"], (-1, 2)) for moment in MOMENTS}
    for place, (moment, title) in enumerate(zip(MOMENTS, (group.first_row, "after the stream"), strict=True)):
        axes = canvas.add_axes((box.x0 + place * box.width * 0.51, box.y0, box.width * 0.49, box.height))
        for task in names:
            mine = points[moment][np.equal(gallery["point_groups"], task - 1)]
            dots: Json = {"color": colours[f"task{task - 1}"], "markersize": 2.6, "alpha": 0.85, "markeredgewidth": 0}
            axes.plot(*mine.T, "o", **dots)
        axes.set(xticks=[], yticks=[], title=title, facecolor=colours["card"])
        axes.invert_yaxis()
    return canvas
