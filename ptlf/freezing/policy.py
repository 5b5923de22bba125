"""The policy's contract: which units freeze next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from ptlf.freezing.savings import Saving

Names = list[str]
RatiosOf = Callable[[Sequence[str]], dict[str, float]]  # computes the correlation ratios of units, by name


@dataclass
class Context:
    """What a policy may look at. `ratios` and `savings` are given to policies that need them; ratios change by task."""

    units: Names  # all, in data order
    ratios: dict[str, float] | None = None  # of the units that the policy asked for
    savings: dict[str, Saving] | None = None
    generator: torch.Generator | None = None
    remaining: int = 1  # how many more may freeze before the task ends

    def ratio(self, name: str, default: float | None = None) -> float:
        found = None if self.ratios is None else self.ratios.get(name, default)
        if found is None:
            raise ValueError(f"this policy needs the correlation ratio of unit {name!r}, and it was not given")
        return found


def setting(default: Any, about: str, **limits: Any) -> Any:
    """A field of a `PolicyConfig` with its help text and limits."""
    return field(default=default, metadata={"about": about, **limits})


@dataclass
class PolicyConfig:
    """Settings of a policy. A field's metadata may hold its help text ("about") and limits ("choices", "ge", ...)."""

    name: str = setting("none", "which units freeze next; `ptlf list policies` names them")


C = TypeVar("C", bound=PolicyConfig)


class Policy(Generic[C]):
    """Subclass `Policy[YourConfig]`, set `Config = YourConfig`, and implement `choose`."""

    Config: ClassVar[type[PolicyConfig]] = PolicyConfig
    freezes: ClassVar[bool] = True
    needs_ratios: ClassVar[bool] = False  # correlation ratios are computed at a task's start, for `context.ratios`
    savings_by: str | None = None  # which savings `context.savings` must hold: "flops", "seconds", or none

    def __init__(self, config: C | None = None) -> None:
        """`config` is an instance of `Config`; without it, its defaults."""
        self.config: C = cast("C", self.Config()) if config is None else config

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: RatiosOf) -> dict[str, float]:
        """The ratios that the choice depends on, by unit name. A policy that can do without some saves their time."""
        return ratios(candidates)

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        """The next `count` units to freeze, or all candidates if there are fewer, in the order they freeze.

        `candidates` are the units not frozen yet, in data order; `frozen` are those that are.
        """
        raise NotImplementedError


def at_least_zero(count: int) -> int:
    if count < 0:
        raise ValueError(f"cannot freeze {count} units")
    return count
