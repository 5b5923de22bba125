"""The policy's contract: which units freeze next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ptlf.core.settings import key
from ptlf.freezing.savings import Saving


@dataclass
class Context:
    """What a policy may look at. `ratios` and `savings` are given to policies that need them; ratios change by task."""

    units: list[str]  # all, in data order
    ratios: dict[str, float] | None = None  # of the units that the policy looked at
    savings: dict[str, Saving] | None = None
    generator: torch.Generator | None = None
    remaining: int = 1  # how many more may freeze before the task ends

    def ratio(self, name: str, default: float | None = None) -> float:
        found = None if self.ratios is None else self.ratios.get(name, default)
        if found is None:
            raise ValueError(f"this policy needs the correlation ratio of unit {name!r}, and it was not given")
        return found


Names = list[str]


class Ratios:
    """Computes ratios of the units it is given, at the weights of the moment at which it was made."""

    def __init__(self, compute: Callable[[Sequence[str]], dict[str, float]] | None = None) -> None:
        self.compute = compute

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        assert self.compute is not None
        return self.compute(names)

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        """Upper bounds of those ratios that take long to compute; none of the others."""
        return {}

    def start(self, names: Sequence[str]) -> bool:
        """Have these ratios computed while training goes on; whether that can be."""
        return False


@dataclass
class PolicyConfig:
    name: str = key("none", "which units freeze next; `ptlf list policies` names them")


class Policy:
    Config: ClassVar[type[PolicyConfig]] = PolicyConfig
    freezes: ClassVar[bool] = True
    needs_ratios: ClassVar[bool] = False
    looks_at_all: ClassVar[bool] = False  # nearly all candidates' ratios are needed, whatever they are
    savings_by: str | None = None  # which savings the context must hold: "flops", "seconds", or none

    def __init__(self, config: Any = None) -> None:
        """`config` is an instance of `Config`; without it, its defaults."""
        self.config: Any = self.Config() if config is None else config

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: Ratios) -> dict[str, float]:
        """The ratios that the choice depends on, by unit name."""
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
