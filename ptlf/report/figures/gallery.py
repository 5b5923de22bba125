"""What the encoder learned: nearest images and a map of the features, before and after the stream."""

import base64
import io

import numpy as np
from matplotlib.figure import Figure as Canvas
from PIL import Image

from ptlf.report.drawing import HALF, Colours, frame
from ptlf.report.runs import Group
from ptlf.run.results import Json

MOMENTS = ("before", "after")


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


def neighbours(group: Group, colours: Colours) -> Canvas:
    """A row per query: itself, its nearest before, its nearest after. Another class (another task, for images without
    labels) is faded and underlined."""
    gallery = shown_gallery(group) or {}
    sheet, queries, labels = gallery["sprite"], gallery["queries"], [label for _, label in gallery["tiles"]]
    count = len(gallery["looks"]["after"]["neighbours"][0])
    side = (HALF - 20) / (2 * count + 1 + 0.6)
    total, (before, after) = len(queries) * count, (same_class(gallery, moment) for moment in MOMENTS)
    kind = "class" if has_classes(group) else "task"
    words = f"Of the same {kind}: {before} of {total} {group.first_row}, {after} of {total} trained"
    canvas, axes = frame(colours, side * len(queries) + 14, left=12.0, bottom=4.0, title=words)
    axes.set(xlim=(0, 2 * count + 1.6), ylim=(len(queries), -14 / side))
    axes.axis("off")
    with Image.open(io.BytesIO(base64.b64decode(sheet["image"].partition(",")[2]))) as image:
        pixels = np.asarray(image.convert("RGB"))
    for start, name in ((0, "image"), (1.3, f"nearest, {group.first_row}"), (count + 1.6, "nearest, trained")):
        axes.text(start, -0.1, name, color=colours["soft"])
    for row, query in enumerate(queries):
        blocks = [(0.0, [query])] + [
            (start, gallery["looks"][moment]["neighbours"][row])
            for start, moment in zip((1.3, count + 1.6), MOMENTS, strict=True)
        ]
        for start, tiles in blocks:
            for place, tile in enumerate(tiles, start=1):
                top, left = (sheet["size"] * number for number in divmod(tile, sheet["columns"]))
                cut = pixels[top : top + sheet["size"], left : left + sheet["size"]]
                same, x = labels[tile] == labels[query], start + place - 1
                extent = (x + 0.03, x + 0.97, row + 0.94, row + 0.04)
                axes.imshow(cut, extent=extent, aspect="auto", alpha=None if same else 0.4, interpolation="none")
                if not same:
                    axes.plot([x + 0.03, x + 0.97], [row + 0.97] * 2, color=colours["bad"], linewidth=1.5)
    axes.set(xlim=(0, 2 * count + 1.6), ylim=(len(queries), -14 / side))
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
    for place, (moment, title) in enumerate(zip(MOMENTS, (group.first_row, "after the stream"), strict=True)):
        axes = canvas.add_axes((box.x0 + place * box.width * 0.51, box.y0, box.width * 0.49, box.height))
        for task in names:
            mine = [
                p
                for t, p in zip(gallery["point_groups"], gallery["looks"][moment]["points"], strict=True)
                if t == task - 1
            ]
            axes.plot(*np.reshape(mine, (-1, 2)).T, ".", color=colours[f"task{task - 1}"], markersize=4, alpha=0.85)
        axes.set(xticks=[], yticks=[], title=title, facecolor=colours["card"])
        axes.invert_yaxis()
    return canvas
