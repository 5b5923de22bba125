"""Accuracy and forgetting against time and memory, with the runs that no other one beats in both."""

import itertools

from ptlf.report.drawing import Drawing
from ptlf.report.figures.axes import TINY, Scale, grid_y, legend, padded, plain, ticks
from ptlf.report.measures import probe_measures
from ptlf.report.pareto import COSTS, front, paths, points
from ptlf.report.runs import Comparison


def frontier(comparison: Comparison, width: float) -> Drawing | None:
    """A panel per cost and measure of the first probe; a dashed line joins the front, thin ones the paths."""
    if not comparison.probes or comparison.baseline is None:
        return None
    measures = probe_measures(comparison.probes[0])[:2]
    panels = [
        (kind, measure, found)
        for measure in measures
        for kind in COSTS
        if len(found := points(comparison, kind, measure.path)) > 2
    ]
    if not panels:
        return None
    columns, left, tall, gap = 2 if width > 600 else 1, 40.0, 200.0, 66.0
    drawing = Drawing(width, 0, "Accuracy and forgetting against time and memory, with the Pareto front")
    drawn = {point.group.label for _, _, found in panels for point in found}
    top = legend(drawing, 0, 10, width, [group for group in comparison.groups if group.label in drawn]) + 30
    wide = (width - (columns - 1) * 24) / columns
    for place, (kind, measure, found) in enumerate(panels):
        x0, y0 = place % columns * (wide + 24) + left, top + place // columns * (tall + gap)
        title = f"{measure.short}, {measure.unit}, {measure.below}"
        drawing.text(x0 - left, y0 - 12, title, "ink", size=TINY + 1.5, bold=True)
        ends = [end for point in found for end in (point.value - point.spread, point.value + point.spread)]
        y = Scale(*padded(ends, least=1.0), y0 + tall, y0)
        x = Scale(*padded([point.cost for point in found], least=0.1), x0, x0 + wide - left - 4)
        grid_y(drawing, y, x.start, x.end)
        for tick in ticks(x.low, x.high):
            drawing.text(x(tick), y0 + tall + 16, f"{plain(tick)}×", "soft", size=TINY, anchor="middle")
        drawing.text(x.end, y0 + tall + 31, COSTS[kind], "soft", size=TINY, anchor="end")
        for path in paths(found):
            drawing.line([(x(point.cost), y(point.value)) for point in path], "soft", width=0.7)
        best = front(found, measure.rising)
        corners = [(x(best[0].cost), y(best[0].value))]
        for before, after in itertools.pairwise(best):  # until the next one is paid for, the last one holds
            corners += [(x(after.cost), y(before.value)), (x(after.cost), y(after.value))]
        drawing.line([*corners, (x.end, corners[-1][1])], "soft", width=1.5, dash="3 3")
        for point in found:
            role, at = f"run{point.group.colour}", (x(point.cost), y(point.value))
            if point.spread:
                drawing.line([(at[0], y(point.value - point.spread)), (at[0], y(point.value + point.spread))], role)
            words = f"{point.group.label}: {measure.show(point.value)} {measure.unit}, {point.cost:.2f}×"
            drawing.mark(*at, role, size=5.0, look=point.group.marker, title=words)
    bottom = top + -(-len(panels) // columns) * (tall + gap) - 26
    if any(point.spread for _, _, found in panels for point in found):
        bottom += 14
        drawing.text(0, bottom - 4, "bars: one standard deviation over seeds", "soft", size=TINY)
    drawing.height = bottom
    return drawing
