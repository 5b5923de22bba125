"""Which units freeze next: the policies' contract, and those that ship with the library, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from ptlf.freezing.cost import BackwardSavings, Saving

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
    sizes: Mapping[str, int] = field(default_factory=dict)  # number of parameters of each unit

    def ratio(self, name: str, default: float | None = None) -> float:
        found = None if self.ratios is None else self.ratios.get(name, default)
        if found is None:
            raise ValueError(f"this policy needs the correlation ratio of unit {name!r}, and it was not given")
        return found


@dataclass
class PolicyConfig:
    """Settings of a policy. A field's metadata may hold its help text ("about") and limits ("choices", "ge", ...)."""

    name: str = field(default="none", metadata={"about": "which units freeze next; `ptlf list policies` names them"})


C = TypeVar("C", bound=PolicyConfig)


class Policy(Generic[C]):
    """Subclass `Policy[YourConfig]`, set `Config = YourConfig`, and implement `choose`."""

    Config: ClassVar[type[PolicyConfig]] = PolicyConfig
    freezes: ClassVar[bool] = True
    needs_ratios: ClassVar[bool] = False  # correlation ratios are computed at a task's start, for `context.ratios`
    needs_savings: ClassVar[bool] = False  # savings are measured when the run begins, for `context.savings`

    def __init__(self, config: C | None = None) -> None:
        """`config` is an instance of `Config`; without it, its defaults."""
        self.config: C = cast("C", self.Config()) if config is None else config

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: RatiosOf) -> dict[str, float]:
        """The ratios that the choice depends on, by unit name. A policy that can do without some saves their time."""
        return ratios(candidates)

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        """The next `count` of the candidates to freeze (all, if there are fewer), in order. They are in data order."""
        raise NotImplementedError


class Correlation(Policy[PolicyConfig]):
    """The paper's: highest ratio first; of equal ratios the unit nearest to the input."""

    needs_ratios = True

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        by_ratio = sorted(candidates, key=lambda name: -context.ratio(name))  # stable: ties stay in data order
        return by_ratio[:count]


class Ascending(Policy[PolicyConfig]):
    """From the input upwards."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return candidates[:count]


class Random(Policy[PolicyConfig]):
    """Any unit, each as likely as the other."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        order = torch.randperm(len(candidates), generator=context.generator)
        return [candidates[index] for index in order.tolist()[:count]]


class Never(Policy[PolicyConfig]):
    """Nothing freezes."""

    freezes = False

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return []


@dataclass
class CostAwareConfig(PolicyConfig):
    name: str = "cost_aware"
    sharpness: float = field(default=8.0, metadata={"about": "how much ratios count beside savings; 0 = none", "ge": 0})
    savings: str = field(default="flops", metadata={"about": "what is counted as saved", "choices": ("flops",)})


class CostAware(Policy[CostAwareConfig]):
    """Highest ratio ** sharpness * saving first, one unit after the other.

    The saving of a unit is what `BackwardSavings` gains by it, given what is frozen already. The first units may save
    much together only: the first of them freezes if they save more, per unit, than any unit alone. Ratios lie close
    together (0.8 to 1 in a trained ResNet-18) while savings differ by a factor of ten, hence the power.
    """

    Config = CostAwareConfig
    needs_ratios = needs_savings = True

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: RatiosOf) -> dict[str, float]:
        """No ratio is above 1: a unit that is not among the next even so, mostly a late and wide one, is left out."""
        known: dict[str, float] = {}
        seen = replace(context, ratios=known)
        while missing := [n for n in self.choose(context.remaining, candidates, frozen, seen) if n not in known]:
            found = ratios(missing)
            known |= {name: found[name] for name in missing}
        return known

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        if context.savings is None:
            raise ValueError("the cost_aware policy needs the savings of measure_savings, and none were given")
        place = {name: number for number, name in enumerate(context.units)}
        weight = {name: context.ratio(name, 1.0) ** self.config.sharpness for name in candidates}
        savings = BackwardSavings([context.savings[name] for name in context.units])
        now = [place[name] for name in frozen]
        chosen: list[str] = []
        left = list(candidates)
        for _ in range(min(count, len(candidates))):
            # Equal but for rounding is a tie.
            current, total = savings.share(now), 0.0
            alone = {name: savings.share([*now, place[name]]) - current for name in left}
            scores = [(round(weight[name] * saved, 12), name) for name, saved in alone.items()]
            together = list(now)
            for number, name in enumerate(left[: max(count, context.remaining) - len(chosen)], start=1):
                together.append(place[name])
                before, current = current, savings.share(together)
                total += weight[name] * (current - before)
                scores.append((round(total / number, 12), left[0]))
            # max keeps the first of equals, which is the one nearest to the input.
            best = max(scores, key=lambda scored: (scored[0], context.ratio(scored[1], 1.0)))[1]
            now.append(place[best])
            left.remove(best)
            chosen.append(best)
        return chosen


POLICIES: dict[str, type[Policy[Any]]] = {
    "correlation": Correlation,
    "cost_aware": CostAware,
    "ascending": Ascending,
    "random": Random,
    "none": Never,
}
