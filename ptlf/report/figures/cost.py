"""What it cost while it ran: seconds, memory and FLOPs of every epoch, with the freeze events."""

import statistics

from ptlf.report.drawing import Drawing
from ptlf.report.figures.axes import TINY, Scale, grid_y, legend, padded
from ptlf.report.measures import COSTS, SCALES
from ptlf.report.runs import Comparison, Group, means

POINTS = 400  # of a line; more cannot be told apart
EVENTS = 60  # freeze events of a run that are drawn as triangles; more become dots

Series = list[tuple[float, float]]


def per_epoch(comparison: Comparison, width: float) -> Drawing | None:
    """A panel per cost over all epochs of the stream; a triangle where units froze. Runs on all tasks at once are left
    out beside others: an epoch of theirs is the whole stream, and the others would lie at the bottom."""
    known = [group for group in comparison.groups if group.runs[0].epochs]
    groups = [group for group in known if not group.joint] or known
    if not groups:
        return None
    epochs = comparison.epochs[-1]
    tasks = max(len(group.first["tasks"]) for group in groups)
    left, height = 46.0, 120.0
    drawing = Drawing(width, 0, "Cost of every epoch")
    top = legend(drawing, left, 10, width - left, groups) + 22
    x = Scale(0.5, epochs * tasks + 0.5, left, width - 2)
    for measure in (measure for measure in COSTS if measure.epoch):
        key, unit, stepped = measure.epoch, measure.unit, measure.unit != "s"  # seconds differ from epoch to epoch
        highest = max((line.get(key) or 0 for group in groups for run in group.runs for line in run.epochs), default=0)
        if not highest:
            continue
        unit = "G" if unit == "T" and highest < SCALES["T"] else unit
        lines = [(group, mean_line(group, key, SCALES.get(unit, 1), epochs)) for group in groups]
        values = [value for _, series in lines for _, value in (series if stepped else thinned(series))]
        # Bytes are the most that is kept at once; the others add up.
        title, size = f"{measure.title.split(',')[0]}, {unit}", block_size(max(len(series) for _, series in lines))
        if not stepped and size > 1:
            title += f" (medians of {size} epochs)"
        elif unit in ("s", "G", "T"):
            title += " per epoch"
        drawing.text(left, top - 6, title, "ink", size=TINY + 1.5, bold=True)
        y = Scale(*padded(values, zero=True, least=1e-9), top + height, top)
        shade_tasks(drawing, x, y, tasks, epochs)
        grid_y(drawing, y, x.start, x.end, most=4)
        if len(lines) == 2 and comparison.baseline and stepped and all(series for _, series in lines):
            corners = [[(x(place), y(value)) for place, value in steps(series)] for _, series in lines]
            drawing.area([*corners[0], *reversed(corners[1])], f"run{lines[1][0].colour}", opacity=0.14)
        for group, series in lines:
            draw_line(drawing, group, series, x, y, epochs, stepped=stepped)
        top += height + 34
    name_tasks(drawing, x, top - 18, tasks, epochs)
    drawing.height = top - 8
    return drawing


def shade_tasks(drawing: Drawing, x: Scale, y: Scale, tasks: int, epochs: int) -> None:
    """Every second task of a panel over all epochs."""
    for start in range(0, tasks * epochs, 2 * epochs):
        drawing.rect(x(start + 0.5), y.end, x(epochs) - x(0), y.start - y.end, "empty", opacity=0.45)


def name_tasks(drawing: Drawing, x: Scale, height: float, tasks: int, epochs: int) -> None:
    """Below the panels; every second one where there is no room for all."""
    for task in range(1, tasks + 1):
        if tasks <= 10 or task % 2 or drawing.width > 400:
            words = f"task {task}" if (drawing.width - x.start) / tasks > 44 else str(task)
            drawing.text(x((task - 0.5) * epochs + 0.5), height, words, "soft", size=TINY, anchor="middle")


def mean_line(group: Group, key: str, unit: float, epochs: int) -> Series:
    """(epoch of the stream, mean over seeds). `epochs` of a task are drawn, which may be more than the group has."""
    lines = [line for run in group.runs for line in run.epochs if line.get(key) is not None]
    found = means([((line["task"] - 1) * epochs + line["epoch"], line[key] / unit) for line in lines])
    return [(place, mean) for place, (mean, _) in found.items()]


def draw_line(
    drawing: Drawing, group: Group, series: Series, x: Scale, y: Scale, epochs: int, *, stepped: bool
) -> None:
    """epochs: of a task, in `series`."""
    if not series:
        return
    role, events = f"run{group.colour}", freeze_events(group, epochs)
    points = steps(series) if stepped else thinned(series)
    drawing.line([(x(place), y(value)) for place, value in points], role, width=1.8, dash=group.dash)
    if len(points) == 1:  # of which no line is seen
        drawing.mark(x(points[0][0]), y(points[0][1]), role, size=3.4, look=group.marker)
    values = dict(series)
    if not stepped:  # on the line, not on the epoch that it passes over
        values = {place: height_at(points, place - 0.5) for place in events if place in values}
    found = [(x(place - 0.5), y(values[place]), words) for place, words in events.items() if place in values]
    if len(events) <= EVENTS:
        for left, top, words in found:
            drawing.mark(left, max(top - 7, y.end + 4), role, size=3.4, look="down", title=words)
    elif stepped and found:
        drawing.dots([(left, top) for left, top, _ in found], role, size=1.8)


def height_at(points: Series, place: float) -> float:
    """Of the line through these points, which are in order; beyond its ends, that of the end."""
    after = next((number for number, point in enumerate(points) if point[0] >= place), len(points) - 1)
    (left, low), (right, high) = points[max(after - 1, 0)], points[after]
    share = min(max((place - left) / (right - left), 0.0), 1.0) if right > left else 0.0
    return low + share * (high - low)


def steps(series: Series) -> Series:
    """Flat over each epoch, upright between two: only the corners."""
    corners: Series = []
    for number, (place, value) in enumerate(series):
        if number == 0 or value != series[number - 1][1] or place != series[number - 1][0] + 1:
            corners.append((place - 0.5, value))
        if number + 1 == len(series) or value != series[number + 1][1] or place + 1 != series[number + 1][0]:
            corners.append((place + 0.5, value))
    return corners


def block_size(epochs: int) -> int:
    return max(1, -(-epochs // POINTS))


def thinned(series: Series) -> Series:
    """Medians of equally many epochs each where there are too many to see."""
    size = block_size(len(series))
    blocks = [series[start : start + size] for start in range(0, len(series), size)]
    return [(block[len(block) // 2][0], statistics.median(value for _, value in block)) for block in blocks]


def freeze_events(group: Group, epochs: int) -> dict[int, str]:
    """What froze, in words, by epoch of the stream."""
    found = {}
    for entry in group.first["freezing"]:
        for event in entry["events"]:
            words = f"{group.label}, task {entry['task']}, epoch {event['epoch']}: {', '.join(event['frozen'])} froze"
            found[(entry["task"] - 1) * epochs + event["epoch"]] = words
    return found
