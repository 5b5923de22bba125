"""Methods compared by seed: the mean difference to the baseline's run of the same seed, and its 95 % t interval.

"Better" and "worse" are said only where the interval excludes zero. Ratios of costs have a geometric mean, and the
t interval of their logarithms, so that its ends are positive.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from ptlf.report.measures import Measure
from ptlf.report.runs import Group, RunRecord

OVER_SEEDS = "±: half the width of the 95 % t interval over the seeds"  # beside a mean
HOW = "mean difference to {base} with the same seed, 95 % t interval; better or worse only where it excludes zero"


@dataclass(frozen=True)
class Interval:
    """Mean of `count` values. `half` is half the width of its 95 % t interval, None for a single value."""

    mean: float
    half: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        return self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of `count` ratios by seed, and the ends of its 95 % interval: None for a single one. Without a
    seed in common, count is 0 and the mean the ratio of the means."""

    mean: float
    ends: tuple[float, float] | None
    count: int


def interval(values: Sequence[float]) -> Interval | None:
    if not values:
        return None
    half = None
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half, len(values))


def half_of(group: Group, measure: Measure) -> float | None:
    """Half the width of the 95 % t interval of its mean over the seeds; None for a single one."""
    found = interval(group.values(measure.path))
    return found.half if found else None


def mean_ratio(values: Sequence[float]) -> Ratio | None:
    """Of positive values."""
    found = interval([math.log(value) for value in values])
    if found is None:
        return None
    ends = None if found.half is None else (math.exp(found.mean - found.half), math.exp(found.mean + found.half))
    return Ratio(math.exp(found.mean), ends, found.count)


def by_seed(runs: Sequence[RunRecord], value: Callable[[RunRecord], float | None]) -> dict[int, float]:
    """Of the runs that have it."""
    found = {int(run.results.get("seed") or 0): value(run) for run in runs}
    return {seed: float(value) for seed, value in found.items() if value is not None}


def compared(group: Group, base: Group | None, measure: Measure) -> Interval | None:
    """None for the baseline itself and where there is no seed in common."""
    if base is None or base is group:
        return None
    mine, theirs = (by_seed(one.runs, lambda run: run.value(measure.path)) for one in (group, base))
    return interval([mine[seed] - theirs[seed] for seed in sorted(mine) if seed in theirs])


def ratio(group: Group, base: Group | None, measure: Measure) -> Ratio | None:
    """Of a cost to the baseline's; None for the baseline itself."""
    if not measure.cost or base is None or base is group:
        return None
    return cost_ratio(*(by_seed(one.runs, lambda run: run.value(measure.path)) for one in (group, base)))


def times(group: Group, base: Group | None, measure: Measure) -> str:
    """The ratio as in "0.71×"; empty where there is none."""
    found = ratio(group, base, measure)
    return f"{found.mean:.2f}×" if found else ""


def cost_ratio(mine: Mapping[int, float], base: Mapping[int, float]) -> Ratio | None:
    """Of costs by seed."""
    both = [(mine[seed], base[seed]) for seed in sorted(mine) if seed in base]
    if both and all(a > 0 and b > 0 for a, b in both):
        return mean_ratio([a / b for a, b in both])
    if not mine or not any(base.values()):
        return None
    return Ratio(statistics.fmean(mine.values()) / statistics.fmean(base.values()), None, 0)


def verdict(found: Interval | None, rising: bool) -> str:
    """`rising`: more is better."""
    if found is None or not found.excludes_zero:
        return ""
    return "better" if (found.mean > 0) == rising else "worse"


def words(found: Interval | None, measure: Measure) -> str:
    """As in "+0.31 ± 0.25 better"."""
    if found is None:
        return "-"
    shown = f"{'+' * (found.mean > 0)}{measure.show(found.mean)}"
    if found.half is not None:
        shown += f" ± {measure.show(found.half, found.mean)}"
    return f"{shown} {verdict(found, measure.rising)}".rstrip()


def unit(measure: Measure) -> str:
    """Of a difference: percentages differ by points."""
    return "points" if measure.unit == "%" else measure.unit


def several_seeds(groups: Sequence[Group], base: Group | None) -> list[Group]:
    """Those with at least two seeds in common with the baseline."""
    own = {run.results.get("seed") for run in base.runs} if base else set()
    return [g for g in groups if g is not base and len(own & {run.results.get("seed") for run in g.runs}) > 1]
