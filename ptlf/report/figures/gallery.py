"""What the encoder learned: nearest images and a map of the features, before and after the stream."""

import math

from ptlf.report.drawing import Drawing, Point
from ptlf.report.figures.axes import SMALL, TINY, task_key
from ptlf.report.runs import Group
from ptlf.run.results import Json

MOMENTS = ("before", "after")


def begin_of(group: Group) -> str:
    return "as given" if group.given else "untrained"


def has_classes(group: Group) -> bool:
    """Whether the images have labels of their own; else their task takes that place."""
    return bool((shown_gallery(group) or {}).get("labelled", True))


def shown_gallery(group: Group) -> Json | None:
    """The gallery of the first seed that has one of the finished stream."""
    return next((run.gallery for run in group.runs if run.gallery and "after" in run.gallery["looks"]), None)


def neighbours(group: Group, width: float) -> Drawing | None:
    """A row per query: itself, its nearest before, its nearest after. Another class (another task, for images without
    labels) is faded and underlined."""
    gallery = shown_gallery(group)
    if gallery is None:
        return None
    count = len(gallery["looks"]["after"]["neighbours"][0])
    columns = 2 if width > 600 else 1
    between, inner = 44.0, 14.0
    wide = (width - between * (columns - 1)) / columns
    side = (wide - 2 * inner) / (1 + 2 * count)
    drawing = Drawing(width, 0, f"Nearest images before and after, {group.label}", gallery["sprite"])
    queries = gallery["queries"]
    total, rows = len(queries) * count, math.ceil(len(queries) / columns)
    before, after = (same_class(gallery, moment) for moment in MOMENTS)
    begin, kind = begin_of(group), "class" if has_classes(group) else "task"
    words = f"Of the same {kind}: {before} of {total} {begin}, {after} of {total} trained."
    drawing.text(0, 12, words, "ink", size=SMALL)
    for place, query in enumerate(queries):
        left, top = place // rows * (wide + between), 44 + place % rows * (side + 6)
        if place % rows == 0:
            drawing.text(left, 36, "image", "soft", size=TINY)
            drawing.text(left + side + inner, 36, f"nearest, {begin}", "soft", size=TINY)
            drawing.text(left + side + 2 * inner + count * side, 36, "nearest, trained", "ink", size=TINY, bold=True)
        tile(drawing, gallery, query, query, left, top, side)
        for block, moment in enumerate(MOMENTS):
            start = left + side + inner + block * (count * side + inner)
            for number, other in enumerate(gallery["looks"][moment]["neighbours"][place]):
                tile(drawing, gallery, query, other, start + number * side, top, side)
    drawing.height = 44 + rows * (side + 6)
    return drawing


def same_class(gallery: Json, moment: str) -> int:
    label = [label for _, label in gallery["tiles"]]
    rows = zip(gallery["queries"], gallery["looks"][moment]["neighbours"], strict=True)
    return sum(label[query] == label[other] for query, row in rows for other in row)


def tile(drawing: Drawing, gallery: Json, query: int, other: int, x: float, y: float, side: float) -> None:
    sheet, label = gallery["sprite"], gallery["tiles"][other][1]
    row, column = divmod(other, sheet["columns"])
    same = label == gallery["tiles"][query][1]
    place, title = (column * sheet["size"], row * sheet["size"]), gallery["labels"][label]
    drawing.tile(x + 1, y, side - 2, place, title=title, opacity=1.0 if same else 0.4)
    if not same:
        drawing.rect(x + 1, y + side - 1, side - 2, 2.5, "bad")


def feature_map(group: Group, width: float) -> Drawing | None:
    """Two maps of the same images, or none; near means similar. Axes have no meaning of their own."""
    gallery = shown_gallery(group)
    if gallery is None or not all(gallery["looks"][moment]["points"] for moment in MOMENTS):
        return None
    side = (width - 20) / 2
    drawing = Drawing(width, 0, f"Map of features before and after, {group.label}")
    top = task_key(drawing, 0, 10, width, range(1, len(gallery["groups"]) + 1)) + 18
    radius = 2.6 if width > 400 else 1.7
    for block, (moment, words) in enumerate(zip(MOMENTS, (begin_of(group), "after the stream"), strict=True)):
        left = block * (side + 20)
        drawing.text(left, top - 4, words, "ink" if block else "soft", size=SMALL, bold=bool(block))
        drawing.rect(left, top + 2, side, side, "card", stroke="line")
        points: dict[int, list[Point]] = {}
        for task, (x, y) in zip(gallery["point_groups"], gallery["looks"][moment]["points"], strict=True):
            points.setdefault(task, []).append((left + 10 + x * (side - 20), top + 12 + y * (side - 20)))
        for task in sorted(points):
            drawing.dots(points[task], f"task{task}", size=radius, opacity=0.85)
    drawing.height = top + side + 4
    return drawing
