"""What freezing a unit saves: FLOPs or seconds of its backward, and bytes kept for it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ptlf.core.errors import unknown
from ptlf.freezing.kernels import pad
from ptlf.freezing.products import TRANSPOSED, Part, Projection, groups, parts, watched
from ptlf.freezing.units import Unit, storage, unchanged


@dataclass(frozen=True)
class Saving:
    """What a unit's backward costs in one step: FLOPs or seconds (the same for all units), and bytes."""

    weight_cost: float  # of its weight gradient: saved as soon as the unit is frozen
    input_cost: float  # of its input gradient: saved when no unit before it is trainable
    bytes: int  # of its input, kept for the weight gradient, and of its norm's


def relief(savings: Sequence[Saving], frozen: Sequence[bool]) -> float:
    """Share of the backward that freezing saves, in [0, 1]: the mean of its share of the cost and of the bytes.

    Units in data order. A trainable unit pays for its weight gradient and keeps its bytes. Every unit behind the first
    trainable one pays for its input gradient; that one itself and all before it do not, as nothing needs it.
    Data order stands in for the graph: two branches of a residual block count as if one followed the other, and an
    input that two units share counts for each.
    """
    first = frozen.index(False) if False in frozen else len(frozen)
    off = [saving for saving, is_frozen in zip(savings, frozen, strict=True) if is_frozen]
    inputs = [saving.input_cost for saving in savings]
    cost = sum(saving.weight_cost for saving in savings) + sum(inputs[1:])  # the first unit's input is the data
    saved = sum(saving.weight_cost for saving in off) + sum(inputs[1 : first + 1])
    kept, freed = (sum(saving.bytes for saving in some) for some in (savings, off))
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

    Counted here because torch.utils.flop_counter (2.13) counts the weight gradient of a grouped convolution `groups`
    times.
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
