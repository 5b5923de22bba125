"""Find the units of any module by tracing a forward pass.

A unit is what freezes: a convolution or linear layer together with the norm that directly consumes its output.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS = (nn.Conv2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
IMAGE_SIZES = (32, 64, 96, 128, 224)


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer and its norm. `name` is the layer's module path."""

    name: str
    layer: nn.Conv2d | nn.Linear
    norm: nn.Module | None = None
    norm_name: str | None = None

    def parameters(self) -> list[nn.Parameter]:
        norm = [] if self.norm is None else list(self.norm.parameters())
        return [*self.layer.parameters(), *norm]


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
    """

    units: list[Unit]
    foldable: frozenset[str]
    relus: list[Relu]


def trained_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `find_units` whose weight requires a gradient."""
    return [unit for unit in find_units(module, example) if unit.layer.weight.requires_grad]


def find_units(module: nn.Module, example: Any = None) -> list[Unit]:
    """The units of `module` in order of first execution. Layers that the forward does not execute are left out.

    example: input of the module: a tensor, a tuple of arguments or a dict of keyword arguments. By default images of
    several sizes are tried, or vectors if there is no convolution.
    """
    return trace(module, example).units


def trace(module: nn.Module, example: Any = None) -> Trace:
    """Trace one forward in eval mode and one in train mode. The module is left unchanged."""
    if example is not None:
        return _check_folds(module, example, _analyse(module, *_run(module, example)))
    errors = []
    for guess in _guesses(module):
        try:
            record, output = _run(module, guess)
        except Exception as error:
            errors.append(f"{tuple(guess.shape)}: {error}")
            continue
        return _check_folds(module, guess, _analyse(module, record, output))
    tried = "; ".join(message.splitlines()[0] for message in errors) or "no convolution or linear layer to guess from"
    raise ValueError(f"found no input that {type(module).__name__} accepts; pass example=<a batch> ({tried})")


def _check_folds(module: nn.Module, example: Any, seen: Trace) -> Trace:
    """Remove from `foldable` the units that are not foldable in train mode; all of them if that forward fails."""
    try:
        in_train = _analyse(module, *_run(module, example, train=True)).foldable if seen.foldable else frozenset[str]()
    except Exception:
        in_train = frozenset()
    return dataclasses.replace(seen, foldable=seen.foldable & in_train)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def _guesses(module: nn.Module) -> Iterator[Tensor]:
    parameter = next(module.parameters(), torch.empty(0))
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None:
        declared = getattr(getattr(module, "config", None), "image_size", None)
        sizes = [(size, size) for size in IMAGE_SIZES]
        if isinstance(declared, int):
            sizes.insert(0, (declared, declared))
        elif isinstance(declared, Sequence) and len(declared) == 2:
            sizes.insert(0, (declared[0], declared[1]))
        for height, width in sizes:
            yield parameter.new_zeros(2, first.in_channels, height, width)
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if linear is not None:
        yield parameter.new_zeros(2, linear.in_features)


@dataclass(frozen=True, eq=False)
class _LayerCall:
    layer: nn.Module
    output: Tensor
    version: int  # of the output when the layer returned it; an in-place operation changes it
    node: Node | None


class _Record:
    """What the hooks record. All tensors are held until the end, so that ids and storages are not reused."""

    def __init__(self) -> None:
        self.calls: dict[int, _LayerCall] = {}  # by id of the output tensor
        self.layers: dict[nn.Module, list[_LayerCall]] = {}  # in order of first execution
        self.norms: dict[nn.Module, list[tuple[_LayerCall | None, Node | None]]] = defaultdict(list)
        self.relus: dict[nn.ReLU, list[int]] = defaultdict(list)  # storages of the outputs
        # Modules that save a storage for backward, and modules that read a layer's output; None: not a hooked module.
        self.keepers: dict[int, set[nn.Module | None]] = defaultdict(set)
        self.readers: dict[int, set[nn.Module | None]] = {}
        self.held: list[Tensor] = []
        self.inside: list[nn.Module] = []  # stack of the hooked modules being executed

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(module)
        if isinstance(module, nn.Conv2d | nn.Linear):
            self.layers.setdefault(module, [])

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inside.pop()
        if not isinstance(output, Tensor):
            return
        self.held.append(output)
        if isinstance(module, nn.Conv2d | nn.Linear):
            call = _LayerCall(module, output, output._version, output.grad_fn)
            self.calls[id(output)] = call
            self.readers[_storage(output)] = set()
            self.layers[module].append(call)
        elif isinstance(module, nn.ReLU):
            self.relus[module].append(_storage(output))
        else:
            source = next(tensors_in([args, kwargs]), None)
            call_or_none = self.calls.get(id(source))
            # The version may be read after the norm has run: none of NORMS writes to its input.
            direct = call_or_none is not None and source is not None and call_or_none.version == source._version
            self.norms[module].append((call_or_none if direct else None, output.grad_fn))

    def keep(self, tensor: Tensor) -> Tensor:
        inside = self.inside[-1] if self.inside else None
        if not isinstance(inside, nn.ReLU):
            self.keepers[_storage(tensor)].add(inside)
            self.held.append(tensor)
        return tensor.detach()


class _Readers(TorchDispatchMode):
    """Records which modules read a layer's output, also in operations without a gradient."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = self.record.inside[-1] if self.record.inside else None
        for tensor in tensors_in([args, kwargs]):
            if tensor.layout is torch.strided and (readers := self.record.readers.get(_storage(tensor))) is not None:
                readers.add(inside)
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _run(module: nn.Module, example: Any, *, train: bool = False) -> tuple[_Record, Any]:
    record = _Record()
    with ExitStack() as stack:
        stack.enter_context(_undisturbed(module, train))
        for watched in module.modules():
            if isinstance(watched, LAYERS + NORMS) or type(watched) is nn.ReLU:
                enter = watched.register_forward_pre_hook(record.enter, with_kwargs=True)
                leave = watched.register_forward_hook(record.leave, with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        args, kwargs = _arguments(example)
        device = next(tensors_in([args, kwargs]), torch.empty(0)).device.type
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device, enabled=False))
        # Weak: the graph holds the hooks and the record holds the graph, which would be a reference cycle.
        weak = weakref.proxy(record)
        stack.enter_context(saved_tensors_hooks(lambda tensor: weak.keep(tensor), lambda tensor: tensor))
        stack.enter_context(_Readers(record))
        return record, module(*args, **kwargs)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments. Float tensors require a gradient, so that every operation is in the graph."""

    def prepare(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().clone().requires_grad_()
        return value

    if isinstance(example, Mapping):
        return (), {key: prepare(value) for key, value in example.items()}
    if isinstance(example, tuple):
        return tuple(prepare(value) for value in example), {}
    return (prepare(example),), {}


@contextmanager
def _undisturbed(module: nn.Module, train: bool = False) -> Iterator[None]:
    """Inside: eval mode, or train mode except for norms, which may need a larger batch. Modes, buffers and random state
    are restored afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    buffers = [
        (m, name, buffer, buffer._version, buffer.clone())
        for m in module.modules()
        for name, buffer in m._buffers.items()
        if buffer is not None
    ]
    cuda = {tensor.device.index for tensor in module.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(cuda)):
        try:
            for m, _ in modes:
                m.training = train and not isinstance(m, NORMS)
            yield
        finally:
            for m, training in modes:
                m.training = training
            for m, name, buffer, version, content in buffers:
                m._buffers[name] = buffer
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(content)


def _analyse(module: nn.Module, record: _Record, output: Any) -> Trace:
    names = {m: name for name, m in module.named_modules()}
    units = _units(record, names)
    _refuse_shared_parameters(module, units)
    unit_names: dict[nn.Module | None, str] = {unit.layer: unit.name for unit in units}
    uses = _uses(output)
    foldable = frozenset(unit.name for unit in units if _feeds_only_its_norm(unit, record, uses))
    relus = []
    for relu, storages in record.relus.items():
        keepers = set().union(*(record.keepers.get(storage, set()) for storage in storages))
        if all(keeper in unit_names for keeper in keepers):
            relus.append(Relu(names[relu], relu, frozenset(unit_names[keeper] for keeper in keepers)))
    return Trace(units, foldable, relus)


def _units(record: _Record, names: Mapping[nn.Module, str]) -> list[Unit]:
    norm_of: dict[nn.Module, nn.Module] = {}
    for norm, calls in record.norms.items():
        first = calls[0][0]
        if first is not None:
            norm_of.setdefault(first.layer, norm)
    units = []
    for layer in record.layers:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        norm_or_none = norm_of.get(layer)
        norm_name = None if norm_or_none is None else names[norm_or_none]
        units.append(Unit(names[layer], layer, norm_or_none, norm_name))
    return units


def _refuse_shared_parameters(module: nn.Module, units: Sequence[Unit]) -> None:
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, m in module.named_modules():
        for key, parameter in m._parameters.items():
            if parameter is not None:
                owners[parameter].append(f"{name}.{key}" if name else key)
    for unit in units:
        for parameter in unit.parameters():
            if len(owners[parameter]) > 1:
                shared = " and ".join(owners[parameter])
                raise ValueError(
                    f"{shared} are the same parameter, which cannot be frozen in one place and trained in the other"
                )


def _uses(output: Any) -> Counter[Node]:
    """How often the result of each node is used, by other nodes or as an output of the module."""
    waiting = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    uses: Counter[Node] = Counter(waiting)
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None:
                continue
            uses[node] += 1
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return uses


def _feeds_only_its_norm(unit: Unit, record: _Record, uses: Mapping[Node, int]) -> bool:
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
    read_by = set().union(*(record.readers[_storage(call.output)] for call in calls))
    return norm_is_used and used_once and same_calls and read_by <= {unit.norm}
