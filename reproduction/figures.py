"""The paper's figures from records: correlation ratios with labels and without, how much the selection changes between
epochs, and which units are updated in each task."""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from ptlf.report.drawing import Colours, look, save_picture, style, themed
from ptlf.report.figures import ratio_low
from ptlf.report.runs import Group, RunRecord
from ptlf.run.results import Json
from reproduction.figures_text import overlap
from reproduction.tables import FIGURES

WIDTH = 7.0  # inches on paper
SHOWN = 5  # tasks, of a stream with more


def write_paper_figures(found: Mapping[tuple[str, tuple[str, ...]], Sequence[Json]], out: Path) -> int:
    """Each figure whose runs are `found` as SVG and PNG. How many files. At the full protocol, where the other runs are
    missing, PTLF's alone show the ratios, and the units at its final ratio."""
    groups = {}
    for place, cell in enumerate(FIGURES.cells, start=1):
        if runs := found.get(cell.key):
            groups[cell.row] = Group([RunRecord(Path(), results) for results in runs], cell.row, place)
    makers: dict[
        str, tuple[list[list[str]], Callable[[Sequence[Group], Colours], Canvas]]
    ] = {  # the first rows that are there
        "paper-correlation": ([["self-supervised", "supervised"], ["self-supervised"]], correlation),
        "paper-overlap": ([["per-epoch"]], epoch_overlap),
        "paper-units": ([["ratio 0.3", "ratio 0.5"], ["self-supervised"]], updated_units),
    }
    written, colours = 0, themed(False, 20)
    for name, (choices, draw) in makers.items():
        if rows := next((rows for rows in choices if groups.keys() >= set(rows)), None):
            out.mkdir(parents=True, exist_ok=True)
            with style(colours):
                canvas = draw([groups[row] for row in rows], colours)
                save_picture(canvas, out, name)
            written += 2
    return written


def what(groups: Iterable[Group]) -> str:
    """What the runs were, for the line below a picture."""
    config = next(iter(groups)).config
    encoder, stream, training = config["encoder"], config["stream"], config["training"]
    width = f", {encoder['width']} channels" if encoder.get("width") else ""
    images = f", {stream['per_class']} images per class" if stream.get("per_class") else ""
    objectives = " and ".join(dict.fromkeys(group.config["objective"]["name"] for group in groups))
    return f"{stream['name']}{images}, {objectives}, {encoder['name']}{width}, {training['epochs']} epochs per task"


def later_entries(group: Group) -> dict[int, list[Json]]:
    """What every seed wrote down on freezing, by task, of the first tasks."""
    found: dict[int, list[Json]] = {}
    for entry in (entry for run in group.runs for entry in run.results["freezing"]):
        if entry["task"] <= SHOWN:
            found.setdefault(entry["task"], []).append(entry)
    return dict(sorted(found.items()))


def paper(groups: Sequence[Group], height: float, colours: Colours, width: float = WIDTH) -> Canvas:
    """An empty picture, `height` inches high, with what the runs were below it."""
    canvas = Canvas(figsize=(width, height), layout="constrained", facecolor=colours["page"])
    canvas.supxlabel(textwrap.fill(what(groups), int(15 * width)), x=0.01, ha="left", size=8, color=colours["soft"])
    return canvas


def correlation(groups: Sequence[Group], colours: Colours) -> Canvas:
    """A panel per pair of consecutive tasks; across, the units from the input on; up, the ratio, mean over seeds, which
    small dots show one by one."""
    tasks = sorted(set.intersection(*(set(later_entries(group)) for group in groups)))
    canvas, count = paper(groups, 2.8, colours), len(groups[0].first["units"])
    panels = canvas.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for group in groups:
            ratio_line(axes, group, task, colours)
        axes.set_title(f"task {task - 1} to {task}", loc="center")
        axes.set(xlabel="unit", xticks=[1, count], ylim=(ratio_low(groups), 1.003))
    panels[0].set_ylabel("ratio")
    handles = [Line2D([], [], label=group.label, **look(group, colours)) for group in groups]
    canvas.legend(handles=handles, loc="outside upper left", ncols=len(groups), borderaxespad=0.4)
    return canvas


def ratio_line(axes: Axes, group: Group, task: int, colours: Colours) -> None:
    style, means = look(group, colours), {}
    for number, unit in enumerate(group.first["units"], start=1):
        if values := [entry["ratios"][unit] for entry in later_entries(group)[task] if unit in entry["ratios"]]:
            means[number] = statistics.fmean(values)
            if len(values) > 1:
                axes.plot([number] * len(values), values, ".", color=style["color"], markersize=2.5)
    axes.plot([*means], [*means.values()], **style | {"markersize": 3})


def task_overlaps(group: Group) -> dict[int, tuple[float, float]]:
    """By task: how much of a selection that of the next epoch also holds, mean over the epochs at which ratios were
    computed, and over seeds; and what it would be by chance. Every selection is filled up to the task's last size with
    the units of highest ratio. Those frozen by then are in both; chance draws the others among the rest."""
    found: dict[int, tuple[float, float]] = {}
    count = len(group.first["units"])
    for task, seeds in later_entries(group).items():
        values, chances = [], []
        for entry in seeds:
            size, previous = len(entry["order"]), top_units(entry["ratios"], [], len(entry["order"]))
            for epoch, ratios in sorted((int(e), r) for e, r in entry.get("ratios_by_epoch", {}).items()):
                frozen = [unit for event in entry["events"] if event["epoch"] < epoch for unit in event["frozen"]]
                now = top_units(ratios, frozen, size)
                values.append(overlap(previous, now))
                free = size - len(frozen)
                chances.append((len(frozen) + free * free / (count - len(frozen))) / size)
                previous = now
        if values:
            found[task] = statistics.fmean(values), statistics.fmean(chances)
    return found


def top_units(ratios: Mapping[str, float], frozen: Sequence[str], size: int) -> list[str]:
    free = sorted((unit for unit in ratios if unit not in frozen), key=lambda unit: -ratios[unit])
    return [*frozen, *free[: size - len(frozen)]]


def epoch_overlap(groups: Sequence[Group], colours: Colours) -> Canvas:
    """A bar per task, with a line where chance would be; the line at 0.8 is what the paper says all of them exceed."""
    (group,) = groups
    overlaps = task_overlaps(group)
    canvas = paper(groups, 2.9, colours, WIDTH / 2)
    axes = canvas.subplots()
    values, chances = zip(*overlaps.values(), strict=True)
    bars = axes.bar(range(len(overlaps)), values, width=0.56, color=colours[f"run{group.colour}"])
    axes.bar_label(
        bars, [f"{value:.2f}" for value in values], label_type="center", color=colours["page"], weight="bold"
    )
    axes.hlines(
        chances, [x - 0.28 for x in range(len(chances))], [x + 0.28 for x in range(len(chances))], colours["page"]
    )
    axes.axhline(0.8, color=colours["bad"], linestyle="--", linewidth=1)
    axes.set(ylim=(0.0, 1.0), xticks=range(len(overlaps)), xticklabels=[f"task {task}" for task in overlaps])
    words = "share of the selected units that the next selection keeps;"
    lines = "white lines: what chance would keep; dashed: the paper's 0.8"
    axes.set_title(f"{words}\n{lines}", size=7, weight="normal", color=colours["soft"])
    return canvas


def updated_units(groups: Sequence[Group], colours: Colours) -> Canvas:
    """A panel per final ratio: units down, tasks across; filled: updated to the task's end, hollow: frozen by then. Of
    several seeds the first."""
    units = groups[0].first["units"]
    canvas = paper(groups, 0.9 + 0.16 * len(units), colours)
    panels = canvas.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        orders = {e["task"]: e["order"] for e in group.first["freezing"] if e["task"] <= SHOWN}
        tasks = range(1, 1 + max([1, *orders]))
        places = [(task, row, unit in orders.get(task, ())) for task in tasks for row, unit in enumerate(units)]
        for frozen, fill in ((True, "none"), (False, colours["frozen"])):
            found = [(task, row) for task, row, one in places if one == frozen]
            axes.plot(
                *zip(*found, strict=True) if found else ((), ()), "o", color=colours["frozen"], markerfacecolor=fill
            )
        axes.set_title(f"final ratio {group.config['freezing']['final']:g}", loc="center")
        axes.set(xticks=tasks, xticklabels=[f"task {task}" for task in tasks], xlim=(0.5, len(tasks) + 0.5))
        axes.set(yticks=range(len(units)), yticklabels=units, ylim=(len(units) - 0.5, -0.5))
        axes.grid(False)
    return canvas
