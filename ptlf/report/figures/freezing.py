"""What froze when: correlation ratios by unit, the freezing map, and how much selections overlap."""

import itertools
import math
import statistics
from collections.abc import Sequence

from ptlf.report.drawing import Drawing
from ptlf.report.figures.accuracy import cell_size, column_names, heat_cell
from ptlf.report.figures.axes import TINY, Scale, line_chart, plain, shortened, task_key, ticks, words_width
from ptlf.report.runs import Comparison, Group, RunRecord, means, policy_of
from ptlf.report.theme import heat_step
from ptlf.run.results import Json


def written(comparison: Comparison, what: str) -> list[Group]:
    """Runs that wrote down some `ratios`, or `events` of freezing."""
    return [group for group in comparison.groups if any(entry[what] for entry in group.first["freezing"])]


def entries(group: Group, task: int | None = None) -> list[Json]:
    """What each seed wrote about the task, or about all of them."""
    found = [entry for run in group.runs for entry in run.results["freezing"]]
    return [entry for entry in found if task in (None, entry["task"])]


def tasks_of(group: Group) -> list[int]:
    return sorted({entry["task"] for entry in entries(group)})


def ratio_low(groups: Sequence[Group]) -> float:
    """The left end of the ratio axis, the same for all runs, so that they can be laid side by side."""
    values = [ratio for group in groups for entry in entries(group) for ratio in entry["ratios"].values()]
    return math.floor(min(values) * 20) / 20 if values else 0.0


def left_out(group: Group) -> set[str]:
    """Units whose ratio nobody had to compute, in some task."""
    ratios = [entry["ratios"] for entry in entries(group) if entry["ratios"]]
    return {unit for unit in group.first["units"] if any(unit not in computed for computed in ratios)}


def unit_room(units: Sequence[str], width: float) -> float:
    return min(
        max((words_width(unit, TINY) for unit in units), default=0.0) + 8, width * (0.36 if width > 400 else 0.31)
    )


def ratio_lines(low: float, group: Group, width: float) -> Drawing:
    """Units down, ratio across, a line per task; a filled dot is a unit that froze in that task."""
    units, tasks = group.first["units"], [t for t in tasks_of(group) if any(e["ratios"] for e in entries(group, t))]
    left, row = unit_room(units, width), 20.0 if len(units) <= 12 else 16.0
    drawing = Drawing(width, 0, f"Correlation ratio of every unit, {group.label}")
    top = task_key(drawing, left, 10, width - left, tasks) + 10
    scale = Scale(low, 1.0, left + 10, width - 10)
    bottom = top + row * len(units)
    for value in ticks(low, 1.0, 5):
        drawing.line([(scale(value), top), (scale(value), bottom)], "line")
        drawing.text(scale(value), bottom + 14, plain(value), "soft", size=TINY, anchor="middle")
    unit_names(drawing, units, left, top, row)
    for task in tasks:
        ratio_line(drawing, group, task, scale, top, row, dense=len(tasks) > 8)
    drawing.height = bottom + 20
    return drawing


def ratio_line(drawing: Drawing, group: Group, task: int, x: Scale, top: float, row: float, *, dense: bool) -> None:
    """dense: dots only where a unit froze."""
    role, points, seeds = f"task{task - 1}", [], entries(group, task)
    for number, unit in enumerate(group.first["units"]):
        if values := [entry["ratios"][unit] for entry in seeds if unit in entry["ratios"]]:
            value, froze = statistics.fmean(values), any(unit in entry["order"] for entry in seeds)
            points.append(((x(value), top + row * (number + 0.5)), froze, f"task {task}, {unit}: {value:.3f}"))
    look = {"width": 1.0, "opacity": 0.75} if dense else {"width": 1.6}
    drawing.line([at for at, _, _ in points], role, **look)
    if dense and any(froze for _, froze, _ in points):
        drawing.dots([at for at, froze, _ in points if froze], role, size=3.0)
    for at, froze, words in [] if dense else points:
        title = words if drawing.width > 400 else ""
        drawing.mark(*at, role if froze else "page", stroke=role, width=1.4, size=3.2, title=title)


def freezing_map(group: Group, width: float) -> Drawing:
    """Units down, epochs across, tasks side by side; with several seeds the shade is the share of them."""
    units, epochs = group.first["units"], group.config["training"]["epochs"]
    tasks = list(range(1, len(group.first["tasks"]) + 1))
    left, gap = unit_room(units, width), 4.0 if len(tasks) > 10 else 8.0
    per_row = len(tasks)
    while (width - left) / per_row - gap < 16 and per_row > 1:
        per_row = -(-per_row // 2)
    panel = (width - left) / per_row - gap
    row = 16.0 if len(units) <= 12 else 12.0
    block = 20 + row * len(units) + 24
    drawing = Drawing(width, block * -(-len(tasks) // per_row), f"Which units were frozen when, {group.label}")
    for place, task in enumerate(tasks):
        x, top = left + place % per_row * (panel + gap), place // per_row * block + 20
        if place % per_row == 0:
            unit_names(drawing, units, left, top, row)
        wide = panel > 44
        drawing.text(x + panel / 2, top - 7, f"task {task}" if wide else str(task), "ink", size=TINY, anchor="middle")
        map_panel(drawing, group, task, (x, top, panel, row), epochs)
        bottom = top + row * len(units)
        if panel > 90 and task == 1 and task not in tasks_of(group):
            drawing.text(x + panel / 2, (top + bottom) / 2 + 4, "no past yet", "soft", size=TINY, anchor="middle")
        if wide or place % per_row == 0:
            drawing.text(x, bottom + 12, "1", "soft", size=9)
            drawing.text(x + panel, bottom + 12, str(epochs), "soft", size=9, anchor="end")
            if panel > 70:
                drawing.text(x + panel / 2, bottom + 12, "epoch", "soft", size=9, anchor="middle")
    return drawing


def unit_names(drawing: Drawing, units: Sequence[str], left: float, top: float, row: float) -> None:
    for number, unit in enumerate(units):
        words = shortened(unit, left - 8, TINY, head=False)
        drawing.text(left - 6, top + row * (number + 0.5) + 3.5, words, "ink", size=TINY, anchor="end", title=unit)


def map_panel(drawing: Drawing, group: Group, task: int, box: tuple[float, float, float, float], epochs: int) -> None:
    x, top, panel, row = box
    seeds, epoch = len(group.runs), panel / epochs
    events = [event for entry in entries(group, task) for event in entry["events"]]
    trained = max((line["epoch"] for line in group.runs[0].epochs if line["task"] == task), default=0)
    for number, unit in enumerate(group.first["units"]):
        y = top + row * number + 0.75
        drawing.rect(x, y, epoch * trained, row - 1.5, "empty")
        starts = sorted(event["epoch"] for event in events if unit in event["frozen"])
        for count, (start, until) in enumerate(itertools.pairwise([*starts, trained + 1]), start=1):
            if until > start:
                role = "frozen" if count == seeds else f"heat{heat_step(count / seeds, -0.3, 1.2)}"
                title = f"task {task}: {unit} frozen from epoch {start}, {count} of {seeds} seeds"
                title = title if drawing.width > 400 else ""
                drawing.rect(x + epoch * (start - 1), y, epoch * (until - start), row - 1.5, role, title=title)


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of the larger selection that the other one also holds; 1 for two empty ones."""
    larger = max(len(set(first)), len(set(second)))
    return len(set(first) & set(second)) / larger if larger else 1.0


def task_overlap(group: Group, width: float) -> Drawing:
    """Selections at the end of each task against each other, averaged over seeds."""
    tasks = tasks_of(group)
    left, top = 52.0, 20.0
    cell, tall = cell_size(min((width - left) / len(tasks), 60.0))
    drawing = Drawing(left + cell * len(tasks), top + tall * len(tasks) + 2, f"Overlap of selections, {group.label}")
    column_names(drawing, tasks, left, top, cell)
    for row, one in enumerate(tasks):
        drawing.text(0, top + tall * (row + 0.5) + 3.5, f"task {one}", "ink", size=TINY)
        for column, other in enumerate(tasks[: row + 1]):
            pairs = zip(entries(group, one), entries(group, other), strict=False)
            value = statistics.fmean(overlap(a["order"], b["order"]) for a, b in pairs)
            box = (left + cell * column, top + tall * row, cell, tall)
            heat_cell(drawing, box, 100 * value, (0.0, 100.0), f"task {one} and task {other}, %", 0)
    return drawing


def epoch_overlaps(run: RunRecord) -> dict[int, list[float]]:
    """By epoch: for each task, how much of the selection at this epoch's ratios the ratios before it also chose."""
    found: dict[int, list[float]] = {}
    for entry in run.results["freezing"]:
        size, before = len(entry["order"]), entry["ratios"]
        previous = top_units(before, [], size)
        for epoch, ratios in sorted((int(e), r) for e, r in (entry.get("ratios_by_epoch") or {}).items()):
            frozen = [unit for event in entry["events"] if event["epoch"] < epoch for unit in event["frozen"]]
            now = top_units(ratios, frozen, size)
            found.setdefault(epoch, []).append(overlap(previous, now))
            previous = now
    return found


def top_units(ratios: dict[str, float], frozen: list[str], size: int) -> list[str]:
    free = sorted((unit for unit in ratios if unit not in frozen), key=lambda unit: -ratios[unit])
    return [*frozen, *free[: size - len(frozen)]]


def by_epoch(comparison: Comparison) -> list[Group]:
    groups = [group for group in comparison.groups if policy_of(group.config) == "correlation"]
    return [group for group in groups if any(epoch_overlaps(run) for run in group.runs)]


def epoch_overlap(groups: Sequence[Group], width: float) -> Drawing:
    """A line per run over the epochs at which the ratios were computed again, the mean over tasks and seeds."""
    lines = []
    for group in groups:
        overlaps = [pair for run in group.runs for pair in epoch_overlaps(run).items()]
        found = means([(epoch, value) for epoch, values in overlaps for value in values])
        lines.append((group, {epoch: (mean, 0.0) for epoch, (mean, _) in found.items()}))
    epochs = max(group.config["training"]["epochs"] for group in groups)
    places = [value for value in ticks(1, epochs, 6) if value == int(value)]
    label = "Overlap of the selection between epochs"
    return line_chart(label, "epoch of a task", lines, epochs, places, (0.0, 1.0), width)
