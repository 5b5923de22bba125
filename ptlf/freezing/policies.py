"""Which units freeze next. To add a policy: a subclass of `Policy`, and a line in `POLICIES`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ptlf.core.errors import unknown
from ptlf.freezing.correlation import Layer, groups, pad, unchanged
from ptlf.freezing.units import Unit


@dataclass(frozen=True)
class Saving:
    """What a unit's backward costs in one step: FLOPs or seconds (the same for all units), and bytes."""

    weight_cost: float  # of its weight gradient: saved as soon as the unit is frozen
    input_cost: float  # of its input gradient: saved when no unit before it is trainable
    bytes: int  # of its input, kept for the weight gradient, and of its norm's


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


Ratios = Callable[[Sequence[str]], dict[str, float]]  # computes them for the units it is given


class Policy:
    needs_ratios: ClassVar[bool] = False
    needs_savings: ClassVar[bool] = False

    def __init__(self, sharpness: float = 8.0) -> None:
        """`sharpness` is for policies that weigh ratios against something else."""
        if not sharpness >= 0:
            raise ValueError(f"sharpness must not be negative, and is {sharpness}")
        self.sharpness = sharpness

    def ratios_needed(
        self, candidates: list[str], frozen: list[str], context: Context, ratios: Ratios
    ) -> dict[str, float]:
        """The ratios that the choice depends on, by unit name."""
        return ratios(candidates)

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        """The next `count` units to freeze, or all candidates if there are fewer, in the order they freeze.

        `candidates` are the units not frozen yet, in data order; `frozen` are those that are.
        """
        raise NotImplementedError


class Correlation(Policy):
    """The paper's: highest ratio first; of equal ratios the unit nearest to the input."""

    needs_ratios = True

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        by_ratio = sorted(candidates, key=lambda name: -context.ratio(name))  # stable: ties stay in data order
        return by_ratio[: at_least_zero(count)]


class Ascending(Policy):
    """From the input upwards."""

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        return candidates[: at_least_zero(count)]


class Random(Policy):
    """Any unit, each as likely as the other, drawn from the context's generator."""

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        if context.generator is None:
            raise ValueError("the random policy draws from the context's generator, and none was given")
        if at_least_zero(count) == 0:
            return []
        device = context.generator.device
        order = torch.randperm(len(candidates), generator=context.generator, device=device).tolist()
        return [candidates[index] for index in order[:count]]


class Never(Policy):
    """Nothing freezes."""

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        return []


class CostAware(Policy):
    """Highest ratio ** sharpness * saving first, one unit after the other.

    The saving of a unit is what `relief` gains by it, given what is frozen already: a unit that lengthens the frozen
    prefix also ends the input gradients behind it. The first units may save little alone and much together, so they
    are also looked at together, as many as there is room for: the first of them freezes if they save more, per unit,
    than any unit alone. Ratios lie close together (0.8 to 1 in a trained ResNet-18) while savings differ by a factor
    of ten, hence the power: 0 looks at savings alone, and a large one at ratios alone.
    """

    needs_ratios = True
    needs_savings = True

    def ratios_needed(
        self, candidates: list[str], frozen: list[str], context: Context, ratios: Ratios
    ) -> dict[str, float]:
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

    def choose(self, count: int, candidates: list[str], frozen: list[str], context: Context) -> list[str]:
        if context.savings is None:
            raise ValueError("the cost_aware policy needs the savings of measure_savings, and none were given")
        chosen: list[str] = []
        for _ in range(min(at_least_zero(count), len(candidates))):
            left = [name for name in candidates if name not in chosen]
            now, room = {*frozen, *chosen}, max(count, context.remaining) - len(chosen)
            scores = [(self.score([name], now, context)[0], name) for name in left]
            scores += [(score, left[0]) for score in self.score(left[:room], now, context)[1:]]
            # max keeps the first of equals, which is the one nearest to the input.
            chosen.append(max(scores, key=lambda scored: (scored[0], context.ratio(scored[1], 1.0)))[1])
        return chosen

    def score(self, names: list[str], frozen: set[str], context: Context) -> list[float]:
        """What the first, the first two, ... of these units save per unit, weighted with their ratios."""
        assert context.savings is not None
        savings, now = [context.savings[name] for name in context.units], set(frozen)
        before, total, scores = relief(savings, [name in now for name in context.units]), 0.0, []
        for number, name in enumerate(names, start=1):
            now.add(name)
            after = relief(savings, [other in now for other in context.units])
            total += context.ratio(name, 1.0) ** self.sharpness * (after - before)
            before = after
            scores.append(round(total / number, 12))  # equal but for rounding is a tie
        return scores


def relief(savings: Sequence[Saving], frozen: Sequence[bool]) -> float:
    """Share of the backward that freezing saves, in [0, 1]: the mean of its share of the cost and of the bytes.

    Units in data order. A trainable unit pays for its weight gradient and keeps its bytes. Every unit behind the first
    trainable one pays for its input gradient; that one itself and all before it do not, as nothing needs it.
    Data order stands in for the graph: two branches of a residual block count as if one followed the other, and an
    input that two units share counts for each.
    """
    first = frozen.index(False) if False in frozen else len(frozen)
    weights = [saving.weight_cost for saving in savings]
    inputs = [saving.input_cost for saving in savings]
    cost = sum(weights) + sum(inputs[1:])  # the first unit's input is the data
    saved = sum(weight for weight, off in zip(weights, frozen, strict=True) if off) + sum(inputs[1 : first + 1])
    kept = sum(saving.bytes for saving in savings)
    freed = sum(saving.bytes for saving, off in zip(savings, frozen, strict=True) if off)
    return (saved / cost if cost else 0.0) / 2 + (freed / kept if kept else 0.0) / 2


def measure_savings(
    module: nn.Module, units: Sequence[Unit], example: Tensor, *, by: str = "flops", repeats: int = 5
) -> dict[str, Saving]:
    """Saving by unit name for a step on `example`, from one forward in eval mode; a layer's calls add up.

    "flops" counts, so that a repeated or resumed run decides alike, on any machine. "seconds" times the two gradients
    of each layer on tensors of the shapes, type and layout it meets: nearer to the truth, and different every time.
    """
    if by not in MEASURES:
        raise ValueError(str(unknown("measure of savings", by, MEASURES)))
    measure = MEASURES[by]
    savings = {unit.name: Saving(0, 0, 0) for unit in units}

    def hook_for(unit: Unit) -> Callable[..., None]:
        def hook(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = args[0] if args else kwargs["input"]
            weight, by_input = measure(layer, given, output, repeats)
            kept = sum(
                tensor.numel() * tensor.element_size() for tensor in ([given] if unit.norm is None else [given, output])
            )
            old = savings[unit.name]
            savings[unit.name] = Saving(old.weight_cost + weight, old.input_cost + by_input, old.bytes + kept)

        return hook

    with unchanged(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for part in module.modules():
            part.training = False
        handles = [unit.layer.register_forward_hook(hook_for(unit), with_kwargs=True) for unit in units]
        try:
            module(example)
        finally:
            for handle in handles:
                handle.remove()
    return savings


def flops(layer: Layer, given: Tensor, output: Tensor, repeats: int) -> tuple[int, int]:
    """FLOPs of the weight and of the input gradient: each multiplies every weight once per output position.

    Counted here because torch.utils.flop_counter (2.13) counts the weight gradient of a grouped convolution `groups`
    times.
    """
    channels = layer.weight.shape[0]
    product = 2 * layer.weight.numel() * (output.numel() // channels)
    return product, product


def seconds(layer: Layer, given: Tensor, output: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of the weight and of the input gradient, each the median of `repeats`."""
    weight, gradient = layer.weight.to(output.dtype), torch.randn_like(output)
    given = given.to(output.dtype)
    if isinstance(layer, nn.Linear):
        rows, columns = gradient.flatten(0, -2), given.flatten(0, -2)
        return (
            median_seconds(lambda: rows.mT @ columns, output.device, repeats),
            median_seconds(lambda: rows @ weight, output.device, repeats),
        )
    padded, stride, dilation = pad(layer, given), list(layer.stride), list(layer.dilation)

    def backward(mask: list[bool]) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(
            gradient, padded, weight, None, stride, [0, 0], dilation, False, [0, 0], groups(layer), mask
        )

    return (
        median_seconds(backward([False, True, False]), output.device, repeats),
        median_seconds(backward([True, False, False]), output.device, repeats),
    )


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one warms up


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def at_least_zero(count: int) -> int:
    if count < 0:
        raise ValueError(f"cannot freeze {count} units")
    return count


MEASURES: dict[str, Callable[[Layer, Tensor, Tensor, int], tuple[float, float]]] = {"flops": flops, "seconds": seconds}

POLICIES: dict[str, type[Policy]] = {
    "correlation": Correlation,
    "cost_aware": CostAware,
    "ascending": Ascending,
    "random": Random,
    "none": Never,
}
