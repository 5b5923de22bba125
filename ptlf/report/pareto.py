"""What accuracy costs: runs as points, those that no other one beats, and paths along the final share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ptlf.report.paired import by_seed, cost_ratio
from ptlf.report.runs import LATER_KEPT, Comparison, Group, RunRecord, later_seconds, policy_of
from ptlf.run.compat import identity_key

LATER: Mapping[str, Callable[[RunRecord], float | None]] = {
    "seconds": lambda run: later_seconds(run.epochs),
    "bytes": lambda run: run.value(LATER_KEPT),
}
COSTS = {"seconds": "training time of the later tasks", "bytes": "bytes kept for backward in the later tasks"}


@dataclass(frozen=True)
class Point:
    """Runs that differ in the seed: their cost relative to the baseline's, their score, and its spread over seeds."""

    group: Group
    cost: float
    value: float
    spread: float


def costs(comparison: Comparison, kind: str) -> dict[str, float]:
    """By label, relative to the baseline's."""
    found = {group.label: by_seed(group.runs, LATER[kind]) for group in comparison.groups}
    base = found[comparison.baseline.label] if comparison.baseline else {}
    ratios = {label: cost_ratio(mine, base) for label, mine in found.items()}
    return {label: ratio.mean for label, ratio in ratios.items() if ratio}


def points(comparison: Comparison, kind: str, path: Sequence[str]) -> list[Point]:
    relative = costs(comparison, kind)
    found = []
    for group in comparison.groups:
        value = group.mean(path)
        if value is not None and group.label in relative:
            found.append(Point(group, relative[group.label], value, group.spread(path) or 0.0))
    return found


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
    alike: dict[str, list[Point]] = {}
    for point in found:
        config = point.group.config
        if policy_of(config) != "none":
            rest = config | {"freezing": config["freezing"] | {"final": None}}
            alike.setdefault(identity_key(rest), []).append(point)
    return [
        sorted(some, key=lambda point: point.group.config["freezing"]["final"])
        for some in alike.values()
        if len(some) > 1
    ]
