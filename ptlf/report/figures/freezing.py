"""What froze when: correlation ratios by unit, and the freezing map."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from ptlf.report.drawing import STEPS, Colours, end_of, frame
from ptlf.report.runs import Comparison, Group
from ptlf.run.results import Json


def having(comparison: Comparison, what: str) -> list[Group]:
    """Runs that recorded some `ratios`, or `events` of freezing."""
    return [group for group in comparison.groups if any(entry[what] for entry in group.first["freezing"])]


def entries(group: Group, task: int | None = None) -> list[Json]:
    """What each seed recorded of the task, or of all of them."""
    found = [entry for run in group.runs for entry in run.results["freezing"]]
    return [entry for entry in found if task in (None, entry["task"])]


def ratio_low(groups: Sequence[Group]) -> float:
    """The left end of the ratio axis, the same for all runs, so that they can be laid side by side."""
    values = [ratio for group in groups for entry in entries(group) for ratio in entry["ratios"].values()]
    return math.floor(min(values) * 20) / 20 if values else 0.0


def unit_frame(units: Sequence[str], colours: Colours, **more: Any) -> tuple[Canvas, Axes]:
    """A row per unit, the first on top."""
    names = [end_of(unit, 24) for unit in units]
    left = 10.0 + 4.9 * max(map(len, names), default=0)
    canvas, axes = frame(colours, max(len(units), 1) * (13.0 if len(units) <= 12 else 10.5), left=left, **more)
    axes.set_yticks(range(len(units)), names, size=8.0)
    axes.set_ylim(len(units) - 0.5, -0.5)
    return canvas, axes


def ratio_lines(low: float, group: Group, colours: Colours) -> Canvas:
    """Units down, ratio across, a line per task; a filled dot is a unit that froze in that task."""
    units = group.first["units"]
    tasks = sorted({entry["task"] for entry in entries(group) if entry["ratios"]})
    keys = [(f"{'task ' * (task == tasks[0])}{task}", {"color": colours[f"task{task - 1}"]}) for task in tasks]
    canvas, axes = unit_frame(units, colours, keys=keys)
    for task in tasks:
        colour, seeds = colours[f"task{task - 1}"], entries(group, task)
        known = {row: [e["ratios"][u] for e in seeds if u in e["ratios"]] for row, u in enumerate(units)}
        points = {row: statistics.fmean(values) for row, values in known.items() if values}
        frozen = {row for row in points if any(units[row] in entry["order"] for entry in seeds)}
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
    trained = {line["task"]: line["epoch"] for line in group.runs[0].epochs}  # of each task, the last epoch
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
