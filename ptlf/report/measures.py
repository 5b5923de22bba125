"""Every figure that tables, page and charts show of a run: where it is in the record, how it is written and compared.

A new cost is measured and recorded elsewhere, and shown everywhere by a line in `COSTS`. Methods are compared by seed;
"better" and "worse" are said only where the 95 % t interval of the mean difference excludes zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptlf.report.intervals import BEFORE, RANDOM, Interval, Ratio, cost_ratio, interval, verdict
from ptlf.report.runs import LATER_KEPT, LATER_PEAK, Comparison, Group
from ptlf.run.results import STEADY

SCALES = {"MiB": 2**20, "T": 1e12, "G": 1e9}  # of the recorded value; 1 for other units
WITHIN, AMONG = "within the task", "among all classes"
LATER = "mean after task 1"
PROBES = {"knn": "kNN", "linear": "linear"}
OVER_SEEDS = "±: half the width of the 95 % t interval over the seeds"  # beside a mean
RATIOS = "×: geometric mean of the ratios by seed"
MEMORY = (
    "mean after task 1: over the epochs in which units may freeze; the peak of a whole run is mostly that of its first "
    "epochs, before any froze"
)
COMPILING = " without compiling"  # in titles, which are short: three runs stand beside them in 80 columns


@dataclass(frozen=True)
class Measure:
    title: str
    path: tuple[str, ...]  # in results.json, or in a row of a benchmark
    unit: str
    digits: int = 2
    cost: bool = False  # less is better; its ratio to the baseline's is shown, and its axis begins at zero
    short: str = ""  # heading of its panel and column where room is scarce; without one it is in full tables only
    below: str = ""  # second line of that heading
    epoch: str = ""  # its column in cost.per_epoch, drawn over the epochs
    indent: str = ""  # of a title, for a part of the cost before it
    scale: float = 0.0  # recorded value of one unit; 0: as SCALES says
    rising: bool = False  # more is better

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def show(self, value: float | None, beside: float | None = None) -> str:
        """In the measure's unit, without its name; a spread as fine as the mean it stands beside."""
        if value is None:
            return "-"
        scale, digits = self.scale or SCALES.get(self.unit, 1), self.digits
        size = abs(value if beside is None else beside) / scale
        if self.cost and size >= 1:  # four digits tell a cost well enough
            digits = max(0, min(digits, 3 - int(math.log10(size))))
        return f"{value / scale:,.{digits}f}".replace("-", "−")

    def words(self, value: float | None) -> str:
        """With its unit; long times in minutes."""
        if value is None:
            return "-"
        if self.unit == "s":
            return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
        return f"{self.show(value)} {self.unit}"

    def half(self, group: Group) -> float | None:
        """Half the width of the 95 % t interval of its mean over the seeds; None for a single one."""
        found = interval(group.values(self.path).values())
        return found.half if found else None

    def difference(self, group: Group, base: Group | None) -> Interval | None:
        """To the baseline's run of the same seed. None for the baseline itself and without a seed in common."""
        if base is None or base is group:
            return None
        mine, theirs = group.values(self.path), base.values(self.path)
        return interval([mine[seed] - theirs[seed] for seed in sorted(mine) if seed in theirs])

    def said(self, found: Interval | None) -> str:
        """A difference as in "+0.31 ± 0.25 better"."""
        if found is None:
            return "-"
        half = "" if found.half is None else f" ± {self.show(found.half, found.mean)}"
        return f"{'+' * (found.mean > 0)}{self.show(found.mean)}{half} {verdict(found, self.rising)}".rstrip()

    def ratio(self, group: Group, base: Group | None) -> Ratio | None:
        """Of a cost to the baseline's; None for the baseline itself."""
        if not self.cost or base is None or base is group:
            return None
        return cost_ratio(group.values(self.path), base.values(self.path))

    def times(self, group: Group, base: Group | None) -> str:
        """The ratio as in "0.71×"; empty where there is none."""
        found = self.ratio(group, base)
        return f"{found.mean:.2f}×" if found else ""


def duration(value: float) -> str:
    """Roughly, for estimates."""
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def title_of(probe: str) -> str:
    kind, _, bank = probe.partition("_")
    if kind not in PROBES:
        return probe
    bank, _, k = bank.partition("_k")
    return f"{PROBES[kind]} {WITHIN if bank == 'task' else AMONG}" + f", k = {k}" * bool(k)


def probe_measures(probe: str, groups: Sequence[Group] = ()) -> list[Measure]:
    """Accuracy, forgetting, and the accuracy of the encoder before training, by the name it has in these runs."""
    starts = {group.start for group in groups} or {RANDOM}
    start = starts.pop() if len(starts) == 1 else BEFORE
    title = title_of(probe)
    below, path = title.replace(WITHIN, "own task").replace(AMONG, "all classes"), ("probes", probe)
    return [
        Measure(f"accuracy, {title}", (*path, "accuracy"), "%", short="accuracy", below=below, rising=True),
        Measure(f"forgetting, {title}", (*path, "forgetting"), "points", short="forgetting", below=below),
        Measure(f"{start}, {title}", (*path, "untrained_accuracy"), "%", short=start, rising=True),
    ]


def reference_measures(probe: str) -> list[Measure]:
    """What the encoder knew before the stream: accuracy before and after it, and the difference."""
    title, path = title_of(probe), ("reference", "probes", probe)
    known: dict[str, Any] = {"short": "knew before", "rising": True}
    return [
        Measure(f"what it knew before, at the start, {title}", (*path, "before"), "%", below="at the start", **known),
        Measure(f"what it knew before, at the end, {title}", (*path, "accuracy"), "%", below="at the end", **known),
        Measure(f"lost of what it knew before, {title}", (*path, "lost"), "points", short="lost", below="knew before"),
    ]


def cost(title: str, key: str, unit: str, digits: int = 1, short: str = "", below: str = "", **more: Any) -> Measure:
    return Measure(title, ("cost", key), unit, digits, short=short, below=below, **{"cost": True, **more})


COSTS = [
    cost("training time", "learning_seconds", "s", 1, "time", "all in, seconds"),
    cost("training steps", "train_seconds", "s", epoch="seconds", indent="  "),
    # The baseline spends next to none on most of these: no ratio.
    cost("correlation", "correlation_seconds", "s", cost=False, indent="  "),
    cost("freezing and rebuilding", "rebuild_seconds", "s", cost=False, indent="  "),
    cost("evaluation", "eval_seconds", "s", cost=False),
    cost("checkpoints", "checkpoint_seconds", "s", cost=False),
    cost("measuring bytes and FLOPs", "measuring_seconds", "s", cost=False),
    cost("activation memory, mean", "mean_kept_bytes", "MiB"),
    cost(f"activation memory, {LATER}", LATER_KEPT[-1], "MiB", 1, "activations", "after task 1, MiB"),
    cost("activation memory, last epoch", "kept_bytes", "MiB", epoch="kept_bytes"),
    cost("peak GPU memory, whole run", "peak_memory_bytes", "MiB", 0),
    cost(f"peak GPU memory, {LATER}", LATER_PEAK[-1], "MiB", 0, "GPU memory", "after task 1, MiB"),
    cost("peak GPU memory, last epoch", "last_peak_memory_bytes", "MiB", 0, epoch="peak_memory_bytes"),
    cost("backward FLOPs", "backward_flops", "T", 3, "FLOPs", "backward, T", epoch="backward_flops"),
]
MAIN_COSTS = [measure for measure in COSTS if measure.short]
HEADLINE_COSTS = [measure for measure in COSTS if measure.path[-1] in ("learning_seconds", LATER_KEPT[-1])]


def main_measures(comparison: Comparison, probes: Sequence[str]) -> list[Measure]:
    """The accuracies of these probes, what was known before, and the main costs, as far as a run has them."""
    known = [probe for probe in comparison.known if probe in probes] or comparison.known[:1]
    measures = [measure for probe in probes for measure in probe_measures(probe)[:2]]
    measures += [measure for probe in known for measure in reference_measures(probe)[1:]]
    return recorded(comparison, measures + MAIN_COSTS)


def all_measures(comparison: Comparison) -> list[Measure]:
    """All that a run has of them, with the figures before training."""
    measures = [measure for probe in comparison.probes for measure in probe_measures(probe, comparison.groups)]
    measures += [measure for probe in comparison.known for measure in reference_measures(probe)]
    return recorded(comparison, measures + COSTS)


def recorded(comparison: Comparison, measures: Sequence[Measure]) -> list[Measure]:
    """Those that a run has. Where runs stand beside each other, their seconds of training are `steady`."""
    groups = comparison.groups
    found = [m for m in measures if any(group.values(m.path) for group in groups)]
    engines = {run.results["environment"].get("engine") for group in groups for run in group.runs}
    waited = len(groups) > 1 and engines != {"eager"}  # or may have: older records do not say
    return [steady(m) if waited and m.path[-1] in ("learning_seconds", "train_seconds") else m for m in found]


def steady(measure: Measure) -> Measure:
    """Seconds without the wait for the compiler, as in ratios."""
    place, key = measure.path
    below = measure.below and "no compiling, s"
    return replace(measure, title=measure.title + COMPILING, path=(place, f"steady_{key}"), below=below)


def notes(comparison: Comparison, measures: Sequence[Measure]) -> list[str]:
    """How to read means and costs of these measures."""
    found = [OVER_SEEDS, *[RATIOS] * bool(comparison.baseline)] * comparison.seeds
    found += [MEMORY] * any(group.values(LATER_KEPT) for group in comparison.groups)
    return found + [f"without compiling: {STEADY}"] * any(COMPILING in measure.title for measure in measures)
