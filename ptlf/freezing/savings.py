"""What freezing a unit saves: FLOPs of its backward, and bytes kept for it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.freezing.recording import Convolution, storage, unchanged
from ptlf.freezing.subspace import TRANSPOSED, Part, Projection, parts, watched
from ptlf.freezing.units import Unit


@dataclass(frozen=True)
class Saving:
    """What a unit's backward costs in one step, in FLOPs and bytes."""

    weight_cost: float  # of its weight gradient: saved as soon as the unit is frozen
    input_cost: float  # of its input gradient: saved when no unit before it is trainable
    bytes: int  # of its input, kept for the weight gradient, and of its norm's


class BackwardSavings:
    """Share of the backward that freezing saves, in [0, 1]: the mean of its share of the cost and of the bytes.

    Units in data order, which stands in for the graph. A trainable unit pays for its weight gradient and keeps its
    bytes. Every unit behind the first trainable one pays for its input gradient, which nothing before it needs.
    """

    def __init__(self, savings: Sequence[Saving]) -> None:
        self.savings = savings
        # The first unit's input is the data, which needs no gradient.
        self.cost = sum(saving.weight_cost for saving in savings) + sum(saving.input_cost for saving in savings[1:])
        self.kept = sum(saving.bytes for saving in savings)

    def share(self, frozen: Collection[int]) -> float:
        """With the units at these places frozen."""
        off = [self.savings[place] for place in sorted(frozen)]
        prefix = next((n for n, place in enumerate(sorted(frozen)) if n != place), len(off))  # units before any trains
        saved = sum(saving.weight_cost for saving in off)
        saved += sum(saving.input_cost for saving in self.savings[1 : prefix + 1])
        freed = sum(saving.bytes for saving in off)
        return (saved / self.cost if self.cost else 0.0) / 2 + (freed / self.kept if self.kept else 0.0) / 2


def measure_savings(module: nn.Module, units: Sequence[Unit], example: Tensor) -> dict[str, Saving]:
    """Saving by unit name for a step on `example`, from one forward in eval mode; a layer's calls add up."""
    savings = {unit.name: Saving(0, 0, 0) for unit in units}

    def add(unit: Unit, given: list[Tensor], output: Tensor) -> None:
        flops = sum(product_flops(part, x, output) for part, x in zip(parts(unit.layer), given, strict=True))
        inputs = {storage(tensor): tensor.nbytes for tensor in given}  # query, key and value may be one tensor
        kept = sum(inputs.values()) + (output.nbytes if unit.norm is not None else 0)
        total = savings[unit.name]
        savings[unit.name] = Saving(total.weight_cost + flops, total.input_cost + flops, total.bytes + kept)

    with unchanged(module), torch.no_grad(), watched(module, units, add):
        module(example)
    return savings


def product_flops(part: Part, given: Tensor, output: Tensor) -> int:
    """Of the gradient of the weight, and as many of that of the input: each weight once per image and position."""
    if isinstance(part, Convolution) and not isinstance(part, TRANSPOSED):
        return 2 * part.weight.numel() * (output.numel() // part.out_channels)
    if isinstance(part, TRANSPOSED):
        return 2 * part.weight.numel() * (given.numel() // part.in_channels)
    return 2 * given.numel() * (part.rows if isinstance(part, Projection) else part.out_features)
