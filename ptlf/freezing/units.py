"""Find the units of any module by tracing a forward pass.

A unit is what freezes: a convolution or linear layer together with the norm that directly consumes its output.
"""

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

Layer = nn.Conv2d | nn.Linear
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
IMAGE_SIZES = (32, 64, 96, 128, 224)


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer and its norm. `name` is the layer's module path."""

    name: str
    layer: Layer
    norm: nn.Module | None = None
    norm_name: str | None = None

    def parameters(self) -> list[nn.Parameter]:
        return [*self.layer.parameters(), *(self.norm.parameters() if self.norm is not None else ())]


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
    errors = []
    for guess in _guesses(module) if example is None else [example]:
        try:
            record, output = _run(module, guess)
        except Exception as error:
            if example is not None:
                raise
            errors.append(f"{tuple(guess.shape)}: {error}".splitlines()[0])
            continue
        seen = _analyse(module, record, output)
        try:
            in_train = _analyse(module, *_run(module, guess, train=True)).foldable if seen.foldable else seen.foldable
        except Exception:
            in_train = frozenset()
        return dataclasses.replace(seen, foldable=seen.foldable & in_train)
    tried = "; ".join(errors) or "no convolution or linear layer to guess from"
    raise ValueError(f"found no input that {type(module).__name__} accepts; pass example=<a batch> ({tried})")


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
    if (conv := next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)) is not None:
        sizes = [(size, size) for size in IMAGE_SIZES]
        declared = getattr(getattr(module, "config", None), "image_size", None)
        if isinstance(declared, int):
            sizes.insert(0, (declared, declared))
        elif isinstance(declared, Sequence) and len(declared) == 2:
            sizes.insert(0, (declared[0], declared[1]))
        for height, width in sizes:
            yield parameter.new_zeros(2, conv.in_channels, height, width)
    if (linear := next((m for m in module.modules() if isinstance(m, nn.Linear)), None)) is not None:
        yield parameter.new_zeros(2, linear.in_features)


@dataclass(frozen=True, eq=False)
class _LayerCall:
    layer: nn.Module
    output: Tensor
    version: int  # of the output when the layer returned it; an in-place operation changes it
    node: Node | None


class _Record(TorchDispatchMode):
    """What the hooks record. All tensors are held until the end, so that ids and storages are not reused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, _LayerCall] = {}  # by id of the output tensor
        self.layers: dict[Layer, list[_LayerCall]] = {}  # in order of first execution
        self.norms: dict[nn.Module, list[tuple[_LayerCall | None, Node | None]]] = defaultdict(list)
        self.relus: dict[nn.ReLU, list[int]] = defaultdict(list)  # storages of the outputs
        # Modules that save a storage for backward, and modules that read a layer's output; None: not a hooked module.
        self.keepers: dict[int, set[nn.Module | None]] = defaultdict(set)
        self.readers: dict[int, set[nn.Module | None]] = {}
        self.held: list[Tensor] = []
        self.inside: list[nn.Module | None] = [None]  # stack of the hooked modules being executed

    def enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(module)
        if isinstance(module, Layer):
            self.layers.setdefault(module, [])

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inside.pop()
        if not isinstance(output, Tensor):
            return
        self.held.append(output)
        if isinstance(module, Layer):
            call = self.calls[id(output)] = _LayerCall(module, output, output._version, output.grad_fn)
            self.readers[_storage(output)] = set()
            self.layers[module].append(call)
        elif isinstance(module, nn.ReLU):
            self.relus[module].append(_storage(output))
        else:
            source = next(tensors_in([args, kwargs]), output)
            found = self.calls.get(id(source))
            # The version may be read after the norm has run: none of NORMS writes to its input.
            direct = found if found is not None and found.version == source._version else None
            self.norms[module].append((direct, output.grad_fn))

    def keep(self, tensor: Tensor) -> Tensor:
        if not isinstance(self.inside[-1], nn.ReLU):
            self.keepers[_storage(tensor)].add(self.inside[-1])
            self.held.append(tensor)
        return tensor.detach()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records which modules read a layer's output, also in operations without a gradient."""
        for tensor in tensors_in([args, kwargs]):
            if tensor.layout is torch.strided and (readers := self.readers.get(_storage(tensor))) is not None:
                readers.add(self.inside[-1])
        return function(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _run(module: nn.Module, example: Any, *, train: bool = False) -> tuple[_Record, Any]:
    """A forward in eval mode, or in train mode except for norms, which may need a larger batch."""
    record = _Record()
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        for part in module.modules():
            part.training = train and not isinstance(part, NORMS)
            if isinstance(part, (Layer, *NORMS)) or type(part) is nn.ReLU:
                stack.callback(part.register_forward_pre_hook(record.enter).remove)
                stack.callback(part.register_forward_hook(record.leave, with_kwargs=True).remove)
        args, kwargs = _arguments(example)
        device = next(tensors_in([args, kwargs]), torch.empty(0)).device.type
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device, enabled=False))
        # Weak: the graph holds the hooks and the record holds the graph, which would be a reference cycle.
        weak = weakref.proxy(record)
        stack.enter_context(saved_tensors_hooks(lambda tensor: weak.keep(tensor), lambda tensor: tensor))
        stack.enter_context(record)
        return record, module(*args, **kwargs)


def _arguments(example: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Positional and keyword arguments. Float tensors require a gradient, so that every operation is in the graph."""

    def prepare(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().clone().requires_grad_()
        return value

    if isinstance(example, Mapping):
        return (), {key: prepare(value) for key, value in example.items()}
    return [prepare(value) for value in (example if isinstance(example, tuple) else (example,))], {}


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers, modes and torch's global random state on exit, even after an exception."""
    parts = list({part: None for module in modules for part in module.modules()})
    modes = [part.training for part in parts]
    tensors = [
        (part, name, tensor, tensor.detach().clone())
        for part in parts
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    ]
    devices = {tensor.device.index for _, _, tensor, _ in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
            with torch.no_grad():
                for part, name, tensor, saved in tensors:
                    setattr(part, name, tensor)  # a buffer may have been replaced rather than written to
                    tensor.copy_(saved)


def _analyse(module: nn.Module, record: _Record, output: Any) -> Trace:
    names: dict[nn.Module | None, str] = {m: name for name, m in module.named_modules()}
    norm_of: dict[nn.Module, nn.Module] = {}
    for norm, calls in record.norms.items():
        if (first := calls[0][0]) is not None:
            norm_of.setdefault(first.layer, norm)
    units = [Unit(names[m], m, norm_of.get(m), names.get(norm_of.get(m))) for m in record.layers]
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


def _refuse_shared_parameters(module: nn.Module, units: Sequence[Unit]) -> None:
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for prefix, m in module.named_modules():
        for name, parameter in m.named_parameters(prefix, recurse=False, remove_duplicate=False):
            owners[parameter].append(name)
    for shared in (owners[parameter] for unit in units for parameter in unit.parameters()):
        if len(shared) > 1:
            same = f"{' and '.join(shared)} are the same parameter"
            raise ValueError(f"{same}, which cannot be frozen in one place and trained in the other")


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
