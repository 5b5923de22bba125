"""What froze when: correlation ratios by unit, the freezing map, and how much selections overlap."""

import itertools
import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ptlf.report.drawing import STEPS, Colours, frame
from ptlf.report.figures.accuracy import heat_map
from ptlf.report.figures.lines import Series, over_tasks
from ptlf.report.runs import Comparison, Group, RunRecord, means
from ptlf.run.results import Json


def having(comparison: Comparison, what: str) -> list[Group]:
    """Runs that recorded some `ratios`, or `events` of freezing."""
    return [group for group in comparison.groups if any(entry[what] for entry in group.first["freezing"])]


def entries(group: Group, task: int | None = None) -> list[Json]:
    """What each seed recorded of the task, or of all of them."""
    found = [entry for run in group.runs for entry in run.results["freezing"]]
    return [entry for entry in found if task in (None, entry["task"])]


def tasks_of(group: Group) -> list[int]:
    return sorted({entry["task"] for entry in entries(group)})


def ratio_low(groups: Sequence[Group]) -> float:
    """The left end of the ratio axis, the same for all runs, so that they can be laid side by side."""
    values = [ratio for group in groups for entry in entries(group) for ratio in entry["ratios"].values()]
    return math.floor(min(values) * 20) / 20 if values else 0.0


def units_without_ratio(group: Group) -> set[str]:
    """Units whose ratio nobody had to compute, in some task."""
    ratios = [entry["ratios"] for entry in entries(group) if entry["ratios"]]
    return {unit for unit in group.first["units"] if any(unit not in computed for computed in ratios)}


def unit_frame(units: Sequence[str], colours: Colours, **more: object) -> tuple[Canvas, Axes]:
    """A row per unit, the first on top. Long names lose their beginning, where they differ least."""
    names = [unit if len(unit) <= 24 else "…" + unit[-23:] for unit in units]
    left = 10.0 + 4.9 * max(map(len, names), default=0)
    canvas, axes = frame(colours, max(len(units), 1) * (13.0 if len(units) <= 12 else 10.5), left=left, **more)  # type: ignore[arg-type]
    axes.set_yticks(range(len(units)), names, size=8.0)
    axes.set_ylim(len(units) - 0.5, -0.5)
    return canvas, axes


def ratio_lines(low: float, group: Group, colours: Colours) -> Canvas:
    """Units down, ratio across, a line per task; a filled dot is a unit that froze in that task."""
    tasks = [task for task in tasks_of(group) if any(entry["ratios"] for entry in entries(group, task))]
    keys = [(f"{'task ' * (task == tasks[0])}{task}", {"color": colours[f"task{task - 1}"]}) for task in tasks]
    canvas, axes = unit_frame(group.first["units"], colours, keys=keys)
    for task in tasks:
        colour, seeds = colours[f"task{task - 1}"], entries(group, task)
        for_unit = {
            row: [e["ratios"][unit] for e in seeds if unit in e["ratios"]]
            for row, unit in enumerate(group.first["units"])
        }
        points = {row: statistics.fmean(values) for row, values in for_unit.items() if values}
        frozen = {row for row in points if any(group.first["units"][row] in entry["order"] for entry in seeds)}
        axes.plot([*points.values()], [*points], color=colour, linewidth=1.2)
        for fill, rows in ((colour, frozen), (colours["page"], {*points} - frozen if len(tasks) <= 8 else set())):
            axes.plot([points[row] for row in rows], [*rows], "o", color=colour, markerfacecolor=fill)
    axes.set_xlim(low - 0.02 * (1 - low), 1 + 0.02 * (1 - low))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    return canvas


def freezing_map(group: Group, colours: Colours) -> Canvas:
    """Units down, epochs of all tasks across; with several seeds the shade is the share of them."""
    units, epochs, count = group.first["units"], group.config["training"]["epochs"], len(group.first["tasks"])
    canvas, axes = unit_frame(units, colours)
    ends = means([(line["task"], line["epoch"]) for line in group.runs[0].epochs])
    trained = {task: max(line["epoch"] for line in group.runs[0].epochs if line["task"] == task) for task in ends}
    for row, unit in enumerate(units):
        bars = [((task - 1) * epochs, trained[task], "empty") for task in trained]
        bars += [bar for task in trained for bar in frozen_bars(group, task, unit, epochs, trained[task])]
        spans = [(start, width) for start, width, _ in bars]
        axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=[colours[role] for _, _, role in bars])
    for task in range(1, count):
        axes.axvline(task * epochs, color=colours["page"], linewidth=3 if count <= 10 else 1.5)
    axes.set_xlim(0, count * epochs)
    axes.set_xticks([(task + 0.5) * epochs for task in range(count)], [str(task + 1) for task in range(count)])
    axes.set_xlabel(f"task of {epochs} epoch{'s' * (epochs != 1)}")
    axes.grid(False)
    return canvas


def frozen_bars(group: Group, task: int, unit: str, epochs: int, trained: int) -> list[tuple[int, int, str]]:
    """(first epoch of the stream, epochs, role of the colour) for each number of seeds in which the unit is frozen."""
    events = [event for entry in entries(group, task) for event in entry["events"]]
    starts = sorted(event["epoch"] for event in events if unit in event["frozen"])
    bars = []
    for count, (start, until) in enumerate(itertools.pairwise([*starts, trained + 1]), start=1):
        role = f"heat{round(STEPS * (0.2 + 0.6 * count / len(group.runs)))}" if count < len(group.runs) else "frozen"
        bars += [((task - 1) * epochs + start - 1, until - start, role)] * (until > start)
    return bars


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of the larger selection that the other one also holds; 1 for two empty ones."""
    larger = max(len(set(first)), len(set(second)))
    return len(set(first) & set(second)) / larger if larger else 1.0


def task_overlap(group: Group, colours: Colours) -> Canvas:
    """Selections at the end of each task against each other, averaged over seeds."""
    tasks, cells = tasks_of(group), {}
    for (row, one), (column, other) in itertools.product(enumerate(tasks), repeat=2):
        if column <= row:
            pairs = zip(entries(group, one), entries(group, other), strict=False)
            cells[row, column] = 100 * statistics.fmean(overlap(a["order"], b["order"]) for a, b in pairs)
    rows = [f"task {task}" for task in tasks]
    return heat_map(cells, rows, [str(task) for task in tasks], (0.0, 100.0), "task", 44.0, colours)


def epoch_overlaps(run: RunRecord) -> dict[int, list[float]]:
    """By epoch: for each task, how much of the selection at this epoch's ratios the ratios before it also chose."""
    found: dict[int, list[float]] = {}
    for entry in run.results["freezing"]:
        size, previous = len(entry["order"]), top_units(entry["ratios"], [], len(entry["order"]))
        for epoch, ratios in sorted((int(e), r) for e, r in (entry.get("ratios_by_epoch") or {}).items()):
            frozen = [unit for event in entry["events"] if event["epoch"] < epoch for unit in event["frozen"]]
            now = top_units(ratios, frozen, size)
            found.setdefault(epoch, []).append(overlap(previous, now))
            previous = now
    return found


def top_units(ratios: dict[str, float], frozen: list[str], size: int) -> list[str]:
    free = sorted((unit for unit in ratios if unit not in frozen), key=lambda unit: -ratios[unit])
    return [*frozen, *free[: size - len(frozen)]]


def overlap_by_epoch(group: Group) -> Series:
    """The mean over tasks and seeds for each epoch at which the ratios were computed again."""
    overlaps = [pair for run in group.runs for pair in epoch_overlaps(run).items()]
    found = means([(epoch, value) for epoch, values in overlaps for value in values])
    return {epoch: (mean, 0.0) for epoch, (mean, _) in found.items()}


def epoch_overlap(groups: Sequence[Group], colours: Colours) -> Canvas:
    canvas = over_tasks([(group, overlap_by_epoch(group)) for group in groups], 1.0, colours, "epoch of a task")
    canvas.axes[0].set_ylim(0.0, 1.02)
    return canvas
