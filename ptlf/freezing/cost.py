"""What a training step costs, or would cost with other units frozen, and what each unit saves."""

import copy
import functools
import gc
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ptlf.freezing.recording import Convolution, arguments, same_randomness, storage, tensors_in, unchanged
from ptlf.freezing.subspace import TRANSPOSED, Part, Projection, parts, watched
from ptlf.freezing.units import Unit

Loss = Callable[[Any], Tensor]  # of the module's output
Cost = Callable[..., "CostEstimate"]  # of a step with the units of these names frozen too
Result = TypeVar("Result")
Shape = Sequence[int]
SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def kept_bytes(function: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd holds for backward once `function` has returned its loss. Every storage counts once, in full.

    exclude: tensors that exist anyway, such as parameters, buffers and a freezer's folded weights.
    """
    saved: list[weakref.ref[Tensor]] = []  # what the graph lets go of before the end does not count

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor := tensor.detach()))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()  # holds the graph
    alive = [tensor for reference in saved if (tensor := reference()) is not None]
    storages = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in alive}
    for tensor in exclude:
        storages.pop(storage(tensor), None)
    del result
    return sum(storages.values())


def backward_flops(loss: Tensor, inputs: Sequence[Tensor] | None = None) -> int:
    """FLOPs (two per multiply-add) of a backward, which is run: to all leaves or, without accumulating, to `inputs`."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        if inputs is None:
            loss.backward()
        else:
            torch.autograd.grad(loss, inputs, allow_unused=True)
    return counter.get_total_flops()


def _convolution_backward_flops(gradient: Shape, images: Shape, weight: Shape, *settings: Any, **_: Any) -> int:
    """Each wanted gradient multiplies every weight once per image and output (transposed: input) position."""
    transposed, wanted = settings[-4], settings[-1]  # wanted: the gradients of input, weight and bias
    batch, _channels, *positions = images if transposed else gradient
    return 2 * prod(weight) * batch * prod(positions) * sum(wanted[:2])


# What torch.utils.flop_counter (2.13) counts wrongly: it takes the weight gradient of a grouped convolution `groups`
# times, and does not know the attention kernel of a CPU. Its forward runs in backward where blocks are checkpointed.
FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}


@dataclass(frozen=True)
class CostEstimate:
    """Bytes and FLOPs of one training step. Work space of kernels and intermediate gradients are not in it."""

    kept_bytes: int  # activation memory: what autograd saves for backward
    backward_flops: int
    gradient_bytes: int  # of the parameters that train
    optimizer_bytes: int  # state after the first step
    held_bytes: int  # parameters, buffers, folded weights

    @property
    def bytes(self) -> int:
        """All together, at the end of the forward."""
        return self.kept_bytes + self.gradient_bytes + self.optimizer_bytes + self.held_bytes


@dataclass(frozen=True)
class Estimate:
    """What a step costs now, and if the units in `names` were frozen too."""

    names: tuple[str, ...]
    current: CostEstimate
    if_frozen: CostEstimate

    def __str__(self) -> str:
        count = f"{len(self.names)} unit{'s' * (len(self.names) != 1)} to freeze"
        lines = [f"{count:<26}{'now':>12}{'frozen':>12}{'saved':>12}"]
        for label, name in (
            ("activation memory", "kept_bytes"),
            ("gradients", "gradient_bytes"),
            ("optimizer state", "optimizer_bytes"),
            ("weights and buffers", "held_bytes"),
            ("together", "bytes"),
            ("backward GFLOPs", "backward_flops"),
        ):
            now, frozen = getattr(self.current, name), getattr(self.if_frozen, name)
            amounts = [format_bytes(n) if "bytes" in name else f"{n / 1e9:.3g}" for n in (now, frozen, now - frozen)]
            lines.append(f"{label:<26}" + "".join(f"{amount:>12}" for amount in amounts))
        return "\n".join(lines)


def step_cost(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    optimized: Sequence[Tensor],
    example: Any,
    folded: Sequence[Tensor] = (),
    loss: Loss | None = None,
    *,
    backward: bool = True,
) -> CostEstimate:
    """Cost of a step on `example`, which is run, in the module's current mode and autocast.

    optimized: what the optimizers know of the parameters that train, of which the module may be a copy.
    loss: by default the sum of all outputs. backward: whether to count its FLOPs.
    """
    held = [*module.parameters(), *module.buffers(), *folded]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    (args, kwargs), total = arguments(example), torch.zeros(())

    def forward() -> Tensor:
        nonlocal total
        output = module(*args, **kwargs)
        results = (tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad)
        total = sum(results, total) if loss is None else loss(output)
        return total

    torch.clear_autocast_cache()  # it must hold no real cast for fake tensors, nor a fake one afterwards
    try:
        with torch.enable_grad():
            kept = kept_bytes(forward, held)
        flops = backward_flops(total, trained) if backward and total.requires_grad and trained else 0
    finally:
        torch.clear_autocast_cache()
    return CostEstimate(
        kept_bytes=kept,
        backward_flops=flops,
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        optimizer_bytes=sum(state_bytes(optimizer, optimized) for optimizer in optimizers),
        held_bytes=sum(tensor.nbytes for tensor in held),
    )


@torch.inference_mode(False)
def on_copy(freezer: Any, example: Any, loss: Loss | None, work: Callable[[Cost], Result]) -> Result:
    """`work` with a function that says what a step costs with the units of some names frozen too.

    The step is that of a copy, on fake tensors, without memory; for real if the forward looks at values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for fakes in (mode, None):
        try:
            with same_randomness(freezer.module):
                result = work(partial(cost_on_copy, freezer, *copied(freezer, example, fakes), loss))
            break
        except Exception:  # fake tensors may raise anything; what is not their fault the real step raises again
            if fakes is None or any(tensor.is_meta for tensor in tensors_in(example)):
                raise
    check_none_left(mode, freezer.module)
    return result


def cost_on_copy(
    freezer: Any, twin: Any, example: Any, loss: Loss | None, names: Sequence[str] = (), *, backward: bool = True
) -> CostEstimate:
    with twin.temporarily_frozen(names):
        pairs = zip(freezer.module.parameters(), twin.module.parameters(), strict=True)
        optimizers = freezer.optimizers, [mine for mine, copied in pairs if copied.requires_grad]
        return step_cost(twin.module, *optimizers, example, twin.folded, loss, backward=backward)


def copied(freezer: Any, example: Any, mode: FakeTensorMode | None) -> tuple[Any, Any]:
    """The freezer with its module, and the example; with a mode, all their tensors are fake."""
    device = next(freezer.module.parameters()).device

    def stand_in(tensor: Tensor) -> Tensor:
        if mode is None:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        with mode:
            return torch.empty_like(tensor, device=device) if tensor.is_meta else mode.from_tensor(tensor)

    tensors = [example] if mode is None else [example, *map(vars, freezer.module.modules()), freezer.folded]
    memo: dict[int, Any] = {id(tensor): stand_in(tensor) for tensor in tensors_in(tensors)}
    for name, part in freezer.module.named_modules():
        own = vars(part).get("forward")
        if isinstance(own, FunctionType) and (own.__closure__ or own.__defaults__):
            raise ValueError(f"the forward of {name!r} is a function that a copy would share; make it a method")
    try:
        return copy.deepcopy((freezer, example), memo | {id(freezer.optimizers): []})
    except TypeError as error:
        raise TypeError(f"an estimate needs a copy of the module, and copy.deepcopy fails: {error}") from error


def check_none_left(mode: FakeTensorMode, module: nn.Module) -> None:
    """Raise if anything still holds a fake tensor of `mode`: training with it would silently do nothing."""
    sources = {type(part).__module__ for part in module.modules()}
    for _ in range(2):
        gc.collect()
        alive = gc.get_objects()
        if not any(type(thing) is FakeTensor and thing.fake_mode is mode for thing in alive):
            return
        for thing in alive:
            if type(thing) is functools._lru_cache_wrapper and thing.__module__ in sources:
                thing.cache_clear()
        del alive
    where = "outside of the module, as in a global variable; it has no values: clear that before you train"
    raise RuntimeError(f"a hook, or code of the module, has kept a tensor of the estimate {where}")


def state_bytes(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Of the state for these parameters. Where there is none yet, a copy of the optimizer makes it for stand-ins."""
    wanted = set(parameters)
    total = sum(tensor.nbytes for parameter in wanted for tensor in tensors_in(optimizer.state.get(parameter, {})))
    for group in optimizer.param_groups:
        new = [parameter for parameter in group["params"] if parameter in wanted and not optimizer.state.get(parameter)]
        if not new:
            continue
        stand_ins = [nn.Parameter(p.new_ones([min(2, n) for n in p.shape])) for p in new]
        for stand_in in stand_ins:
            stand_in.grad = torch.ones_like(stand_in)
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [{**group, "params": stand_ins}]
        twin.step()
        for parameter, stand_in in zip(new, stand_ins, strict=True):
            for tensor in tensors_in(twin.state[stand_in]):
                alike = tensor.shape == stand_in.shape
                total += tensor.element_size() * parameter.numel() if alike else tensor.nbytes
    return total


@dataclass(frozen=True)
class Saving:
    """What a unit's backward costs in one step, in FLOPs and bytes."""

    weight_cost: float  # of its weight gradient: saved as soon as the unit is frozen
    input_cost: float  # of its input gradient: saved when no unit before it is trainable
    bytes: int  # of its input, kept for the weight gradient, and of its norm's


class BackwardSavings:
    """Share of the backward that freezing saves, in [0, 1]: the mean of its share of the cost and of the bytes.

    Units in data order. A trainable unit pays for its weight gradient and keeps its bytes. Every unit behind the first
    trainable one pays for its input gradient.
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


def parse_bytes(text: str | int) -> int:
    """12884901888, "12GiB", "500 MB" or "2g" (of 10^9) as a number of bytes."""
    if not isinstance(text, str):
        return int(text)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if found is None or found[2].lower() not in SIZES:
        raise ValueError(f"{text!r} is not an amount of memory; write it as 12GiB, 500MB or a number of bytes")
    return int(float(found[1]) * SIZES[found[2].lower()])


def format_bytes(amount: float) -> str:
    size = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
