"""Policies by name. To add one: a subclass of `Policy`, and a line in `POLICIES`."""

from dataclasses import dataclass, replace

import torch

from ptlf.core.registry import Registry
from ptlf.core.settings import key
from ptlf.freezing.policy import Context, Names, Policy, PolicyConfig, Ratios, at_least_zero
from ptlf.freezing.savings import Relief


class Correlation(Policy):
    """The paper's: highest ratio first; of equal ratios the unit nearest to the input."""

    needs_ratios = looks_at_all = True

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: Ratios) -> dict[str, float]:
        """Without those below the bounds that cannot be among the next."""
        bounds = ratios.bounds(candidates)
        known = ratios([name for name in candidates if name not in bounds])
        highest = sorted(known.values(), reverse=True)[: context.remaining]
        least = highest[-1] if len(highest) == context.remaining > 0 else 0.0
        return known | ratios([name for name in candidates if bounds.get(name, -1.0) >= least])

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        """Units without a ratio come last, see `ratios_needed`; one that would be chosen is an error."""
        known = context.ratios or {}
        by_ratio = sorted(candidates, key=lambda name: -known.get(name, -1.0))  # stable: ties stay in data order
        return sorted(by_ratio[: at_least_zero(count)], key=lambda name: -context.ratio(name))


class Ascending(Policy):
    """From the input upwards."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return candidates[: at_least_zero(count)]


class Random(Policy):
    """Any unit, each as likely as the other, drawn from the context's generator."""

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        if context.generator is None:
            raise ValueError("the random policy draws from the context's generator, and none was given")
        if at_least_zero(count) == 0:
            return []
        order = torch.randperm(len(candidates), generator=context.generator, device=context.generator.device)
        return [candidates[index] for index in order.tolist()[:count]]


class Never(Policy):
    """Nothing freezes."""

    freezes = False

    def choose(self, count: int, candidates: Names, frozen: Names, context: Context) -> Names:
        return []


@dataclass
class CostAwareConfig(PolicyConfig):
    name: str = "cost_aware"
    sharpness: float = key(8.0, "how much ratios count beside savings; 0 = not at all", ge=0)
    savings: str = key("flops", "what is saved: counted, or timed here", choices=("flops", "seconds"))


class CostAware(Policy):
    """Highest ratio ** sharpness * saving first, one unit after the other.

    The saving of a unit is what `Relief` gains by it, given what is frozen already: a unit that lengthens the frozen
    prefix also ends the input gradients behind it. The first units may save little alone and much together, so they
    are also looked at together, as many as there is room for: the first of them freezes if they save more, per unit,
    than any unit alone. Ratios lie close together (0.8 to 1 in a trained ResNet-18) while savings differ by a factor
    of ten, hence the power: 0 looks at savings alone, and a large one at ratios alone.
    """

    Config = CostAwareConfig
    needs_ratios = True

    def __init__(self, config: CostAwareConfig | None = None) -> None:
        super().__init__(config)
        if not self.config.sharpness >= 0:
            raise ValueError(f"sharpness must not be negative, and is {self.config.sharpness}")
        self.savings_by = self.config.savings

    def ratios_needed(self, candidates: Names, frozen: Names, context: Context, ratios: Ratios) -> dict[str, float]:
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
        now = Relief([context.savings[name] for name in context.units], [name in already for name in context.units])
        chosen: list[str] = []
        left = list(candidates)
        for _ in range(min(at_least_zero(count), len(candidates))):
            # Equal but for rounding is a tie.
            scores = [(round(weight[name] * (now.then(place[name]) - now.now), 12), name) for name in left]
            together, total = now.copy(), 0.0
            for number, name in enumerate(left[: max(count, context.remaining) - len(chosen)], start=1):
                before = together.now
                together.freeze(place[name])
                total += weight[name] * (together.now - before)
                scores.append((round(total / number, 12), left[0]))
            # max keeps the first of equals, which is the one nearest to the input.
            best = max(scores, key=lambda scored: (scored[0], context.ratio(scored[1], 1.0)))[1]
            now.freeze(place[best])
            left.remove(best)
            chosen.append(best)
        return chosen


MEMBERS = {
    "correlation": Correlation,
    "cost_aware": CostAware,
    "ascending": Ascending,
    "random": Random,
    "none": Never,
}
POLICIES: Registry[type[Policy]] = Registry("freezing policy", "ptlf.policies", Policy, MEMBERS)
