"""What may be said of runs: better than before training, one above the others, or a copy of another."""

import math
import statistics
from collections.abc import Sequence

from ptlf.report.intervals import images_behind, interval, seeds_to_tell
from ptlf.report.runs import Comparison, Group, RunRecord
from ptlf.run.results import Json, half_difference


def latest_verdicts(tests: Sequence[Json], tasks: int) -> list[str]:
    """On each set of labelled images. tasks: how many the run has learnt; a verdict from before the last says so."""
    latest = {test["images"]: test for test in tests if "verdict" in test}.values()
    return [f"After {t['tasks']} of {tasks} tasks. " * (t["tasks"] < tasks) + t["verdict"] for t in latest]


def group_verdicts(group: Group) -> list[str]:
    """Of a single run its sentences; of several how many are better and worse, on their last labelled images."""
    tests = [run.tests for run in group.runs]
    if len(tests) == 1:
        return latest_verdicts(tests[0], len(group.first["tasks"]))
    gains = [next(iter(each[-1]["gains"].values())) for each in tests if each and each[-1].get("gains")]
    up, down = (sum(sign * gain > half for gain, half in gains) for sign in (1, -1))
    return [f"Of {len(gains)} seeds {up} are better and {down} worse than the {group.start}."] * bool(gains)


def copies(runs: Sequence[RunRecord]) -> list[str]:
    """Runs that claim another seed, whose every loss is that of an earlier run."""
    first: dict[str, RunRecord] = {}
    pairs = [(run, first.setdefault(run.losses, run)) for run in runs if run.losses]
    both = [(a.results["name"], a.results["seed"], b.results["seed"]) for a, b in pairs]
    return [f"{name}, seed {a}, is a copy of seed {b}: it has the same losses" for name, a, b in both if a != b]


def ranking(comparison: Comparison) -> str:
    """The highest accuracy, if it is not shown to be above the others' or that before training, and what would tell."""
    probe = next(iter(comparison.probes), "")
    path, before = ("probes", probe, "accuracy"), ("probes", probe, "untrained_accuracy")
    groups = [group for group in comparison.groups if group.values(path) and not group.joint]
    best = max(groups, key=lambda group: group.mean(path) or 0.0, default=None)
    if best is None or len(groups) < 2:
        return ""
    start, mine, images = f"the {best.start}", best.values(path), images_behind(best.first, probe, "accuracy")
    rivals = {group.label: group.values(path) for group in groups if group is not best} | {start: best.values(before)}
    own, unclear = statistics.fmean(mine.values()), []
    for name, theirs in rivals.items():
        if not (found := interval([mine[seed] - theirs[seed] for seed in sorted(mine) if seed in theirs])):
            continue
        half, more, what = found.half, seeds_to_tell(found), "seeds"
        if not half:  # of one seed, or of so few images that all differences are equal
            half = half_difference(own, own - found.mean, images) if images else math.inf
            more = round(images * (half / found.mean) ** 2) if images and found.mean > half / 30 else None
            what = "test images"
        tell = f"; about {more:,} {what} would tell" if more else ""
        unclear += [f"{name} ({own - found.mean:.2f} %{tell})"] * (found.mean <= half)
    said = f"{best.label} has the highest accuracy ({probe}), {own:.2f} %, but is not shown to be above "
    advice = "; train longer before you compare methods" * any(name.startswith(start) for name in unclear)
    return f"{said}{', '.join(unclear)}{advice}." if unclear else ""
