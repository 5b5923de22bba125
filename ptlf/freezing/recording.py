"""A forward pass, recorded: which layer, norm and ReLU ran on what, and who keeps which tensor for backward."""

import dataclasses
import random
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Layer = Convolution | nn.Linear | nn.MultiheadAttention
BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
INSTANCE_NORMS = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
NORMS = (BATCH_NORMS, INSTANCE_NORMS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@dataclass(frozen=True, eq=False)
class LayerCall:
    layer: nn.Module
    inputs: list[Node]  # that made its inputs
    output: Tensor
    version: int  # of the output when the layer returned it; an in-place operation changes it
    node: Node | None


class ForwardRecord(TorchDispatchMode):
    """What the hooks record. All tensors are held until the end, so that ids and storages are not reused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, LayerCall] = {}  # by id of the output tensor
        self.layers: dict[Layer, list[LayerCall]] = {}  # in order of first execution
        self.norms: dict[nn.Module, list[tuple[LayerCall | None, Node | None]]] = defaultdict(list)
        self.relus: dict[nn.ReLU, list[int]] = defaultdict(list)  # storages of the outputs
        # Modules that save a storage for backward, and modules that read a layer's output; None: not a hooked module.
        self.keepers: dict[int, set[nn.Module | None]] = defaultdict(set)
        self.readers: dict[int, set[nn.Module | None]] = {}
        self.held: list[Tensor] = []
        self.inside: list[nn.Module | None] = [None]  # stack of the hooked modules being executed
        self.given: list[list[Node]] = []  # for each of them, the nodes that made its inputs

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(module)
        self.given.append([tensor.grad_fn for tensor in tensors_in([args, kwargs]) if tensor.grad_fn is not None])
        if isinstance(module, Layer):
            self.layers.setdefault(module, [])

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inside.pop()
        given = self.given.pop()
        if isinstance(module, nn.MultiheadAttention):
            output = output[0]  # beside it the attention weights
        if not isinstance(output, Tensor):
            return
        self.held.append(output)
        if isinstance(module, Layer):
            call = LayerCall(module, given, output, output._version, output.grad_fn)
            self.calls[id(output)] = call
            self.readers[storage(output)] = set()
            self.layers[module].append(call)
        elif isinstance(module, nn.ReLU):
            self.relus[module].append(storage(output))
        else:
            source = next(tensors_in([args, kwargs]), output)
            found = self.calls.get(id(source))
            # The version may be read after the norm has run: none of NORMS writes to its input.
            direct = found if found is not None and found.version == source._version else None
            self.norms[module].append((direct, output.grad_fn))

    def keep(self, tensor: Tensor) -> Tensor:
        if not isinstance(self.inside[-1], nn.ReLU):
            self.keepers[storage(tensor)].add(self.inside[-1])
            self.held.append(tensor)
        return tensor.detach()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records which modules read a layer's output, also in operations without a gradient."""
        for tensor in tensors_in([args, kwargs]):
            if tensor.layout is torch.strided and (readers := self.readers.get(storage(tensor))) is not None:
                readers.add(self.inside[-1])
        return function(*args, **(kwargs or {}))


def record_forward(module: nn.Module, example: Any, *, train: bool = False) -> tuple[ForwardRecord, Any]:
    """A forward in eval mode, or in train mode except for norms, which may need a larger batch."""
    record = ForwardRecord()
    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        # A parameter that does not train now is in the graph too.
        for parameter in [p for p in module.parameters() if p.is_floating_point() and not p.requires_grad]:
            stack.callback(parameter.requires_grad_, False)
            parameter.requires_grad_()
        for part in module.modules():
            part.training = train and not isinstance(part, NORMS)
            if isinstance(part, (Layer, *NORMS)) or type(part) is nn.ReLU:
                stack.callback(part.register_forward_pre_hook(record.enter, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(record.leave, with_kwargs=True).remove)
        stack.enter_context(torch.inference_mode(False))
        positional, named = arguments(example)
        args = [_requiring_gradient(value) for value in positional]
        kwargs = {key: _requiring_gradient(value) for key, value in named.items()}
        device = next(tensors_in([args, kwargs]), torch.empty(0)).device.type
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device, enabled=False))
        # Weak: the graph holds the hooks and the record holds the graph, which would be a reference cycle.
        weak = weakref.proxy(record)
        stack.enter_context(saved_tensors_hooks(lambda tensor: weak.keep(tensor), lambda tensor: tensor))
        stack.enter_context(record)
        return record, module(*args, **kwargs)


def arguments(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Positional and keyword arguments of a module's call, from a tensor, a tuple or a dict."""
    if isinstance(example, Mapping):
        return (), example
    return example if isinstance(example, tuple) else (example,), {}


def _requiring_gradient(value: Any) -> Any:
    """A float tensor requires a gradient, so that every operation is in the graph."""
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if floats else value


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers, modes and the global random state on exit."""
    parts = list({part: None for module in modules for part in module.modules()})
    modes = [part.training for part in parts]
    tensors = [
        (part, name, tensor, tensor.detach().clone())
        for part in parts
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    ]
    with same_randomness(*modules):
        try:
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
            with torch.no_grad():
                for part, name, tensor, saved in tensors:
                    setattr(part, name, tensor)  # a buffer may have been replaced rather than written to
                    tensor.copy_(saved)


@contextmanager
def same_randomness(*modules: nn.Module) -> Iterator[None]:
    """Restore the global random state of torch on the modules' devices, of Python and of numpy on exit."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(state)


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


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
