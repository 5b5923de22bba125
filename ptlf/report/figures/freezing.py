"""What froze when: correlation ratios by unit, the freezing map, and how much selections overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ptlf.report.drawing import Drawing
from ptlf.report.figures.accuracy import heat_cell
from ptlf.report.figures.axes import TINY, Scale, grid_y, legend, plain, shortened, task_key, ticks, words_width
from ptlf.report.runs import Comparison, Group, RunRecord
from ptlf.report.theme import heat_step

Json = dict[str, Any]


def with_ratios(comparison: Comparison) -> list[Group]:
    return [g for g in comparison.groups if any(entry["ratios"] for entry in g.first["freezing"])]


def with_freezing(comparison: Comparison) -> list[Group]:
    return [g for g in comparison.groups if any(entry["events"] for entry in g.first["freezing"])]


def entries(group: Group, task: int) -> list[Json]:
    """What each seed wrote about the task."""
    return [entry for run in group.runs for entry in run.results["freezing"] if entry["task"] == task]


def tasks_of(group: Group) -> list[int]:
    return sorted({entry["task"] for run in group.runs for entry in run.results["freezing"]})


def ratio_low(groups: Sequence[Group]) -> float:
    """The left end of the ratio axis, the same for all runs, so that they can be laid side by side."""
    written = [entry for group in groups for run in group.runs for entry in run.results["freezing"]]
    values = [ratio for entry in written for ratio in entry["ratios"].values()]
    return math.floor(min(values) * 20) / 20 if values else 0.0


def left_out(group: Group) -> set[str]:
    """Units whose ratio nobody had to compute, in some task."""
    ratios = [entry["ratios"] for run in group.runs for entry in run.results["freezing"] if entry["ratios"]]
    return {unit for unit in group.first["units"] if any(unit not in computed for computed in ratios)}


def unit_room(units: Sequence[str], width: float) -> float:
    return min(max(words_width(unit, TINY) for unit in units) + 8, width * (0.36 if width > 400 else 0.31))


def ratio_lines(group: Group, low: float, width: float) -> Drawing:
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
    for number, unit in enumerate(units):
        words = shortened(unit, left - 8, TINY, head=False)
        drawing.text(left - 6, top + row * (number + 0.5) + 3.5, words, "ink", size=TINY, anchor="end", title=unit)
    for task in tasks:
        ratio_line(drawing, entries(group, task), units, task, scale, (top, row), len(tasks) > 8)
    drawing.height = bottom + 20
    return drawing


def ratio_line(
    drawing: Drawing,
    written: list[Json],
    units: Sequence[str],
    task: int,
    x: Scale,
    rows: tuple[float, float],
    dense: bool,
) -> None:
    """dense: dots only where a unit froze."""
    top, row = rows
    role, points = f"task{task - 1}", []
    for number, unit in enumerate(units):
        values = [entry["ratios"][unit] for entry in written if unit in entry["ratios"]]
        if values:
            points.append((x(statistics.fmean(values)), top + row * (number + 0.5), unit, statistics.fmean(values)))
    look = {"width": 1.0, "opacity": 0.75} if dense else {"width": 1.6}
    drawing.line([(px, py) for px, py, _, _ in points], role, **look)
    if dense:
        chosen = [(px, py) for px, py, unit, _ in points if any(unit in entry["order"] for entry in written)]
        if chosen:
            drawing.dots(chosen, role, size=3.0)
        return
    for px, py, unit, value in points:
        froze = any(unit in entry["order"] for entry in written)
        title = f"task {task}, {unit}: {value:.3f}" if drawing.width > 400 else ""
        drawing.mark(px, py, role if froze else "page", stroke=role, width=1.4, size=3.2, title=title)


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
            map_names(drawing, units, left, top, row)
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


def map_names(drawing: Drawing, units: Sequence[str], left: float, top: float, row: float) -> None:
    for number, unit in enumerate(units):
        words = shortened(unit, left - 8, TINY, head=False)
        drawing.text(left - 6, top + row * (number + 0.5) + 3.5, words, "ink", size=TINY, anchor="end", title=unit)


def map_panel(drawing: Drawing, group: Group, task: int, box: tuple[float, float, float, float], epochs: int) -> None:
    x, top, panel, row = box
    units, written, seeds = group.first["units"], entries(group, task), len(group.runs)
    trained = max((line["epoch"] for line in group.runs[0].epochs if line["task"] == task), default=0)
    for number, unit in enumerate(units):
        y = top + row * number
        drawing.rect(x, y + 0.75, panel * trained / epochs, row - 1.5, "empty")
        starts = sorted(event["epoch"] for entry in written for event in entry["events"] if unit in event["frozen"])
        for count, start in enumerate(starts, start=1):
            until = starts[count] if count < len(starts) else trained + 1
            if until <= start:
                continue
            role = "frozen" if count == seeds else f"heat{heat_step(count / seeds, -0.3, 1.2)}"
            place, wide = x + panel * (start - 1) / epochs, panel * (until - start) / epochs
            title = f"task {task}: {unit} frozen from epoch {start}, {count} of {seeds} seeds"
            drawing.rect(place, y + 0.75, wide, row - 1.5, role, title=title if drawing.width > 400 else "")


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of the larger selection that the other one also holds; 1 for two empty ones."""
    larger = max(len(set(first)), len(set(second)))
    return len(set(first) & set(second)) / larger if larger else 1.0


def task_overlap(group: Group, width: float) -> Drawing:
    """Selections at the end of each task against each other, averaged over seeds."""
    tasks = tasks_of(group)
    left, top = 52.0, 20.0
    cell = min((width - left) / len(tasks), 60.0)
    tall = min(max(cell * 0.72, 15.0), 30.0)
    drawing = Drawing(left + cell * len(tasks), top + tall * len(tasks) + 2, f"Overlap of selections, {group.label}")
    for row, one in enumerate(tasks):
        drawing.text(0, top + tall * (row + 0.5) + 3.5, f"task {one}", "ink", size=TINY)
        if cell >= 18 or row % 2 == 0:
            drawing.text(left + cell * (row + 0.5), top - 6, str(one), "soft", size=TINY, anchor="middle")
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
        for epoch, ratios in sorted((int(e), r) for e, r in entry.get("ratios_by_epoch", {}).items()):
            frozen = [unit for event in entry["events"] if event["epoch"] < epoch for unit in event["frozen"]]
            now = top_units(ratios, frozen, size)
            found.setdefault(epoch, []).append(overlap(previous, now))
            previous = now
    return found


def top_units(ratios: dict[str, float], frozen: list[str], size: int) -> list[str]:
    free = sorted((unit for unit in ratios if unit not in frozen), key=lambda unit: -ratios[unit])
    return [*frozen, *free[: size - len(frozen)]]


def by_epoch(comparison: Comparison) -> list[Group]:
    return [
        group
        for group in comparison.groups
        if group.config["freezing"]["policy"]["name"] == "correlation"
        and any(epoch_overlaps(run) for run in group.runs)
    ]


def epoch_overlap(groups: Sequence[Group], width: float) -> Drawing:
    """A line per run over the epochs at which the ratios were computed again, the mean over tasks and seeds."""
    epochs = groups[0].config["training"]["epochs"]
    left, height = 40.0, 150.0
    drawing = Drawing(width, 0, "Overlap of the selection between epochs")
    top = legend(drawing, left, 10, width - left, groups) + 8
    y, x = Scale(0, 1, top + height, top), Scale(1, max(epochs, 2), left + 12, width - 12)
    grid_y(drawing, y, left, width)
    for value in ticks(1, epochs, 6):
        if value == int(value):
            drawing.text(x(value), top + height + 16, plain(value), "soft", size=TINY, anchor="middle")
    drawing.text(width, top + height + 31, "epoch of a task", "soft", size=TINY, anchor="end")
    for group in groups:
        together: dict[int, list[float]] = {}
        for run in group.runs:
            for epoch, values in epoch_overlaps(run).items():
                together.setdefault(epoch, []).extend(values)
        role = f"run{group.colour}"
        points = [(x(epoch), y(statistics.fmean(values))) for epoch, values in sorted(together.items())]
        drawing.line(points, role, width=2, dash=group.dash)
        for px, py in points:
            drawing.mark(px, py, role, look=group.marker)
    drawing.height = top + height + 36
    return drawing
