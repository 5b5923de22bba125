"""What freezing a unit saves: FLOPs or seconds of its backward, and bytes kept for it."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ptlf.freezing.kernels import pad
from ptlf.freezing.names import unknown_name
from ptlf.freezing.products import TRANSPOSED, Part, Projection, groups, parts, watched
from ptlf.freezing.units import Unit, storage, unchanged


@dataclass(frozen=True)
class Saving:
    """What a unit's backward costs in one step: FLOPs or seconds (the same for all units), and bytes."""

    weight_cost: float  # of its weight gradient: saved as soon as the unit is frozen
    input_cost: float  # of its input gradient: saved when no unit before it is trainable
    bytes: int  # of its input, kept for the weight gradient, and of its norm's


class BackwardSavings:
    """Share of the backward that freezing saves, in [0, 1]: the mean of its share of the cost and of the bytes.

    Units in data order. A trainable unit pays for its weight gradient and keeps its bytes. Every unit behind the first
    trainable one pays for its input gradient; that one itself and all before it do not, as nothing needs it.
    Data order stands in for the graph: two branches of a residual block count as if one followed the other, and an
    input that two units share counts for each.

    `current` is that of the units frozen so far; each further one takes constant time.
    """

    def __init__(self, savings: Sequence[Saving], frozen: Sequence[bool]) -> None:
        self.savings, self.frozen = savings, [*frozen, False]
        off = [saving for saving, is_frozen in zip(savings, frozen, strict=True) if is_frozen]
        self.weights, self.freed = sum(saving.weight_cost for saving in off), sum(saving.bytes for saving in off)
        self.first = self.frozen.index(False)  # place of the first trainable unit; their number if there is none
        # Sum of the input costs up to each place; the first unit's input is the data.
        self.inputs = list(itertools.accumulate((saving.input_cost for saving in savings[1:]), initial=0))
        self.cost = sum(saving.weight_cost for saving in savings) + self.inputs[-1]
        self.kept = sum(saving.bytes for saving in savings)
        self.current = self._share(self.weights, self.freed, self.first)

    def if_frozen(self, place: int) -> float:
        """With the trainable unit at this place frozen too."""
        unit = self.savings[place]
        return self._share(self.weights + unit.weight_cost, self.freed + unit.bytes, self._first(place))

    def freeze(self, place: int) -> None:
        self.current, self.first = self.if_frozen(place), self._first(place)
        self.weights += self.savings[place].weight_cost
        self.freed += self.savings[place].bytes
        self.frozen[place] = True

    def copy(self) -> "BackwardSavings":
        made = copy.copy(self)
        made.frozen = list(self.frozen)
        return made

    def _first(self, place: int) -> int:
        return self.frozen.index(False, place + 1) if place == self.first else self.first

    def _share(self, weights: float, freed: int, first: int) -> float:
        saved = weights + self.inputs[min(first, len(self.inputs) - 1)]
        return (saved / self.cost if self.cost else 0.0) / 2 + (freed / self.kept if self.kept else 0.0) / 2


def measure_savings(
    module: nn.Module, units: Sequence[Unit], example: Tensor, *, by: str = "flops", repeats: int = 5
) -> dict[str, Saving]:
    """Saving by unit name for a step on `example`, from one forward in eval mode; a layer's calls add up.

    "flops" counts, so that a repeated or resumed run decides alike, on any machine. "seconds" times the two gradients
    of each layer on tensors of the shapes, type and layout it meets: nearer to the truth, and different every time.
    """
    if by not in MEASURES:
        raise ValueError(unknown_name("measure of savings", by, MEASURES))
    savings = {unit.name: Saving(0, 0, 0) for unit in units}

    def add(unit: Unit, given: list[Tensor], output: Tensor) -> None:
        total = savings[unit.name]
        costs = [MEASURES[by](part, x, output, repeats) for part, x in zip(parts(unit.layer), given, strict=True)]
        kept = sum(storages(given).values()) + (output.nbytes if unit.norm is not None else 0)
        by_weight, by_input = (sum(some) for some in zip(*costs, strict=True))
        savings[unit.name] = Saving(total.weight_cost + by_weight, total.input_cost + by_input, total.bytes + kept)

    with unchanged(module), torch.no_grad(), watched(module, units, add):
        module(example)
    return savings


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes by storage: query, key and value may be one tensor."""
    return {storage(tensor): tensor.nbytes for tensor in tensors}


def flops(part: Part, given: Tensor, output: Tensor, repeats: int) -> tuple[int, int]:
    """FLOPs of the weight and of the input gradient: each multiplies every weight once per output position (of a
    transposed convolution, once per input position).

    From shapes, because by unit; `kept.count_flops` counts a whole backward by the same rule.
    """
    if isinstance(part, Projection):
        product = 2 * part.rows * given.numel()
    else:
        positions = (given if isinstance(part, TRANSPOSED) else output).numel() // part.weight.shape[0]
        product = 2 * part.weight.numel() * positions
    return product, product


def seconds(part: Part, given: Tensor, output: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of the weight and of the input gradient, each the median of `repeats`."""
    weight, given = part.weight.to(output.dtype), given.to(output.dtype)
    by_weight: Callable[[], object]
    by_input: Callable[[], object]
    if isinstance(part, nn.Linear | Projection):
        if isinstance(part, Projection):
            weight = weight[part.first : part.first + part.rows]
        columns = given.flatten(0, -2)
        rows = torch.randn(len(columns), len(weight), dtype=output.dtype, device=output.device)
        by_weight, by_input = lambda: rows.mT @ columns, lambda: rows @ weight
    else:
        transposed, gradient, none = isinstance(part, TRANSPOSED), torch.randn_like(output), [0] * len(part.stride)
        padding = list(part.padding) if transposed else none
        settings = (
            list(part.stride),
            padding,
            list(part.dilation),
            transposed,
            list(part.output_padding),
            groups(part),
        )
        images = given if transposed else pad(part, given)
        backward = partial(torch.ops.aten.convolution_backward, gradient, images, weight, None, *settings)
        by_weight, by_input = (partial(backward, mask) for mask in ([False, True, False], [True, False, False]))
    return median_seconds(by_weight, output.device, repeats), median_seconds(by_input, output.device, repeats)


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


MEASURES: dict[str, Callable[[Part, Tensor, Tensor, int], tuple[float, float]]] = {"flops": flops, "seconds": seconds}
