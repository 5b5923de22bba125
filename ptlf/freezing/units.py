"""Find the units of any module by tracing a forward pass.

A unit is what freezes: a convolution, linear layer or `nn.MultiheadAttention`, the norm that directly consumes its
output, and parameters of no layer that belong to it: see `Ownership`.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ptlf.freezing.ownership import Ownership
from ptlf.freezing.recording import ForwardRecord, Layer, record_forward, storage, tensors_in

# Frozen, these save no input for backward; the other layers do, as in plain PyTorch.
SPARING = (nn.Conv2d, nn.Linear, nn.MultiheadAttention)
IMAGE_SIZES = (32, 64, 96, 128, 224)


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, its norm and what else freezes with it. `name` is the layer's module path.

    norm: the norm that directly consumes the layer's output.
    extra: further parameters by their full name, each with the module that holds it: of a norm that feeds the layer, a
        layer scale, a class token, a position embedding.
    others: further norms, whose running statistics freeze too.
    """

    name: str
    layer: Layer
    norm: nn.Module | None = None
    norm_name: str | None = None
    extra: Mapping[str, nn.Module] = field(default_factory=dict)
    others: tuple[nn.Module, ...] = ()

    @property
    def weights(self) -> list[Tensor]:
        """The matrices or filter banks that the layer multiplies its inputs with."""
        layer = self.layer
        if not isinstance(layer, nn.MultiheadAttention):
            return [layer.weight]
        inner = [layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        return [*(weight for weight in inner if weight is not None), layer.out_proj.weight]

    def parameters(self) -> list[nn.Parameter]:
        extra = (module._parameters[name.rpartition(".")[2]] for name, module in self.extra.items())
        own = [*self.layer.parameters(), *(self.norm.parameters() if self.norm is not None else ())]
        return [*own, *(parameter for parameter in extra if parameter is not None)]

    @property
    def norms(self) -> list[nn.Module]:
        return [*([self.norm] if self.norm is not None else []), *self.others]


@dataclass(frozen=True, eq=False)
class Relu:
    """A ReLU whose output autograd saves only for the ReLU itself and for the units named in `keepers`."""

    name: str
    module: nn.ReLU
    keepers: frozenset[str]


@dataclass(frozen=True, eq=False)
class Trace:
    """The result of tracing a forward.

    units: in order of first execution.
    foldable: names of the units whose layer's output is used only by its norm, and whose norm has no other input. In
        train mode too, where for example a dropout between them is active.
    relus: those whose output is not saved for backward by any operation outside the units.
    outside: the parameters in no unit, by name, each with the reason.
    """

    units: list[Unit]
    foldable: frozenset[str]
    relus: list[Relu]
    outside: dict[str, str] = field(default_factory=dict)


def trained_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `find_units` whose weights require a gradient."""
    return [unit for unit in find_units(module, example) if all(weight.requires_grad for weight in unit.weights)]


def find_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `module` in order of first execution. Layers that the forward does not execute are left out.

    example: input of the module: a tensor, a tuple of arguments or a dict of keyword arguments. By default images of
    several sizes are tried, or vectors if there is no convolution.
    """
    return trace(module, example).units


def trace(module: nn.Module, example: Any = None) -> Trace:
    """Trace one forward in eval mode and one in train mode. The module is left unchanged."""
    errors = []
    for guess in _guesses(module) if example is None else [example]:
        try:
            record, output = record_forward(module, guess)
        except Exception as error:
            if example is not None:
                raise
            errors.append(f"{tuple(guess.shape)}: {error}".splitlines()[0])
            continue
        seen = _analyse(module, record, output)
        try:
            in_train = (
                _analyse(module, *record_forward(module, guess, train=True)).foldable
                if seen.foldable
                else seen.foldable
            )
        except Exception:
            in_train = frozenset()
        return dataclasses.replace(seen, foldable=seen.foldable & in_train)
    tried = "; ".join(errors) or "no convolution or linear layer to guess from"
    raise ValueError(f"found no input that {type(module).__name__} accepts; pass example=<a batch> ({tried})")


def _guesses(module: nn.Module) -> Iterator[Tensor]:
    parameter = next(module.parameters(), torch.empty(0))
    if (conv := next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)) is not None:
        sizes = [(size, size) for size in IMAGE_SIZES]
        declared = getattr(getattr(module, "config", module), "image_size", None)
        if isinstance(declared, int):
            sizes.insert(0, (declared, declared))
        elif isinstance(declared, Sequence) and len(declared) == 2:
            sizes.insert(0, (declared[0], declared[1]))
        for height, width in sizes:
            yield parameter.new_zeros(2, conv.in_channels, height, width)
    if (linear := next((m for m in module.modules() if isinstance(m, nn.Linear)), None)) is not None:
        yield parameter.new_zeros(2, linear.in_features)


def _analyse(module: nn.Module, record: ForwardRecord, output: Any) -> Trace:
    names: dict[nn.Module | None, str] = {m: name for name, m in module.named_modules()}
    norm_of: dict[nn.Module, nn.Module] = {}
    for norm, calls in record.norms.items():
        if (first := calls[0][0]) is not None:
            norm_of.setdefault(first.layer, norm)
    units = [Unit(names[m], m, norm_of.get(m), names.get(norm_of.get(m))) for m in record.layers]
    unit_names: dict[nn.Module | None, str] = {unit.layer: unit.name for unit in units}
    uses = _uses(output)
    foldable = frozenset(unit.name for unit in units if _feeds_only_its_norm(unit, record, uses))
    relus = []
    for relu, storages in record.relus.items():
        keepers = set().union(*(record.keepers.get(storage, set()) for storage in storages))
        if all(keeper in unit_names and isinstance(keeper, SPARING) for keeper in keepers):
            relus.append(Relu(names[relu], relu, frozenset(unit_names[keeper] for keeper in keepers)))
    units, outside = _with_extras(
        module, record, units, Ownership(record, {unit.name: unit.layer for unit in units}, output)
    )
    return Trace(units, foldable, relus, outside)


def _with_extras(
    module: nn.Module, record: ForwardRecord, units: list[Unit], graph: "Ownership"
) -> tuple[list[Unit], dict[str, str]]:
    """The units with the parameters and norms that belong to none of their layers, and the parameters left over."""
    owned = {parameter for unit in units for parameter in unit.parameters()}
    extra: dict[int, dict[str, nn.Module]] = defaultdict(dict)
    others: dict[int, list[nn.Module]] = defaultdict(list)
    outside = {}
    for path, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            if parameter in owned:
                continue
            name = f"{path}.{key}" if path else key
            owner = graph.owner_of_parameter(parameter, path)
            if owner is not None:
                extra[owner][name] = part
            elif parameter not in graph.leaves:
                outside[name] = "no output of the forward depends on it"
            else:
                outside[name] = "the forward has no convolution, linear layer or attention to freeze it with"
    taken = {unit.norm for unit in units}
    for path, part in module.named_modules():
        if part in record.norms and part not in taken:
            node = record.norms[part][0][1]
            owner = None if node is None or node not in graph.consumers else graph.owner_of_result(node, path)
            if owner is not None:
                others[owner].append(part)
    changed = [dataclasses.replace(u, extra=extra[i], others=tuple(others[i])) for i, u in enumerate(units)]
    return changed, outside


def _uses(output: Any) -> Counter[Node]:
    """How often the result of each node is used, by other nodes or as an output of the module."""
    waiting = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    uses: Counter[Node] = Counter(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None:
                if node not in uses:
                    waiting.append(node)
                uses[node] += 1
    return uses


def _feeds_only_its_norm(unit: Unit, record: ForwardRecord, uses: Mapping[Node, int]) -> bool:
    if unit.norm is None:
        return False
    calls = record.layers[unit.layer]
    consumed = [call for call, _ in record.norms[unit.norm]]
    # On (B, L, features) the channels of a BatchNorm1d are L, not the layer's outputs, so it cannot be folded.
    if isinstance(unit.layer, nn.Linear) and any(call.output.ndim != 2 for call in calls):
        return False
    norm_is_used = all(node is not None and uses[node] > 0 for _, node in record.norms[unit.norm])
    used_once = all(call.node is not None and uses[call.node] == 1 for call in calls)
    same_calls = len(calls) == len(consumed) and all(a is b for a, b in zip(calls, consumed, strict=True))
    read_by = set().union(*(record.readers[storage(call.output)] for call in calls))
    return norm_is_used and used_once and same_calls and read_by <= {unit.norm}
