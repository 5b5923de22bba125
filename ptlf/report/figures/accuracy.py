"""How good and how lasting: a measure of all runs at a glance, and accuracy matrices."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Canvas

from ptlf.core.words import clipped
from ptlf.report import paired
from ptlf.report.drawing import HALF, STEPS, THIRD, Colours, end_of, frame, look
from ptlf.report.figures.lines import known_by_task
from ptlf.report.measures import Measure
from ptlf.report.runs import Comparison, Group, means
from ptlf.run.results import Json

Cells = Mapping[tuple[int, int], float]  # by row and column
MAX_LABEL = 21  # characters of a run's name beside its dot


def answer(comparison: Comparison, measure: Measure, colours: Colours) -> Canvas:
    """A row per run, its value or ratio beside it; the baseline's value is a line through all of them."""
    base, groups = comparison.baseline, [group for group in comparison.groups if group.values(measure.path)]
    left = 8.0 + 6.0 * min(max(len(group.label) for group in groups), MAX_LABEL)
    canvas, axes = frame(colours, 18.0 * len(groups) + 8, width=THIRD, left=left, bottom=4.0, title=" ")
    axes.set_title(f"{measure.short}, {measure.below}".rstrip(", "), x=-left / (THIRD - left - 8))
    start = 0.0 if measure.cost else base.mean(measure.path) if base else None
    for row, group in enumerate(groups):
        mean, spread = group.mean(measure.path) or 0.0, group.spread(measure.path) or 0.0
        upper = min(spread, 100.0 - mean) if measure.unit == "%" else spread
        style = look(group, colours) | {"linestyle": "-"}
        axes.plot([mean if start is None else start, mean], [row, row], color=style["color"], linewidth=3, alpha=0.4)
        axes.errorbar(mean, row, xerr=[[spread], [upper]] if spread else None, **style)
        words = paired.times(group, base, measure) or measure.show(mean)
        axes.annotate(words, (1, row), xycoords=("axes fraction", "data"), ha="right", va="center")
    if base and base.values(measure.path):
        axes.axvline(base.mean(measure.path) or 0.0, color=colours["run0"], linestyle=":", linewidth=1)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks(range(len(groups)), [end_of(group.label, MAX_LABEL) for group in groups], weight="bold")
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        label.set_color(colours[f"run{group.colour}"])
    low, high = axes.get_xlim()
    low = 0.0 if measure.cost else low
    axes.set_xlim(low, low + (high - low) * 1.35)  # room for the values
    axes.set_xticks([])
    axes.grid(False)
    return canvas


def matrix_cells(group: Group, probe: str) -> Cells:
    """Mean over seeds by row and column. Row 0 is of the encoder before training, row n of the one after task n."""
    found = [run.results["probes"].get(probe, {}) for run in group.runs]
    matrices = [[one.get("untrained") or [], *one.get("matrix", [])] for one in found]
    cells = [((i, j), v) for matrix in matrices for i, row in enumerate(matrix) for j, v in enumerate(row)]
    return {place: mean for place, (mean, _) in means(cells).items()}


def matrix_bounds(groups: Sequence[Group], probe: str) -> tuple[float, float]:
    """One colour scale for all runs of a probe."""
    cells = [value for group in groups for value in matrix_cells(group, probe).values()]
    return (min(cells), max(cells)) if cells else (0.0, 100.0)


def matrix(probe: str, bounds: tuple[float, float], group: Group, colours: Colours) -> Canvas:
    """Rows: after each task, the encoder before training on top; columns: the eval_splits, and what it knew before."""
    found, columns = dict(matrix_cells(group, probe)), [str(task) for task in tasks_of_splits(group.first)]
    rows = sorted({row for row, _ in found})
    if known := known_by_task(group, probe):
        found |= {(row, len(columns)): mean for row, (mean, _) in known.items() if row in rows}
        columns.append("before")
    days = group.first["tasks"] if group.first.get("arrived") else []  # folders, each with a name
    names = {row: "all tasks" if group.joint else f"task {row}" for row in rows} | {0: group.first_row}
    names |= {row: clipped(f"{names[row]}, {days[row - 1]}", 20) for row in rows if 0 < row <= len(days)}
    left = 10.0 + 5.0 * max(len(names[row]) for row in rows)
    wide = min((HALF - left - 8) / len(columns), 60.0)
    tall = min(max(wide * 0.6, 12.0), 22.0)
    canvas, axes = frame(colours, tall * len(rows), width=left + 8 + wide * len(columns), left=left)
    low, high = bounds
    fine = wide >= 26 and high - low < 100  # room for a decimal
    steps = np.ma.masked_all((len(rows), len(columns)))
    for (place, column), value in found.items():
        row = rows.index(place)
        steps[row, column] = step = round(min(max((value - low) / ((high - low) or 1), 0.0), 1.0) * (STEPS - 1))
        if wide >= 14:
            words, size = f"{value:.{1 * fine}f}", min(9.0, wide * (0.34 if fine else 0.45))
            style: Json = {"color": colours[f"on{step}"], "ha": "center", "va": "center_baseline"}
            axes.text(column + 0.5, row + 0.5, words, size=size, **style)
    scale = ListedColormap([colours[f"heat{step}"] for step in range(STEPS)])
    mesh = axes.pcolormesh(steps, cmap=scale, vmin=-0.5, vmax=STEPS - 0.5)
    mesh.set(edgecolor=colours["page"], linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks([row + 0.5 for row in range(len(rows))], [names[row] for row in rows])
    every = 1 if wide >= 15 else 2
    axes.set_xticks([column + 0.5 for column in range(0, len(columns), every)], columns[::every])
    axes.set_xlabel("task, tested on its classes")
    axes.grid(False)
    return canvas


def tasks_of_splits(results: Json) -> list[int]:
    """The number of the task whose classes each split has. Where splits are of no task they are counted."""
    tasks, found = results["tasks"], [0]
    for name in results["eval_splits"]:
        if name not in tasks[found[-1] :]:
            return [*range(1, len(results["eval_splits"]) + 1)]
        found.append(tasks.index(name, found[-1]) + 1)
    return found[1:]
