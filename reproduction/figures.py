"""The paper's figures from records: correlation ratios with labels and without, how much the selection changes between
epochs, and which units are updated in each task."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ptlf.core.files import write_whole
from ptlf.report.drawing import Drawing, to_png, to_svg
from ptlf.report.figures.axes import SMALL, TINY, Scale, grid_y, legend
from ptlf.report.figures.freezing import overlap, ratio_low, top_units, unit_names, unit_room
from ptlf.report.runs import Group, RunRecord
from ptlf.report.theme import colours
from ptlf.run.results import Json
from reproduction.tables import FIGURES

WIDTH = 704.0  # 7 inches on paper
SHOWN = 5  # tasks, of a stream with more


def write_paper_figures(found: Mapping[tuple[str, tuple[str, ...]], Sequence[Json]], out: Path) -> int:
    """Each figure whose runs are `found` as SVG and PNG. How many files. At the full protocol, where the other runs are
    missing, PTLF's alone show the ratios, and the units at its final ratio."""
    groups = {}
    for place, cell in enumerate(FIGURES.cells, start=1):
        if runs := found.get(cell.key):
            groups[cell.row] = Group([RunRecord(Path(), results) for results in runs], cell.row, place)
    makers: dict[str, tuple[list[list[str]], Callable[[Sequence[Group]], Drawing]]] = {  # the first rows that are there
        "paper-correlation": ([["self-supervised", "supervised"], ["self-supervised"]], correlation),
        "paper-overlap": ([["per-epoch"]], epoch_overlap),
        "paper-units": ([["ratio 0.3", "ratio 0.5"], ["self-supervised"]], updated_units),
    }
    drawn = 0
    for name, (choices, draw) in makers.items():
        if rows := next((rows for rows in choices if groups.keys() >= set(rows)), None):
            drawing, theme = draw([groups[row] for row in rows]), colours(False, 20)
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / f"{name}.svg", to_svg(drawing, theme))
            write_whole(out / f"{name}.png", to_png(drawing, theme))
            drawn += 2
    return drawn


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


def correlation(groups: Sequence[Group]) -> Drawing:
    """A panel per pair of consecutive tasks; across, the units from the input on; up, the ratio, mean over seeds, which
    small dots show one by one."""
    tasks = sorted(set.intersection(*(set(later_entries(group)) for group in groups)))
    drawing = Drawing(WIDTH, 0, f"Task-correlation ratio of every unit, {' and '.join(g.label for g in groups)}")
    top, left, gap, height = legend(drawing, 0, 10, WIDTH, groups) + 22, 34.0, 14.0, 170.0
    panel = (WIDTH - left - gap * (len(tasks) - 1)) / len(tasks)
    low = ratio_low(groups)
    y = Scale(low, 1.0, top + height, top)
    for place, task in enumerate(tasks):
        start = left + place * (panel + gap)
        grid_y(drawing, y, start if place else left, start + panel)
        if place:  # the axis is named once
            drawing.shapes = [s for s in drawing.shapes if s.kind != "text" or s.anchor != "end" or s.at[0][0] < left]
        drawing.text(start + panel / 2, top - 8, f"task {task - 1} to {task}", "ink", size=SMALL, anchor="middle")
        for group in groups:
            ratio_line(drawing, group, task, y, start, panel)
        count = len(groups[0].first["units"])
        for unit in (1, count):
            x = unit_place(unit - 1, count, start, panel)
            drawing.text(x, top + height + 15, str(unit), "soft", size=TINY, anchor="middle")
        drawing.text(start + panel / 2, top + height + 15, "unit", "soft", size=TINY, anchor="middle")
    drawing.text(0, top - 8, "ratio", "soft", size=TINY)
    return finished(drawing, top + height + 32, groups)


def unit_place(number: int, count: int, start: float, panel: float) -> float:
    return start + 8 + number * (panel - 16) / max(count - 1, 1)


def ratio_line(drawing: Drawing, group: Group, task: int, y: Scale, start: float, panel: float) -> None:
    units, role, points = group.first["units"], f"run{group.colour}", []
    for number, unit in enumerate(units):
        if values := [entry["ratios"][unit] for entry in later_entries(group)[task] if unit in entry["ratios"]]:
            across = unit_place(number, len(units), start, panel)
            points.append((across, y(statistics.fmean(values))))
            for value in values if len(values) > 1 else ():
                drawing.mark(across, y(value), "page", stroke=role, width=0.7, size=1.5)
    drawing.line(points, role, width=1.6, dash=group.dash)
    for point in points:
        drawing.mark(*point, role, size=2.6, look=group.marker)


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


def epoch_overlap(groups: Sequence[Group]) -> Drawing:
    """A bar per task, with a line where chance would be; the line at 0.8 is what the paper says all of them exceed."""
    (group,) = groups
    overlaps = task_overlaps(group)
    wide = WIDTH / 2
    drawing = Drawing(wide, 0, "Overlap of the selected units between epochs, by task")
    left, top, height = 34.0, 44.0, 170.0
    y = Scale(0.0, 1.0, top + height, top)
    drawing.text(0, 12, "share of the selected units that the next selection keeps;", "soft", size=TINY)
    drawing.text(0, 26, "white lines: what chance would keep; dashed: the paper's 0.8", "soft", size=TINY)
    grid_y(drawing, y, left, wide)
    room = (wide - left) / max(len(overlaps), 1)
    for place, (task, (value, chance)) in enumerate(overlaps.items()):
        middle = left + room * (place + 0.5)
        drawing.rect(middle - room * 0.28, y(value), room * 0.56, top + height - y(value), f"run{group.colour}")
        drawing.text(middle, y(0.0) - 8, f"{value:.2f}", "page", size=SMALL, anchor="middle", bold=True)
        drawing.line([(middle - room * 0.28, y(chance)), (middle + room * 0.28, y(chance))], "page", width=1.6)
        drawing.text(middle, top + height + 16, f"task {task}", "soft", size=SMALL, anchor="middle")
    drawing.line([(left, y(0.8)), (wide, y(0.8))], "bad", dash="4 3")
    return finished(drawing, top + height + 32, groups)


def updated_units(groups: Sequence[Group]) -> Drawing:
    """A panel per final ratio: units down, tasks across; filled: updated to the task's end, hollow: frozen by then. Of
    several seeds the first."""
    units = groups[0].first["units"]
    left, gap, top, row = unit_room(units, WIDTH), 24.0, 44.0, 16.0
    panel = (WIDTH - left - gap * (len(groups) - 1)) / len(groups)
    bottom = top + row * len(units)
    drawing = Drawing(WIDTH, 0, "Units that are updated in each task, by final freeze ratio")
    unit_names(drawing, units, left, top, row)
    for place, group in enumerate(groups):
        start, entries = (
            left + place * (panel + gap),
            {e["task"]: e for e in group.first["freezing"] if e["task"] <= SHOWN},
        )
        title = f"final ratio {group.config['freezing']['final']:g}"
        drawing.text(start + panel / 2, 14, title, "ink", size=SMALL, anchor="middle", bold=True)
        tasks = range(1, 1 + max([1, *entries]))
        for column, task in enumerate(tasks):
            x = start + panel * (column + 0.5) / len(tasks)
            drawing.text(x, top - 10, f"task {task}", "soft", size=TINY, anchor="middle")
            frozen = entries.get(task, {"order": []})["order"]
            for number, unit in enumerate(units):
                fill = "page" if unit in frozen else "frozen"
                drawing.mark(x, top + row * (number + 0.5), fill, stroke="frozen", width=1.2, size=4.2)
    return finished(drawing, bottom + 22, groups)


def finished(drawing: Drawing, bottom: float, groups: Sequence[Group]) -> Drawing:
    words, room = what(groups), drawing.width / (TINY * 0.5)
    lines = [words] if len(words) < room else [part.strip(", ") for part in halves(words)]
    for number, line in enumerate(lines):
        drawing.text(0, bottom + 14 * number, line, "soft", size=TINY)
    drawing.height = bottom + 14 * (len(lines) - 1) + 6
    return drawing


def halves(words: str) -> tuple[str, str]:
    """Cut at the comma nearest to the middle."""
    commas = [place for place, letter in enumerate(words) if letter == ","]
    middle = min(commas, key=lambda place: abs(place - len(words) / 2), default=len(words))
    return words[:middle], words[middle:]
