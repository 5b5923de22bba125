"""Find the units of any module by tracing a forward pass.

A unit is what freezes: a convolution, linear layer or `nn.MultiheadAttention`, the norm that directly consumes its
output, and parameters of no layer that belong to it: see `Ownership`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from ptlf.freezing.recording import ForwardRecord, Layer, record_forward, storage, tensors_in

# Frozen, these save no input for backward; the other layers do, as in plain PyTorch.
SPARING = (nn.Conv2d, nn.Linear, nn.MultiheadAttention)
IMAGE_SIZES = (32, 64, 96, 128, 224)


@dataclass(eq=False)
class Unit:
    """A layer, its norm and what else freezes with it, such as a norm before it, a layer scale or a class token."""

    name: str  # path of the layer
    layer: Layer
    norm: nn.Module | None = None  # that directly consumes the layer's output
    norm_name: str | None = None
    extra: dict[str, nn.Module] = field(default_factory=dict)  # the modules of further parameters, by their full name
    others: list[nn.Module] = field(default_factory=list)  # further norms, whose running statistics freeze too

    @property
    def weights(self) -> list[Tensor]:
        """The matrices or filter banks that the layer multiplies its inputs with."""
        layer = self.layer
        if not isinstance(layer, nn.MultiheadAttention):
            return [layer.weight]
        inner = [layer.in_proj_weight, layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        return [*(weight for weight in inner if weight is not None), layer.out_proj.weight]

    def places(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold the parameters, and the parameters' names there."""
        modules = [*self.layer.modules(), *(self.norm.modules() if self.norm is not None else ())]
        own = [(module, key) for module in modules for key in module._parameters]
        return [*own, *((module, name.rpartition(".")[2]) for name, module in self.extra.items())]

    def parameters(self) -> list[nn.Parameter]:
        held = [module._parameters.get(key) for module, key in self.places()]
        return list(dict.fromkeys(parameter for parameter in held if parameter is not None))

    @property
    def norms(self) -> list[nn.Module]:
        return [*([self.norm] if self.norm is not None else []), *self.others]


@dataclass
class Trace:
    """The result of tracing a forward.

    foldable: names of the units whose layer's output is used only by its norm, and whose norm has no other input, in
        train mode too. relus: those whose output only units save for backward, with the names of these.
    """

    units: list[Unit]  # in order of first execution
    foldable: set[str] = field(default_factory=set)
    relus: dict[nn.ReLU, set[str]] = field(default_factory=dict)


def trained_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `find_units` whose weights require a gradient."""
    return [unit for unit in find_units(module, example) if all(weight.requires_grad for weight in unit.weights)]


def find_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `module` in order of first execution. Layers that the forward does not execute are left out.

    example: a tensor, a tuple of arguments or a dict of keyword arguments. By default several inputs are tried.
    """
    return trace(module, example).units


def trace(module: nn.Module, example: Any = None) -> Trace:
    """Trace one forward in eval mode and one in train mode. The module is left unchanged."""
    errors = []
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(f"{type(module).__name__} has lazy layers without weights yet; run one forward first")
    for guess in _guesses(module) if example is None else [example]:
        try:
            record, output = record_forward(module, guess)
        except Exception as error:  # a forward may raise anything
            if example is not None:
                raise
            errors.append(f"{tuple(guess.shape)}: {error}".splitlines()[0])
            continue
        seen, in_train_mode = _analyse(module, record, output), None
        with contextlib.suppress(Exception):  # in train mode it may ask for more, such as targets
            in_train_mode = record_forward(module, guess, train=True) if seen.foldable else None
        seen.foldable &= set() if in_train_mode is None else _analyse(module, *in_train_mode).foldable
        return seen
    tried = "; ".join(errors) or "no convolution or linear layer to guess from"
    raise ValueError(f"found no input that {type(module).__name__} accepts; pass example=<a batch> ({tried})")


def _guesses(module: nn.Module) -> Iterator[Tensor]:
    parameter = next(module.parameters(), torch.empty(0))
    if (conv := next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)) is not None:
        declared = getattr(getattr(module, "config", module), "image_size", None)
        for size in [*([declared] if isinstance(declared, int) else []), *IMAGE_SIZES]:
            yield parameter.new_zeros(2, conv.in_channels, size, size)
    if (linear := next((m for m in module.modules() if isinstance(m, nn.Linear)), None)) is not None:
        yield parameter.new_zeros(2, linear.in_features)


def _analyse(module: nn.Module, record: ForwardRecord, output: Any) -> Trace:
    names: dict[nn.Module | None, str] = {part: name for name, part in module.named_modules()}
    norm_of: dict[nn.Module, nn.Module] = {}
    for norm, calls in record.norms.items():
        if (first := calls[0][0]) is not None:
            norm_of.setdefault(first.layer, norm)
    units = [Unit(names[m], m, norm_of.get(m), names.get(norm_of.get(m))) for m in record.layers]
    graph = Ownership(record, units, output)
    seen = Trace(units, {unit.name for unit in units if _feeds_only_its_norm(unit, record, graph, module)})
    for relu, storages in record.relus.items():
        keepers = set().union(*(record.keepers.get(storage, set()) for storage in storages))
        if all(keeper in record.layers and isinstance(keeper, SPARING) for keeper in keepers):
            seen.relus[relu] = {names[keeper] for keeper in keepers}
    # The parameters and norms that belong to none of the layers.
    owned = {parameter for unit in units for parameter in unit.parameters()}
    for path, part in module.named_modules():
        for key, parameter in part.named_parameters(path, recurse=False):
            owner = None if parameter in owned else graph.owner_of_parameter(parameter, path)
            if owner is not None:
                units[owner].extra[key] = part
                if part not in [*units[owner].others, *record.norms] and keeps_statistics(part):
                    units[owner].others.append(part)
        if part in record.norms and part not in norm_of.values():
            node = record.norms[part][0][1]
            owner = None if node is None or node not in graph.consumers else graph.owner_of_result(node, path)
            if owner is not None:
                units[owner].others.append(part)
    return seen


def _feeds_only_its_norm(unit: Unit, record: ForwardRecord, graph: "Ownership", root: nn.Module) -> bool:
    if unit.norm is None or unit.norm_name is None:
        return False
    for norm in root.get_submodule(unit.norm_name.rpartition(".")[0]).children():
        # Which of two such norms runs may depend on the step or the domain.
        if type(norm) is type(unit.norm) and norm not in record.norms and norm.extra_repr() == unit.norm.extra_repr():
            return False
    calls = record.layers[unit.layer]
    consumed = [call for call, _ in record.norms[unit.norm]]
    # On (B, L, features) the channels of a BatchNorm1d are L, not the layer's outputs, so it cannot be folded.
    if isinstance(unit.layer, nn.Linear) and any(call.output.ndim != 2 for call in calls):
        return False
    norm_is_used = all(graph.uses(node) > 0 for _, node in record.norms[unit.norm])
    used_once = all(graph.uses(call.node) == 1 for call in calls)
    read_by = set().union(*(record.readers[storage(call.output)] for call in calls))
    return norm_is_used and used_once and calls == consumed and read_by <= {unit.norm}


def keeps_statistics(part: nn.Module) -> bool:
    """Whether it looks like a norm of the user's own."""
    return not part._modules and any(b is not None and b.is_floating_point() for b in part._buffers.values())


class Ownership:
    """The autograd graph of a forward, to find the unit that a parameter of no layer belongs to.

    The parameter is followed to the first operation that joins it with data. If the result goes to layers only, and the
    next one is nearer in the module tree than the last one (or as near, and the data go past the operation too), it
    belongs to the next, as a norm before it does; else to the last, as layer scale does. Of several the first counts.
    """

    def __init__(self, record: ForwardRecord, units: Sequence[Unit], output: Any) -> None:
        self.paths = [unit.name.split(".") for unit in units]
        self.outputs = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        self.unit_at: dict[Node, int] = {}  # operations inside a layer
        for index, unit in enumerate(units):
            for call in record.layers[unit.layer]:
                waiting = [call.node] if call.node is not None and call.node not in call.inputs else []
                while waiting:
                    node = waiting.pop()
                    if node not in self.unit_at and not is_leaf(node):
                        self.unit_at[node] = index
                        waiting += [before for before in node_inputs(node) if before not in call.inputs]
        self.consumers: dict[Node, list[Node]] = {node: [] for node in self.outputs}
        self.leaves: dict[Tensor, Node] = {}
        waiting = list(self.outputs)
        while waiting:
            node = waiting.pop()
            if is_leaf(node):
                self.leaves[node.variable] = node  # type: ignore[attr-defined]
            for before in node_inputs(node):
                if before not in self.consumers:
                    self.consumers[before] = []
                    waiting.append(before)
                self.consumers[before].append(node)
        bare = {node for leaf, node in self.leaves.items() if isinstance(leaf, nn.Parameter)}
        # An operation comes after those it depends on.
        self.inner = sorted((n for n in self.consumers if not is_leaf(n)), key=lambda n: n._sequence_nr())  # type: ignore[attr-defined]
        leaves = list(self.leaves.values())
        self.has_data = {node: node not in bare for node in leaves}
        self.last_before = dict.fromkeys(leaves, -1)  # greatest index of a unit that the result depends on
        for node in self.inner:
            given, own = node_inputs(node), self.unit_at.get(node, -1)
            self.has_data[node] = own >= 0 or any(self.has_data[before] for before in given)
            self.last_before[node] = max([own, *(self.last_before[before] for before in given)])
        self.next_after: dict[Node, int] = {}  # least index of a unit that depends on the result
        for node in [*reversed(self.inner), *leaves]:
            after = (min(self.unit_at.get(user, len(units)), self.next_after[user]) for user in self.consumers[node])
            self.next_after[node] = min(after, default=len(units))

    def uses(self, node: Node | None) -> int:
        """How often the result of the node is used, by other nodes or as an output of the module."""
        return 0 if node is None else len(self.consumers.get(node, ())) + (node in self.outputs)

    def owner_of_parameter(self, parameter: Tensor, path: str) -> int | None:
        """Index of the unit; `path` is that of the module that holds the parameter."""
        waiting = [self.leaves[parameter]] if parameter in self.leaves else []
        seen: set[Node] = set(waiting)
        owners: set[int | None] = set()
        while waiting:
            for user in self.consumers[waiting.pop()]:
                if user in self.unit_at:
                    owners.add(self.unit_at[user])
                elif self.has_data[user]:
                    owners.add(self.owner_of_result(user, path))
                elif user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return min((owner for owner in owners if owner is not None), default=None)

    def owner_of_result(self, node: Node, path: str) -> int | None:
        fed, before, after = self._feeds(node), self.last_before[node], self.next_after[node]
        if before < 0:
            return after if after < len(self.paths) else None
        if not fed:
            return before
        near, nearer = self._nearness(path, before), self._nearness(path, min(fed))
        beside = any(self.has_data[source] and len(self.consumers[source]) > 1 for source in node_inputs(node))
        return min(fed) if nearer > near or (nearer == near and beside) else before

    def _feeds(self, start: Node) -> set[int]:
        """The units whose layers take the node's result, if nothing else does; otherwise none."""
        followed, fed = {start}, set()
        for node in self.inner[self.inner.index(start) + 1 :]:  # the oldest first: all its inputs were looked at
            given = node_inputs(node)
            if followed.isdisjoint(given):
                continue
            if node in self.unit_at:
                fed.add(self.unit_at[node])
            elif any(self.has_data[before] and before not in followed for before in given):
                return set()
            else:
                followed.add(node)
        return fed if followed.isdisjoint(self.outputs) else set()

    def _nearness(self, path: str, index: int) -> int:
        """How many levels of the module tree the path and the unit share."""
        return len(commonprefix([path.split("."), self.paths[index]]))  # noqa: RUF071 (of lists, not of characters)


def node_inputs(node: Node) -> list[Node]:
    return [before for before, _ in node.next_functions if before is not None]


def is_leaf(node: Node) -> bool:
    return node.name() == "torch::autograd::AccumulateGrad"
