"""The policies that ship with the library, by name."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ptlf.freezing.policy import Context, Names, Policy, PolicyConfig, RatiosOf, at_least_zero, setting
from ptlf.freezing.savings import BackwardSavings


class Correlation(Policy[PolicyConfig]):
    """The paper's: highest ratio first; of equal ratios the unit nearest to the input."""

    needs_ratios = True

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        by_ratio = sorted(candidates, key=lambda name: -context.ratio(name))  # stable: ties stay in data order
        return by_ratio[: at_least_zero(count)]


class Ascending(Policy[PolicyConfig]):
    """From the input upwards."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return candidates[: at_least_zero(count)]


class Random(Policy[PolicyConfig]):
    """Any unit, each as likely as the other, drawn from the context's generator."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        if context.generator is None:
            raise ValueError("the random policy draws from the context's generator, and none was given")
        if at_least_zero(count) == 0:
            return []
        order = torch.randperm(len(candidates), generator=context.generator, device=context.generator.device)
        return [candidates[index] for index in order.tolist()[:count]]


class Never(Policy[PolicyConfig]):
    """Nothing freezes."""

    freezes = False

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return []


@dataclass
class CostAwareConfig(PolicyConfig):
    name: str = "cost_aware"
    sharpness: float = setting(8.0, "how much ratios count beside savings; 0 = not at all", ge=0)
    savings: str = setting("flops", "what is saved: counted, or timed here", choices=("flops", "seconds"))


class CostAware(Policy[CostAwareConfig]):
    """Highest ratio ** sharpness * saving first, one unit after the other.

    The saving of a unit is what `BackwardSavings` gains by it, given what is frozen already: a unit that lengthens the
    frozen prefix also ends the input gradients behind it. The first units may save little alone and much together, so
    they are also looked at together, as many as there is room for: the first of them freezes if they save more, per
    unit, than any unit alone. Ratios lie close together (0.8 to 1 in a trained ResNet-18) while savings differ by a
    factor of ten, hence the power: 0 looks at savings alone, and a large one at ratios alone.
    """

    Config = CostAwareConfig
    needs_ratios = True

    def __init__(self, config: CostAwareConfig | None = None) -> None:
        super().__init__(config)
        if not self.config.sharpness >= 0:
            raise ValueError(f"sharpness must not be negative, and is {self.config.sharpness}")
        self.savings_by = self.config.savings

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: RatiosOf) -> dict[str, float]:
        """No ratio is above 1: a unit that is not among the next even so need not be looked at. Those left out are
        mostly the last and widest ones, whose ratios take the longest and which save the least."""
        known: dict[str, float] = {}
        while True:
            plan = self.choose(context.remaining, candidates, frozen, replace(context, ratios=known))
            missing = [name for name in plan if name not in known]
            if not missing:
                return known
            found = ratios(missing)
            known |= {name: found[name] for name in missing}

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        if context.savings is None:
            raise ValueError("the cost_aware policy needs the savings of measure_savings, and none were given")
        place = {name: number for number, name in enumerate(context.units)}
        weight = {name: context.ratio(name, 1.0) ** self.config.sharpness for name in candidates}
        already = set(frozen)
        now = BackwardSavings(
            [context.savings[name] for name in context.units], [name in already for name in context.units]
        )
        chosen: list[str] = []
        left = list(candidates)
        for _ in range(min(at_least_zero(count), len(candidates))):
            # Equal but for rounding is a tie.
            scores = [(round(weight[name] * (now.if_frozen(place[name]) - now.current), 12), name) for name in left]
            together, total = now.copy(), 0.0
            for number, name in enumerate(left[: max(count, context.remaining) - len(chosen)], start=1):
                before = together.current
                together.freeze(place[name])
                total += weight[name] * (together.current - before)
                scores.append((round(total / number, 12), left[0]))
            # max keeps the first of equals, which is the one nearest to the input.
            best = max(scores, key=lambda scored: (scored[0], context.ratio(scored[1], 1.0)))[1]
            now.freeze(place[best])
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
