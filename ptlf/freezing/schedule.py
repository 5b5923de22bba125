"""The freeze ratio by epoch of one task."""

import math
from dataclasses import dataclass

from ptlf.freezing.names import unknown_name

# Each shape maps (epoch, epochs) to the weight w in the ratio (1 - w) * initial + w * final.
SHAPES = {
    "cosine": lambda epoch, epochs: (1 - math.cos(math.pi * _progress(epoch, epochs))) / 2,
    "linear": lambda epoch, epochs: _progress(epoch, epochs),
    "constant": lambda epoch, epochs: 1.0,
}
RISING = ("cosine", "linear")


def _progress(epoch: int, epochs: int) -> float:
    """0 in the first epoch (or task), 1 in the last; a single one is the last."""
    return epoch / (epochs - 1) if epochs > 1 else 1.0


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
            raise ValueError(unknown_name("freeze schedule", self.shape, SHAPES))
        if self.epochs < 1:
            raise ValueError(f"a freeze schedule needs at least 1 epoch, not {self.epochs}")
        for name, ratio in (("initial", self.initial), ("final", self.final)):
            if not 0 <= ratio <= 1:
                raise ValueError(f"the {name} freeze ratio must lie in [0, 1], not {ratio}")
        if self.shape in RISING and self.final < self.initial:
            limits = f"final {self.final} is below initial {self.initial}"
            raise ValueError(f"a {self.shape} freeze schedule rises: {limits}")

    def __call__(self, epoch: int) -> float:
        """Freeze ratio of `epoch`, counted from 0."""
        if not 0 <= epoch < self.epochs:
            raise ValueError(f"epoch {epoch} is outside this freeze schedule's epochs 0..{self.epochs - 1}")
        weight = SHAPES[self.shape](epoch, self.epochs)
        return (1 - weight) * self.initial + weight * self.final  # exact at both ends

    def count(self, epoch: int, units: int) -> int:
        """How many of `units` may be frozen in `epoch`, rounded down."""
        return math.floor(self(epoch) * units + 1e-9)  # 0.29 * 100 is 28.999999999999996

    def most(self, units: int) -> int:
        """How many of `units` are frozen at the end of the task."""
        return self.count(self.epochs - 1, units)
