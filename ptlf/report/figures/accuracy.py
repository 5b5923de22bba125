"""How good and how lasting: the answer at a glance, accuracy matrices, accuracy and forgetting over tasks."""

import math
from collections.abc import Sequence

from ptlf.report import paired
from ptlf.report.drawing import Drawing
from ptlf.report.figures.axes import SMALL, TINY, Scale, Series, legend, line_chart, padded, shortened, words_width
from ptlf.report.intervals import half_width
from ptlf.report.measures import MAIN_COSTS, Measure, probe_measures, reference_measures, steady, title_of
from ptlf.report.runs import Comparison, Group, known_probes, means
from ptlf.report.theme import STEPS, heat_step
from ptlf.run.results import Json

Bounds = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, width, height
ROW, HEAD, NAME = 30.0, 40.0, 13.0  # of the answer: row height, room for titles, size of names


def measured(comparison: Comparison, probes: Sequence[str]) -> list[Measure]:
    """The accuracies of these probes, what was known before, and the main costs, as far as a run has them."""
    known = [probe for probe in comparison.known if probe in probes] or comparison.known[:1]
    measures = [measure for probe in probes for measure in probe_measures(probe)[:2]]
    measures += [measure for probe in known for measure in reference_measures(probe)[1:]]
    measures += steady(MAIN_COSTS, comparison.groups)
    return recorded(comparison, measures)


def recorded(comparison: Comparison, measures: Sequence[Measure]) -> list[Measure]:
    """Those that a run has."""
    return [m for m in measures if any(group.values(m.path) for group in comparison.groups)]


def answer(comparison: Comparison, width: float) -> Drawing:
    """A small panel per measure, a dot per run, the baseline's value as a line through it."""
    measures = measured(comparison, comparison.probes[:1])
    columns = len(measures) if width > 600 else 1
    longest = max(words_width(group.label, NAME * 1.1) for group in comparison.groups) + 18
    above = columns == 1 and longest > 110  # no room for names beside the dots
    names = 0.0 if above else min(longest, max(width - 100.0 * columns, 90.0) if columns > 1 else 240.0)
    panel = (width - names) / columns if columns > 1 else width
    height = HEAD + ROW * len(comparison.groups) + 20
    drawing = Drawing(width, 0, "Accuracy, forgetting and cost of every run")
    start = legend(drawing, 0, 8, width, comparison.groups) + 8 if above else 0.0
    drawing.height = start + height * -(-len(measures) // columns) - 12
    for place, measure in enumerate(measures):
        top = start + place // columns * height
        if names and (place == 0 or columns == 1):
            for number, group in enumerate(comparison.groups):
                words, y = shortened(group.label, names - 16, NAME * 1.1), top + HEAD + ROW * (number + 0.5) + 4.5
                drawing.text(0, y, words, f"run{group.colour}", size=NAME, bold=True)
        left = names + place % columns * panel
        answer_panel(drawing, comparison, measure, left, top, left + panel - 18 if columns > 1 else width)
    return drawing


def answer_panel(
    drawing: Drawing, comparison: Comparison, measure: Measure, left: float, top: float, right: float
) -> None:
    groups = [(group, group.mean(measure.path), group.spread(measure.path) or 0.0) for group in comparison.groups]
    found = [(group, mean, spread) for group, mean, spread in groups if mean is not None]
    base = comparison.baseline.mean(measure.path) if comparison.baseline else None
    ratios = [paired.ratio(group, comparison.baseline, measure) for group, _, _ in found]
    marks = [paired.dagger(group, comparison.baseline, measure) for group, _, _ in found]
    shown = zip(found, ratios, marks, strict=True)
    words = [measure.show(mean) if x is None else f"{x.mean:.2f}×{mark}" for (_, mean, _), x, mark in shown]
    room = max(map(words_width, words)) + 14
    most = 100.0 if measure.unit == "%" else math.inf  # no whisker above it
    reach = [value for _, mean, spread in found for value in (mean - spread, min(mean + spread, most))]
    scale = Scale(*padded(reach, zero=measure.cost, least=0.0 if measure.cost else 2.0), left + 4, right - room)
    head = left if drawing.width > 600 else 0.0
    drawing.text(head, top + 14, measure.short, "ink", size=NAME, bold=True)
    drawing.text(head, top + 30, shortened(measure.below, right - head, TINY), "soft", size=TINY)
    if base is not None:
        ends = [(scale(base), top + HEAD), (scale(base), top + HEAD + ROW * len(comparison.groups))]
        drawing.line(ends, "run0", dash="2 2")
    for (group, mean, spread), beside in zip(found, words, strict=True):
        y, role = top + HEAD + ROW * (comparison.groups.index(group) + 0.5), f"run{group.colour}"
        start = 0.0 if measure.cost else mean if base is None else base
        drawing.line([(scale(start), y), (scale(mean), y)], role, width=4, opacity=0.4)
        if spread:
            drawing.line([(scale(mean - spread), y), (scale(min(mean + spread, most)), y)], role, width=1.2)
        title = f"{group.label}: {measure.show(mean)} {measure.unit}"
        drawing.mark(scale(mean), y, role, size=5.5, look=group.marker, title=title)
        drawing.text(right, y + 4.5, beside, "ink", size=SMALL, anchor="end")


def accuracies(group: Group, probe: str) -> dict[tuple[int, int], float]:
    """Mean over seeds by row and column. Row 0 is of the untrained encoder, row n of the one after task n."""
    found = [run.results["probes"].get(probe, {}) for run in group.runs]
    matrices = [[one.get("untrained") or [], *one.get("matrix", [])] for one in found]
    cells = [((i, j), v) for matrix in matrices for i, row in enumerate(matrix) for j, v in enumerate(row)]
    return {place: mean for place, (mean, _) in means(cells).items()}


def heat_bounds(comparison: Comparison, probe: str) -> Bounds:
    """One colour scale for all runs of a probe."""
    cells = [value for group in comparison.groups for value in accuracies(group, probe).values()]
    return (min(cells), max(cells)) if cells else (0.0, 100.0)


def half_widths(groups: Sequence[Group], probe: str) -> list[float]:
    """Of the intervals of all accuracies in the runs' matrices whose number of test images is known."""
    tests = [(group, group.first.get("test_images") or []) for group in groups]
    cells = [
        (value, known[place[1]]) for group, known in tests if known for place, value in accuracies(group, probe).items()
    ]
    return [half_width(value, count) for value, count in cells if count]


def heat_map(probe: str, bounds: Bounds, group: Group, width: float) -> Drawing:
    """Rows: after each task; columns: eval_splits. The untrained encoder stands apart on top."""
    cells, eval_splits = accuracies(group, probe), group.first["eval_splits"]
    known = known_by_task(group, probe)
    rows = sorted({row for row, _ in cells})
    days = group.first["tasks"] if group.first.get("arrived") and width > 400 else []  # folders, each with a name
    left, top, gap = 130.0 if days else 62.0, 34.0, 6.0 if 0 in rows else 0.0
    cell, tall = cell_size((width - left - (gap if known else 0.0)) / max(len(eval_splits) + bool(known), 1))
    drawing = Drawing(width, top + gap + tall * len(rows) + 2, f"{title_of(probe)} accuracy of {group.label}")
    drawing.text(0, top - 6, "after", "soft", size=TINY)
    drawing.text(left, 10, "tested on the classes of task", "soft", size=TINY)
    heat_key(drawing, width, bounds)
    column_names(drawing, tasks_of_splits(group.first), left, top, cell)
    places = {row: top + number * tall + (gap if row else 0.0) for number, row in enumerate(rows)}
    tests = group.first.get("test_images") or []
    begin = "as given" if group.given else "untrained"
    names = {row: begin if row == 0 else "all tasks" if group.joint else f"task {row}" for row in rows}
    for row, y in places.items():
        words = f"{names[row]}, {days[row - 1]}" if 0 < row <= len(days) else names[row]
        drawing.text(0, y + tall / 2 + 3.5, shortened(words, left - 8, TINY), "ink" if row else "soft", size=TINY)
    for (row, column), value in cells.items():
        title = f"{names[row]}, tested on {eval_splits[column]}" if width > 400 else ""
        if title and len(tests) == len(eval_splits) and tests[column]:
            title += f" ({tests[column]} images, ±{half_width(value, tests[column]):.1f} at 95 %)"
        heat_cell(drawing, (left + column * cell, places[row], cell, tall), value, bounds, title)
    aside = left + len(eval_splits) * cell + gap
    if known:
        drawing.text(aside + cell / 2, top - 6, "before", "soft", size=TINY, anchor="middle")
    for row, (value, _) in known.items():
        if row in places:
            title = f"{names[row]}, tested on what it knew before" if width > 400 else ""
            heat_cell(drawing, (aside, places[row], cell, tall), value, bounds, title)
    return drawing


def tasks_of_splits(results: Json) -> list[int]:
    """The number of the task whose classes each split has. Where splits are of no task they are counted."""
    tasks, found = results["tasks"], [0]
    for name in results["eval_splits"]:
        if name not in tasks[found[-1] :]:
            return [*range(1, len(results["eval_splits"]) + 1)]
        found.append(tasks.index(name, found[-1]) + 1)
    return found[1:]


def known_by_task(group: Group, probe: str) -> Series:
    """Accuracy on what was known before: 0 is before the first task, n after task n."""
    found = [known_probes(run.results).get(probe) for run in group.runs]
    rows = [[one["before"], *one["after"]] for one in found if one]
    return means([pair for row in rows for pair in enumerate(row)])


def known_before(comparison: Comparison, probe: str, width: float) -> Drawing | None:
    """A line per run, from before the first task."""
    lines = [(group, known_by_task(group, probe)) for group in comparison.groups]
    known = [end for _, series in lines for mean, spread in series.values() for end in (mean - spread, mean + spread)]
    if not known:
        return None
    low, high = padded(known, least=2.0)
    places = range(0, comparison.tasks + 1, 1 if comparison.tasks <= 10 or width > 400 else 2)
    label = f"what it knew before, {title_of(probe)}"
    ends = (low, min(high, 100.4))
    return line_chart(label, "after task", lines, comparison.tasks, places, ends, width, first=0)


def cell_size(wide: float) -> tuple[float, float]:
    """Width and height."""
    return wide, min(max(wide * 0.72, 15.0), 30.0)


def column_names(drawing: Drawing, tasks: Sequence[int], left: float, top: float, cell: float) -> None:
    for column, task in enumerate(tasks):
        if cell >= 18 or column % 2 == 0:
            drawing.text(left + cell * (column + 0.5), top - 6, str(task), "soft", size=TINY, anchor="middle")


def heat_key(drawing: Drawing, right: float, bounds: Bounds) -> None:
    """The ramp with its ends in %, in the upper right corner."""
    low, high = (f"{value:.0f}" for value in bounds)
    left = right - words_width(high, TINY) - 4 - 6 * STEPS
    drawing.text(right, 10, high, "soft", size=TINY, anchor="end")
    drawing.text(left - 4, 10, low, "soft", size=TINY, anchor="end")
    for step in range(STEPS):
        drawing.rect(left + 6 * step, 2, 6, 8, f"heat{step}")


def heat_cell(drawing: Drawing, box: Box, value: float, bounds: Bounds, title: str, digits: int = 1) -> None:
    x, y, wide, tall = box
    step = heat_step(value, *bounds)
    words = f"{title}: {value:.2f}" if title else ""
    drawing.rect(x + 0.5, y + 0.5, wide - 1, tall - 1, f"heat{step}", title=words)
    if wide >= 15:
        shown, size = (f"{value:.{digits}f}", wide * 0.3) if wide >= 30 else (f"{value:.0f}", wide * 0.45)
        size = min(12.0 if wide >= 30 else 10.0, size)
        drawing.text(x + wide / 2, y + tall / 2 + size * 0.35, shown, f"on{step}", size=size, anchor="middle")


def by_task(group: Group, probe: str, what: str) -> Series:
    found = [run.results["probes"].get(probe, {}).get(f"{what}_by_task") or [] for run in group.runs]
    return means([pair for values in found for pair in enumerate(values, start=1)])


def over_tasks(comparison: Comparison, probe: str, what: str, width: float) -> Drawing | None:
    tasks, lines = comparison.tasks, []
    for group in comparison.groups:
        series = by_task(group, probe, what)
        if group.joint and series:  # beside the others' end
            series = {tasks: series[1]}
        lines.append((group, series))
    known = [end for _, series in lines for mean, spread in series.values() for end in (mean - spread, mean + spread)]
    if not known:
        return None
    low, high = padded(known, least=2.0)
    places = range(1, tasks + 1, 1 if tasks <= 10 or width > 400 else 2)
    label = f"{what} over tasks, {title_of(probe)}"
    return line_chart(label, "after task", lines, tasks, places, (low, min(high, 100.4)), width)
