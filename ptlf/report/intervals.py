"""How sure a figure is: t intervals over seeds, and Wilson's from the number of test images alone."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from ptlf.run.results import Json, Z, half_difference

RANDOM, GIVEN, BEFORE = "random encoder", "given encoder", "encoder before training"


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


def interval(values: Collection[float]) -> Interval | None:
    if not values:
        return None
    half = None
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half, len(values))


def seeds_to_tell(found: Interval) -> int | None:
    """With how many seeds of the same spread the 95 % interval of this mean would exclude zero; None: over 1000."""
    if found.half is None or not found.mean:
        return None
    deviation = found.half * math.sqrt(found.count) / float(stdtrit(found.count - 1, 0.975))
    counts = (n for n in range(2, 1001) if float(stdtrit(n - 1, 0.975)) * deviation < abs(found.mean) * math.sqrt(n))
    return next(counts, None)


def mean_ratio(values: Sequence[float]) -> Ratio | None:
    """Of positive values. The interval is that of their logarithms, so that its ends are positive."""
    found = interval([math.log(value) for value in values])
    if found is None:
        return None
    ends = None if found.half is None else (math.exp(found.mean - found.half), math.exp(found.mean + found.half))
    return Ratio(math.exp(found.mean), ends, found.count)


def cost_ratio(mine: Mapping[int, float], base: Mapping[int, float]) -> Ratio | None:
    """Of costs by seed."""
    both = [(mine[seed], base[seed]) for seed in sorted(mine) if seed in base]
    if both and all(a > 0 and b > 0 for a, b in both):
        return mean_ratio([a / b for a, b in both])
    if not mine or not any(base.values()):
        return None
    return Ratio(statistics.fmean(mine.values()) / statistics.fmean(base.values()), None, 0)


def verdict(found: Interval | None, rising: bool) -> str:
    """`rising`: more is better, as of accuracies, of which few images give equal differences by chance."""
    if found is None or not found.excludes_zero or (rising and not found.half):
        return ""
    return "better" if (found.mean > 0) == rising else "worse"


def wilson(percent: float, images: float) -> tuple[float, float]:
    """Wilson's interval at 95 % for a share of `images` images, in per cent."""
    share = min(max(percent / 100, 0.0), 1.0)
    centre = (share + Z**2 / (2 * images)) / (1 + Z**2 / images)
    half = Z / (1 + Z**2 / images) * (share * (1 - share) / images + Z**2 / (4 * images**2)) ** 0.5
    return 100 * (centre - half), 100 * (centre + half)


def images_of_mean(counts: Sequence[int]) -> float | None:
    """As how many test images the mean of accuracies on so many each counts: of T like ones, T times as many."""
    known = [count for count in counts if count]
    return len(known) ** 2 / sum(1 / count for count in known) if known else None


def images_behind(results: Json, probe: str, key: str) -> float | None:
    """Behind `accuracy` or `untrained_accuracy` of a probe; None where the record does not say."""
    values, counts = results["probes"].get(probe, {}), results.get("test_images")
    row = values.get("untrained") if key == "untrained_accuracy" else (values.get("matrix") or [None])[-1]
    if not row or not counts or len(counts) != len(row):
        return None
    return images_of_mean([count for count, value in zip(counts, row, strict=True) if value is not None])


def start_of(results: Json) -> str:
    """What the encoder was before training: its weights may have been given with a file or by the user's own code."""
    return GIVEN if results.get("encoder_weights") else BEFORE if results.get("own_encoder") else RANDOM


def worsened(probe: str, scores: Sequence[Json], start: str, images: float | None) -> str:
    """What to say if the encoder was better before training, by a probe's scores for each seed; else nothing. Seeds
    are compared in pairs; with one seed the difference must exceed what that number of images gives by chance."""
    both = [(each.get("untrained_accuracy"), each.get("accuracy")) for each in scores]
    pairs = [(was, now) for was, now in both if was is not None and now is not None]
    if not (fall := interval([was - now for was, now in pairs])):
        return ""
    was, now = map(statistics.fmean, zip(*pairs, strict=True))
    half = fall.half if fall.half is not None else half_difference(was, now, images) if images else 0.0
    if fall.mean <= half:
        return ""
    points = f"{fall.mean:.2f}{f' ± {half:.2f}' * bool(half)} points"
    return f"training made {probe} worse by {points}: {was:.2f} % before ({start}), {now:.2f} % after"


def neighbours_used(values: Json) -> str:
    """The k that a probe used, as "k = 20"; that of the settings where older records do not say."""
    used = [row["k"] for row in values.get("used_by_task") or [] if "k" in row] or [values["settings"].get("k")]
    return "" if used == [None] else f"k = {used[0]}" if len({*used}) == 1 else f"k = {min(used)} to {max(used)}"
