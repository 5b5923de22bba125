"""What accuracy costs: runs as points, those that no other one beats, and paths along the final share."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from ptlf.report.drawing import Colours, frame, look, run_keys, save_picture, style, themed
from ptlf.report.intervals import cost_ratio
from ptlf.report.measures import Measure, probe_measures
from ptlf.report.runs import LATER_KEPT, Comparison, Group, RunRecord
from ptlf.run.compat import identity_key
from ptlf.run.results import Json

LEARNING = ("seconds", "correlation_seconds", "rebuild_seconds")  # of an epoch


def later_seconds(epochs: Sequence[Json]) -> float | None:
    """Of learning in the tasks after the first, in which nothing freezes: steps, correlations, rebuilds."""
    later = [line for line in epochs if line["task"] > 1]
    return sum(line.get(key) or 0.0 for line in later for key in LEARNING) if later else None


COSTS: Mapping[str, Callable[[RunRecord], float | None]] = {
    "training time of the later tasks": lambda run: later_seconds(run.epochs),
    "activation memory of the later tasks": lambda run: run.value(LATER_KEPT),
}


@dataclass(frozen=True)
class Point:
    """Seeds of one configuration: cost relative to the baseline's, score, and the score's deviation over seeds."""

    group: Group
    cost: float
    value: float
    spread: float


def relative_costs(comparison: Comparison, cost: str) -> dict[str, float]:
    """By label, relative to the baseline's."""
    base = by_seed(comparison.baseline, cost) if comparison.baseline else {}
    ratios = {group.label: cost_ratio(by_seed(group, cost), base) for group in comparison.groups}
    return {label: ratio.mean for label, ratio in ratios.items() if ratio}


def by_seed(group: Group, cost: str) -> dict[int, float]:
    found = {run.results["seed"]: COSTS[cost](run) for run in group.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def points(comparison: Comparison, cost: str, path: Sequence[str]) -> list[Point]:
    costs = relative_costs(comparison, cost)
    found = [(group, group.mean(path)) for group in comparison.groups if group.label in costs]
    return [Point(g, costs[g.label], value, g.deviation(path)) for g, value in found if value is not None]


def front(found: Sequence[Point], rising: bool) -> list[Point]:
    """The points that no other one beats, cheapest first: another is at least as cheap and as good, and not equal."""
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (point.cost, -point.value if rising else point.value)):
        if not best or (point.value > best[-1].value if rising else point.value < best[-1].value):
            best.append(point)
    return best


def leading(found: Sequence[Point], rising: bool) -> set[str]:
    """Labels of the groups on the front; of equal points all."""
    best = {(point.cost, point.value) for point in front(found, rising)}
    return {point.group.label for point in found if (point.cost, point.value) in best}


def paths(found: Sequence[Point]) -> list[list[Point]]:
    """Points whose runs differ in nothing but `freezing.final` and the seeds, in the order of that share. Runs without
    freezing, and points that stand alone, are on no path."""
    same: dict[str, list[Point]] = {}
    for point in found:
        config = point.group.config
        if config["freezing"]["policy"]["name"] != "none":
            rest = config | {"freezing": config["freezing"] | {"final": None}}
            same.setdefault(identity_key(rest), []).append(point)
    by_share = [sorted(some, key=lambda point: point.group.config["freezing"]["final"]) for some in same.values()]
    return [path for path in by_share if len(path) > 1]


def frontier(comparison: Comparison, cost: str, measure: Measure, colours: Colours) -> Canvas | None:
    """A dashed line joins the front, thin ones the paths; of two runs there is nothing to show."""
    found = points(comparison, cost, measure.path)
    if len(found) < 3:
        return None
    keys = run_keys([point.group for point in found], colours)
    canvas, axes = frame(colours, 170.0, title=f"{measure.short}, {measure.unit}, {measure.below}", keys=keys)
    for path in paths(found):
        axes.plot([point.cost for point in path], [point.value for point in path], color=colours["soft"], linewidth=0.6)
    for point in found:
        how = look(point.group, colours) | {"linestyle": "-", "markersize": 6, "linewidth": 1}
        axes.errorbar(point.cost, point.value, yerr=point.spread or None, **how)
    best, right = front(found, measure.rising), axes.get_xlim()[1]
    corners = [(best[0].cost, best[0].value)]
    for before, after in itertools.pairwise(best):  # until the next one is paid for, the last one holds
        corners += [(after.cost, before.value), (after.cost, after.value)]
    xs, ys = zip(*corners, (right, best[-1].value), strict=True)
    axes.plot(xs, ys, color=colours["soft"], linestyle="--", linewidth=1.2, zorder=1)
    axes.set_xlim(right=right)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_xlabel(cost)
    return canvas


def write_frontier(comparison: Comparison, out: Path) -> None:
    """Accuracy and forgetting against time and memory, each as SVG and PNG in the folder."""
    with style(colours := themed(False, comparison.tasks)):
        for measure in probe_measures(comparison.probes[0])[:2] if comparison.probes else []:
            for name, cost in zip(("time", "memory"), COSTS, strict=True):
                if canvas := frontier(comparison, cost, measure, colours):
                    save_picture(canvas, out, f"frontier-{measure.short}-{name}")
