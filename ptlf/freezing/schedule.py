"""Which units are frozen when: their share by epoch of one task, and a plan by epoch, step or fraction of training."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ptlf.freezing.select import Selector, select
from ptlf.freezing.units import Unit

SLACK = 1e-9  # before rounding: 0.29 * 100 is 28.999999999999996
# Each shape maps progress (0 in the first epoch, 1 in the last) to the weight w in the ratio
# (1 - w) * initial + w * final.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: progress,
    "constant": lambda progress: 1.0,
}


@dataclass(frozen=True)
class FreezeSchedule:
    """The fraction of units that may be frozen in an epoch, from `initial` in the first to `final` in the last epoch.

    "constant" is `final` in every epoch.
    """

    initial: float = 0.0
    final: float = 0.4
    epochs: int = 200
    shape: str = "cosine"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"a freeze schedule is one of {', '.join(SHAPES)}, not {self.shape!r}")
        if self.epochs < 1:
            raise ValueError(f"a freeze schedule needs at least 1 epoch, not {self.epochs}")
        for name, ratio in (("initial", self.initial), ("final", self.final)):
            if not 0 <= ratio <= 1:
                raise ValueError(f"the {name} freeze ratio must lie in [0, 1], not {ratio}")
        if self.shape != "constant" and self.final < self.initial:
            raise ValueError(f"a {self.shape} schedule rises: final {self.final} is below initial {self.initial}")

    def __call__(self, epoch: int) -> float:
        """Freeze ratio of `epoch`, counted from 0."""
        if not 0 <= epoch < self.epochs:
            raise ValueError(f"epoch {epoch} is outside this freeze schedule's epochs 0..{self.epochs - 1}")
        weight = SHAPES[self.shape](epoch / (self.epochs - 1) if self.epochs > 1 else 1.0)
        return (1 - weight) * self.initial + weight * self.final  # exact at both ends

    def count(self, epoch: int, units: int) -> int:
        """How many of `units` may be frozen in `epoch`, rounded down."""
        return math.floor(self(epoch) * units + SLACK)

    def most(self, units: int) -> int:
        """How many of `units` are frozen at the end of the task."""
        return self.count(self.epochs - 1, units)


class Timetable:
    """Call `at(now)` before each epoch or step; it freezes and thaws what that moment asks for.

    What is frozen depends on the moment alone, so a resumed loop calls `at` with the step it has reached.

    when: a mapping of moments to selectors of units, where each entry says what is frozen from then on; or a
        `FreezeSchedule`, whose share of `order` is frozen. A moment is an integer (an epoch or a step, whichever `at`
        is called with) or a float in [0, 1] (a fraction of `total`; without `total`, `at` is called with fractions).
    total: the number of epochs or steps, to which a `FreezeSchedule` is stretched: with 10 epochs and a total of 1000,
        step 500 is its epoch 5. Without `total`, `at` is called with its epochs.
    order: names in the order in which a `FreezeSchedule` freezes them; by default that of the data.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        freeze_only: Callable[[list[str]], list[str]],
        when: FreezeSchedule | Mapping[int | float, Selector],
        total: int | None = None,
        order: Sequence[str] | None = None,
    ) -> None:
        self.freeze_only, self.when, self.total = freeze_only, when, total
        self.order = [unit.name for unit in units] if order is None else list(order)
        if unknown := set(self.order) - {unit.name for unit in units}:
            raise ValueError(f"order names {sorted(unknown)[0]!r}, which is not a unit of this freezer")
        self.moments: dict[float, list[str]] = {}  # names frozen from a moment on, the last moment first
        if isinstance(when, Mapping):
            chosen = {_moment(key, total): [unit.name for unit in select(units, what)] for key, what in when.items()}
            self.moments = dict(sorted(chosen.items(), reverse=True))

    def names(self, now: float) -> list[str]:
        """The units that are frozen at this moment."""
        if isinstance(self.when, FreezeSchedule):
            return self.order[: self.when.count(self._epoch(now, self.when.epochs), len(self.order))]
        if now > 1 and self.total is None and any(isinstance(key, float) for key in self.when):
            raise ValueError(f"{now} is not a fraction of training; give `total`, the number of epochs or steps")
        return next((names for moment, names in self.moments.items() if moment <= now), [])

    def _epoch(self, now: float, epochs: int) -> int:
        if self.total is not None:
            return min(math.floor(now * epochs / self.total + SLACK), epochs - 1)
        if now != int(now):
            hint = "give `total`, the number of epochs or steps; total=1 takes fractions"
            raise ValueError(f"{now} is not an epoch of this freeze schedule, which has {epochs}; {hint}")
        return min(int(now), epochs - 1)

    def at(self, now: float) -> list[str]:
        """Freeze exactly these units; the names of those that were not frozen before."""
        return self.freeze_only(self.names(now))


def _moment(key: int | float, total: int | None) -> float:
    if isinstance(key, int):
        return key
    if not 0 <= key <= 1:
        raise ValueError(f"{key} is not a fraction of training; write an epoch or step as an integer")
    return key if total is None else math.ceil(key * total - SLACK)
