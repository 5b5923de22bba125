"""The report's pictures: measures at a glance, over tasks and epochs, accuracy matrices, freezing, and the gallery."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from ptlf.core.errors import clipped
from ptlf.report.drawing import HALF, STEPS, THIRD, Colours, end_of, frame, look, run_keys
from ptlf.report.intervals import interval
from ptlf.report.measures import Measure
from ptlf.report.runs import Comparison, Group, known_probes, means, tile_pixels
from ptlf.run.results import Json

Series = dict[int, tuple[float, float]]  # by task or epoch: mean over seeds, standard deviation
Cells = Mapping[tuple[int, int], float]  # by row and column
Value = Callable[[Json], float | None]  # of an epoch
MAX_LABEL = 21  # characters of a run's name beside its dot
MOMENTS = ("before", "after")
MAX_PIXELS = 48  # of a tile's side


def answer(comparison: Comparison, measure: Measure, colours: Colours) -> Canvas:
    """A row per run, its value or ratio beside it; the baseline's value is a line through all of them."""
    base, groups = comparison.baseline, [group for group in comparison.groups if group.values(measure.path)]
    left = 8.0 + 6.0 * min(max(len(group.label) for group in groups), MAX_LABEL)
    canvas, axes = frame(colours, 18.0 * len(groups) + 8, width=THIRD, left=left, bottom=4.0, title=" ")
    axes.set_title(f"{measure.short}, {measure.below}".rstrip(", "), x=-left / (THIRD - left - 8))
    start = 0.0 if measure.cost else base.mean(measure.path) if base else None
    for row, group in enumerate(groups):
        mean, spread = group.mean(measure.path) or 0.0, group.deviation(measure.path)
        upper = min(spread, 100.0 - mean) if measure.unit == "%" else spread
        style = look(group, colours) | {"linestyle": "-"}
        axes.plot([mean if start is None else start, mean], [row, row], color=style["color"], linewidth=3, alpha=0.4)
        axes.errorbar(mean, row, xerr=[[spread], [upper]] if spread else None, **style)
        words = measure.times(group, base) or measure.show(mean)
        axes.annotate(words, (1, row), xycoords=("axes fraction", "data"), ha="right", va="center")
    if base and base.values(measure.path):
        axes.axvline(base.mean(measure.path) or 0.0, color=colours["run0"], linestyle=":", linewidth=1)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks(range(len(groups)), [end_of(group.label, MAX_LABEL) for group in groups], weight="bold")
    for label, group in zip(axes.get_yticklabels(), groups, strict=True):
        label.set_color(colours[f"run{group.colour}"])
    low, high = axes.get_xlim()
    low = 0.0 if measure.cost else low
    axes.set(xlim=(low, low + (high - low) * 1.35), xticks=[])  # room for the values
    axes.grid(False)
    return canvas


def by_task(group: Group, probe: str, what: str) -> Series:
    """`accuracy` or `forgetting` after each task. All tasks at once stand beside the others' end."""
    found = [run.results["probes"].get(probe, {}).get(f"{what}_by_task") or [] for run in group.runs]
    series = means([pair for values in found for pair in enumerate(values, start=1)])
    return {len(group.first["eval_splits"]): series[1]} if group.joint and series else series


def known_by_task(group: Group, probe: str) -> Series:
    """Accuracy on what the encoder knew before: 0 is before the first task, n after task n."""
    found = [known_probes(run.results).get(probe) for run in group.runs]
    return means([pair for one in found if one for pair in enumerate([one["before"], *one["after"]])])


def over_tasks(lines: Sequence[tuple[Group, Series]], highest: float | None, colours: Colours) -> Canvas:
    """A line per run, with a band of one standard deviation where there are seeds. highest: of the values, if any."""
    canvas, axes = frame(colours, 150.0, keys=run_keys([group for group, _ in lines], colours))
    for group, series in lines:
        style, values = look(group, colours), [*series.values()]
        axes.plot([*series], [mean for mean, _ in values], **style)
        if any(spread for _, spread in values):
            upper = [min(mean + spread, highest or mean + spread) for mean, spread in values]
            lower = [mean - spread for mean, spread in values]
            axes.fill_between([*series], lower, upper, color=style["color"], alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    axes.set_xlabel("after task")
    return canvas


def over_epochs(comparison: Comparison, title: str, value: Value, zero: bool, colours: Colours) -> Canvas | None:
    """The value of every epoch of the stream, with a triangle where units froze. zero: the axis begins there."""
    epochs = comparison.epochs[-1]
    found = [(group, mean_line(group, value, epochs)) for group in with_epochs(comparison)]
    lines = [(group, series) for group, series in found if series]
    if not lines:
        return None
    canvas, axes = frame(colours, 100.0, title=title, keys=run_keys([group for group, _ in lines], colours))
    tasks = max(len(group.first["tasks"]) for group, _ in lines)
    shaded = [(start * epochs + 0.5, epochs) for start in range(0, tasks, 2)]
    axes.broken_barh(shaded, (0, 1), transform=axes.get_xaxis_transform(), color=colours["empty"], alpha=0.45)
    for group, series in lines:
        style, froze = look(group, colours), freeze_events(group, epochs)
        if len(series) > 1:  # a line of one epoch is not seen without its marker
            style |= {"marker": "v", "markevery": [n for n, place in enumerate(series) if place in froze]}
        axes.plot([*series], [*series.values()], **style)
    axes.set(xlim=(0.5, tasks * epochs + 0.5), xlabel="task")
    axes.set_xticks([(task + 0.5) * epochs + 0.5 for task in range(tasks)], [str(task + 1) for task in range(tasks)])
    if zero:
        axes.set_ylim(0.0, axes.dataLim.y1 * 1.08 or 1.0)
    return canvas


def scaled(key: str, scale: float, line: Json) -> float | None:
    return None if line.get(key) is None else line[key] / scale


def with_epochs(comparison: Comparison) -> list[Group]:
    """Runs on all tasks at once are left out beside others: an epoch of theirs is the whole stream."""
    known = [group for group in comparison.groups if group.runs[0].epochs]
    return [group for group in known if not group.joint] or known


def mean_line(group: Group, value: Value, epochs: int) -> dict[int, float]:
    """By epoch of the stream, the mean over seeds of finite values. A task is drawn with `epochs`, or fewer."""
    found = [((line["task"] - 1) * epochs + line["epoch"], value(line)) for run in group.runs for line in run.epochs]
    return {place: mean for place, (mean, _) in means([p for p in found if not isinstance(p[1], str)]).items()}


def freeze_events(group: Group, epochs: int) -> list[int]:
    """The epochs of the stream in which units froze."""
    entries = group.first["freezing"]
    return [(entry["task"] - 1) * epochs + event["epoch"] for entry in entries for event in entry["events"]]


def matrix_cells(group: Group, probe: str) -> Cells:
    """Mean over seeds by row and column. Row 0 is of the encoder before training, row n of the one after task n."""
    found = [run.results["probes"].get(probe, {}) for run in group.runs]
    matrices = [[one.get("untrained") or [], *one.get("matrix", [])] for one in found]
    cells = [((i, j), v) for matrix in matrices for i, row in enumerate(matrix) for j, v in enumerate(row)]
    return {place: mean for place, (mean, _) in means(cells).items()}


def matrix(probe: str, bounds: tuple[float, float], group: Group, colours: Colours) -> Canvas:
    """Rows: after each task, the encoder before training on top; columns: the eval_splits, and what it knew before."""
    found, columns = dict(matrix_cells(group, probe)), [str(task) for task in tasks_of_splits(group.first)]
    rows = sorted({row for row, _ in found})
    if known := known_by_task(group, probe):
        found |= {(row, len(columns)): mean for row, (mean, _) in known.items() if row in rows}
        columns.append("before")
    days = group.first["tasks"] if group.first.get("arrived") else []  # folders, each with a name
    names = {row: "all tasks" if group.joint else f"task {row}" for row in rows} | {0: "beginning"}
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


def having(comparison: Comparison, what: str) -> list[Group]:
    """Runs that recorded some `ratios`, or `events` of freezing."""
    return [group for group in comparison.groups if any(entry[what] for entry in group.first["freezing"])]


def ratio_low(groups: Sequence[Group]) -> float:
    """The left end of the ratio axis, the same for all runs, so that they can be laid side by side."""
    values = [ratio for group in groups for entry in group.freezing for ratio in entry["ratios"].values()]
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
    units, entries = group.first["units"], group.freezing
    tasks = sorted({entry["task"] for entry in entries if entry["ratios"]})
    canvas, axes = unit_frame(units, colours, keys=task_keys(tasks, colours))
    for task in tasks:
        colour, seeds = colours[f"task{task - 1}"], [entry for entry in entries if entry["task"] == task]
        ratios = means([(units.index(u), r) for e in seeds for u, r in e["ratios"].items() if u in units])
        points = {row: mean for row, (mean, _) in ratios.items()}
        frozen = {row for row in points if any(units[row] in entry["order"] for entry in seeds)}
        axes.plot([*points.values()], [*points], color=colour, linewidth=1.2)
        for fill, rows in ((colour, frozen), (colours["page"], {*points} - frozen if len(tasks) <= 8 else set())):
            axes.plot([points[row] for row in rows], [*rows], "o", color=colour, markerfacecolor=fill)
    axes.set_xlim(low - 0.02 * (1 - low), 1 + 0.02 * (1 - low))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    return canvas


def task_keys(tasks: Sequence[int], colours: Colours, **style: Any) -> list[tuple[str, dict[str, Any]]]:
    keys = [(str(task), style | {"color": colours[f"task{task - 1}"]}) for task in tasks]
    return [(f"task {name}" if number == 0 else name, style) for number, (name, style) in enumerate(keys)]


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
    axes.set(xlim=(0, count * epochs), xlabel=f"task of {epochs} epoch{'s' * (epochs != 1)}")
    axes.set_xticks([(task + 0.5) * epochs for task in range(count)], [str(task + 1) for task in range(count)])
    axes.grid(False)
    return canvas


def frozen_bars(group: Group, task: int, unit: str, epochs: int, trained: int) -> list[tuple[int, int, str]]:
    """(first epoch of the stream, epochs, role of the colour) for each number of seeds in which the unit is frozen."""
    events = [event for entry in group.freezing if entry["task"] == task for event in entry["events"]]
    starts = sorted(event["epoch"] for event in events if unit in event["frozen"])
    bars = []
    for count, (start, until) in enumerate(itertools.pairwise([*starts, trained + 1]), start=1):
        role = f"heat{round(STEPS * (0.2 + 0.6 * count / len(group.runs)))}" if count < len(group.runs) else "frozen"
        bars += [((task - 1) * epochs + start - 1, until - start, role)] * (until > start)
    return bars


def nearest_images(group: Group, colours: Colours) -> Canvas:
    """A row per query: itself, its nearest before, its nearest after. Another class (another task, for images without
    labels) is faded and underlined. The title counts the same ones, with 95 % intervals over the queries."""
    gallery = group.gallery or {}
    labels = [label for _, label in gallery["tiles"]]
    pixels = tile_pixels(gallery["sprite"], len(labels), MAX_PIXELS)
    queries, looks = gallery["queries"], [gallery["looks"][moment]["neighbours"] for moment in MOMENTS]
    count, total = len(looks[1][0]), len(queries) * len(looks[1][0])
    before, after = (
        [sum(labels[query] == labels[other] for other in row) for query, row in zip(queries, near, strict=True)]
        for near in looks
    )
    said = [
        f"{sum(same)} ± {min(len(same) * (found.half or 0), total):.0f}"
        for same in (before, after)
        if (found := interval(same))
    ]
    chance = f"{gallery['chance'] * total:.0f} by chance, " if "chance" in gallery else ""
    side, starts = (HALF - 20) / (2 * count + 1.6), (0.0, 1.3, count + 1.6)
    kind = "class" if gallery.get("labelled", True) else "task"
    title = f"Same {kind}, of {total}: {chance}{said[0]} before, {said[1]} trained"
    canvas, axes = frame(colours, side * len(queries) + 14, left=12.0, bottom=4.0, title=title)
    for start, name in zip(starts, ("image", "nearest, before training", "nearest, trained"), strict=True):
        axes.text(start, -0.1, name, color=colours["soft"])
    for row, query in enumerate(queries):
        for start, tiles in zip(starts, ([query], *(near[row] for near in looks)), strict=True):
            for place, tile in enumerate(tiles):
                same, edges = labels[tile] == labels[query], (start + place + 0.03, start + place + 0.97)
                style: Json = {"aspect": "auto", "alpha": None if same else 0.4, "interpolation": "none"}
                axes.imshow(pixels[tile], extent=(*edges, row + 0.94, row + 0.04), **style)
                if not same:
                    axes.plot(edges, [row + 0.97] * 2, color=colours["bad"])
    axes.set(xlim=(0, 2 * count + 1.6), ylim=(len(queries), -14 / side))
    axes.axis("off")
    return canvas


def feature_map(group: Group, colours: Colours) -> Canvas:
    """Two maps of the same images; near means similar. Axes have no meaning of their own."""
    gallery = group.gallery or {}
    keys = task_keys(range(1, len(gallery["groups"]) + 1), colours, linestyle="", marker="o")
    canvas, first = frame(colours, (HALF - 20) / 2, left=4.0, bottom=4.0, keys=keys, title=" ")
    box = first.get_position()
    canvas.delaxes(first)
    for place, (moment, title) in enumerate(zip(MOMENTS, ("before training", "after the stream"), strict=True)):
        axes = canvas.add_axes((box.x0 + place * box.width * 0.51, box.y0, box.width * 0.49, box.height))
        points = np.reshape(gallery["looks"][moment]["points"], (-1, 2))
        for task, (_, style) in enumerate(keys):
            mine = points[np.equal(gallery["point_groups"], task)]
            axes.plot(*mine.T, **style, markersize=2.6, alpha=0.85, markeredgewidth=0)
        axes.set(xticks=[], yticks=[], title=title, facecolor=colours["card"])
        axes.invert_yaxis()
    return canvas
