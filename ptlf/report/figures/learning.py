"""What is seen without labels: losses over the epochs, spread and effective rank of the features over the tasks."""

from ptlf.report.drawing import Drawing
from ptlf.report.figures.axes import TINY, Scale, grid_y, legend, line_chart, padded
from ptlf.report.figures.cost import Series, draw_line, name_tasks, shade_tasks, thinned
from ptlf.report.runs import Comparison, Group, means

FEATURES = {
    "effective_rank": (
        "Effective rank of the features",
        "After each task, how many directions the features of its images use (exp of the singular values' entropy).",
    ),
    "spread": (
        "Spread of the features",
        "After each task, how far the normalised features of its images differ: 1 is evenly, 0 a collapse.",
    ),
}


def losses(comparison: Comparison) -> list[str]:
    lines = [line for group in comparison.groups for run in group.runs for line in run.epochs]
    return list(dict.fromkeys(name for line in lines for name in line.get("loss", {})))


def loss_curves(comparison: Comparison, width: float) -> Drawing | None:
    """A panel per loss over all epochs of the stream."""
    groups = [group for group in comparison.groups if group.runs[0].epochs]
    epochs = comparison.epochs[-1]
    tasks = max(len(group.first["tasks"]) for group in groups)
    left, height = 52.0, 120.0
    drawing = Drawing(width, 0, "Losses of every epoch")
    top = legend(drawing, left, 10, width - left, groups) + 22
    x = Scale(0.5, epochs * tasks + 0.5, left, width - 2)
    for name in losses(comparison):
        lines = [(group, mean_loss(group, name, epochs)) for group in groups]
        known = [value for _, series in lines for _, value in thinned(series)]
        if not known:
            continue
        drawing.text(left, top - 6, name, "ink", size=TINY + 1.5, bold=True)
        least = max(map(abs, known)) * (1e-3 if len(known) > 1 else 0.2)  # else the axis would name one value only
        y = Scale(*padded(known, least=least or 1e-9), top + height, top)
        shade_tasks(drawing, x, y, tasks, epochs)
        grid_y(drawing, y, x.start, x.end, most=4)
        for group, series in lines:
            draw_line(drawing, group, series, x, y, epochs, stepped=False)
        top += height + 34
    name_tasks(drawing, x, top - 18, tasks, epochs)
    drawing.height = top - 8
    return drawing


def mean_loss(group: Group, name: str, epochs: int) -> Series:
    """(epoch of the stream, mean over seeds) of finite losses."""
    lines = [line for run in group.runs for line in run.epochs]
    found = [((line["task"] - 1) * epochs + line["epoch"], line.get("loss", {}).get(name)) for line in lines]
    finite = [(place, value) for place, value in found if isinstance(value, int | float)]
    return [(place, mean) for place, (mean, _) in means(finite).items()]


def over_tasks(comparison: Comparison, key: str, width: float) -> Drawing | None:
    lines = []
    for group in comparison.groups:
        entries = [entry for run in group.runs for entry in run.results.get("features") or []]
        lines.append((group, means([(entry["task"], entry[key]) for entry in entries])))
    values = [mean for _, series in lines for mean, _ in series.values()]
    if not values:
        return None
    tasks = comparison.tasks
    places = range(1, tasks + 1, 1 if tasks <= 10 or width > 400 else 2)
    ends = padded(values, zero=True, least=1e-3)
    return line_chart(FEATURES[key][0], "after task", lines, tasks, places, ends, width)
