"""Which units are frozen when: by epoch, by step, or by fraction of training."""

import math
from collections.abc import Callable, Mapping, Sequence

from ptlf.freezing.schedule import FreezeSchedule
from ptlf.freezing.select import Selector, select
from ptlf.freezing.units import Unit


class Timetable:
    """Call `at(now)` before each epoch or step; it freezes and thaws what that moment asks for.

    What is frozen depends on the moment alone, so a resumed loop calls `at` with the step it has reached.

    when: a mapping of moments to selectors of units, where each entry says what is frozen from then on; or a
        `FreezeSchedule`, whose share of `order` is frozen. A moment is an integer (an epoch or a step, whichever `at`
        is called with) or a float in [0, 1] (a fraction of `total`; without `total`, `at` is called with fractions).
    total: the number of epochs or steps. A `FreezeSchedule` is stretched to it: with 10 epochs and a total of 1000,
        step 500 is its epoch 5. Without `total`, `at` is called with its epochs.
    order: names in the order in which a `FreezeSchedule` freezes them; by default that of the data.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        make_so: Callable[[list[str]], list[str]],
        when: FreezeSchedule | Mapping[int | float, Selector],
        total: int | None = None,
        order: Sequence[str] | None = None,
    ) -> None:
        self._make_so = make_so
        self.schedule, self.total = when if isinstance(when, FreezeSchedule) else None, total
        self.order = [unit.name for unit in units] if order is None else list(order)
        if unknown := set(self.order) - {unit.name for unit in units}:
            raise ValueError(f"order names {sorted(unknown)[0]!r}, which is not a unit of this freezer")
        self.moments: list[tuple[float, list[str]]] = []  # first moment, names frozen from then on
        self.fractions = total is None and isinstance(when, Mapping) and any(isinstance(key, float) for key in when)
        if isinstance(when, Mapping):
            if order is not None:
                raise ValueError("order goes with a FreezeSchedule; a mapping names the units itself")
            chosen = [(_moment(key, total), [unit.name for unit in select(units, what)]) for key, what in when.items()]
            self.moments = sorted(chosen, key=lambda entry: entry[0])

    def names(self, now: float) -> list[str]:
        """The units that are frozen at this moment."""
        if self.schedule is not None:
            return self.order[: self.schedule.count(self._epoch(now), len(self.order))]
        if self.fractions and now > 1:
            raise ValueError(f"{now} is not a fraction of training; give `total`, the number of epochs or steps")
        return next((names for moment, names in reversed(self.moments) if moment <= now), [])

    def _epoch(self, now: float) -> int:
        """Of the schedule, at this moment."""
        assert self.schedule is not None
        epochs = self.schedule.epochs
        if self.total is not None:
            return min(math.floor(now * epochs / self.total + 1e-9), epochs - 1)  # 0.29 * 100 is 28.999999999999996
        if now != int(now):
            hint = "give `total`, the number of epochs or steps; total=1 takes fractions"
            raise ValueError(f"{now} is not an epoch of this freeze schedule, which has {epochs}; {hint}")
        return int(now)

    def at(self, now: float) -> list[str]:
        """Freeze exactly these units; the names of those that were not frozen before."""
        return self._make_so(self.names(now))


def _moment(key: int | float, total: int | None) -> float:
    if isinstance(key, int):
        return key
    if not 0 <= key <= 1:
        raise ValueError(f"{key} is not a fraction of training; write an epoch or step as an integer")
    return key if total is None else math.ceil(key * total - 1e-9)  # 0.29 * 100 is 28.999999999999996
