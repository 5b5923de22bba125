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

from ptlf.freezing.cost import count_flops
from ptlf.freezing.kernels import pad
from ptlf.freezing.names import unknown_name
from ptlf.freezing.products import TRANSPOSED, Part, Projection, parts, watched
from ptlf.freezing.recording import storage, unchanged
from ptlf.freezing.units import Unit

BY = ("flops", "seconds")


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
    if by not in BY:
        raise ValueError(unknown_name("measure of savings", by, BY))
    savings = {unit.name: Saving(0, 0, 0) for unit in units}
    measure = count_flops if by == "flops" else partial(median_seconds, device=example.device, repeats=repeats)

    def add(unit: Unit, given: list[Tensor], output: Tensor) -> None:
        total = savings[unit.name]
        weight_cost, input_cost = total.weight_cost, total.input_cost
        for part, x in zip(parts(unit.layer), given, strict=True):
            by_weight, by_input = product_gradients(part, x, output if by == "seconds" else output.to("meta"))
            weight_cost += measure(by_weight)
            input_cost += measure(by_input)
        inputs = {storage(tensor): tensor.nbytes for tensor in given}  # query, key and value may be one tensor
        kept = sum(inputs.values()) + (output.nbytes if unit.norm is not None else 0)
        savings[unit.name] = Saving(weight_cost, input_cost, total.bytes + kept)

    with unchanged(module), torch.no_grad(), watched(module, units, add):
        module(example)
    return savings


def product_gradients(part: Part, given: Tensor, output: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Functions that compute the weight gradient and the input gradient of a product with tensors of these shapes, in
    the type and on the device of `output`."""
    weight, given = part.weight.to(output), given.to(output)
    if isinstance(part, nn.Linear | Projection):
        if isinstance(part, Projection):
            weight = weight[part.first : part.first + part.rows]
        columns = given.flatten(0, -2)
        rows = torch.randn(len(columns), len(weight), dtype=output.dtype, device=output.device)
        return lambda: rows.mT @ columns, lambda: rows @ weight
    transposed, gradient = isinstance(part, TRANSPOSED), torch.randn_like(output)
    images, padding = (given, list(part.padding)) if transposed else (pad(part, given), [0] * len(part.stride))
    geometry = list(part.stride), padding, list(part.dilation), transposed, list(part.output_padding), part.groups
    backward = partial(torch.ops.aten.convolution_backward, gradient, images, weight, None, *geometry)
    return partial(backward, [False, True, False]), partial(backward, [True, False, False])


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
