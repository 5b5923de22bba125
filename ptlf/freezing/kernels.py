"""Replacement forwards for frozen layers, norms and ReLUs, with which autograd saves only what backward needs: of a
convolution its weight; nothing of a BatchNorm, which is folded into its layer; of a ReLU one bit per element."""

import copy
import logging
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from ptlf.freezing.recording import BATCH_NORMS, Convolution

logger = logging.getLogger("ptlf.freezing")
Pair = tuple[int, int]
PlainLayer = nn.Conv2d | nn.Linear  # the layers with a forward here
SKIPPED = "did not get its last output, which was normalised already"
# Of BatchNorms that compute in eval mode what PyTorch's does, and so may be folded into their layer once frozen.
STANDARD_FORWARDS: set[Callable[..., Any]] = {nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward}


class _FrozenConv2d(torch.autograd.Function):
    """conv2d that saves only the weight. `convolution_backward` with a dummy input is slower in channels-last."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, *ctx.settings = inputs
        ctx.save_for_backward(weight)
        ctx.size = x.shape[-2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return input_gradient(grad, weight, ctx.size, *ctx.settings), *[None] * 6


def input_gradient(
    grad: Tensor, weight: Tensor, size: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Gradient of the input of a conv2d; `size` is the input's (height, width)."""
    # With a stride, the last rows and columns of the input may be in no window: their gradient is zero.
    reach = [size[i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1 for i in range(2)]
    unused = [reach[i] % stride[i] for i in range(2)]
    # Without autocast, so that the gradients keep their dtype if backward runs under it.
    device = grad.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return F.conv_transpose2d(grad, weight, None, stride, padding, unused, groups, dilation)


def frozen_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """conv2d without gradients for weight and bias. settings: stride, padding, dilation (pairs) and groups."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _FrozenConv2d.apply(x, weight, bias, *settings)


class _MaskedReLU(torch.autograd.Function):
    """ReLU that saves one bit per element for backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(pack(output > 0))
        ctx.shape, ctx.channels_last = output.shape, is_channels_last(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (bits,) = ctx.saved_tensors
        return torch.where(unpack(bits, ctx.shape, ctx.channels_last), grad, 0.0)


def masked_relu(x: Tensor) -> Tensor:
    return _MaskedReLU.apply(x) if torch.is_grad_enabled() and x.requires_grad else torch.relu(x)


def is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def pack(mask: Tensor) -> Tensor:
    """Booleans of any shape, in memory order, to ceil(n / 8) bytes: bit i of them holds the i-th eighth."""
    flat = (mask.permute(0, 2, 3, 1) if is_channels_last(mask) else mask).reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % 8)) if flat.numel() % 8 else flat  # F.pad copies in any case
    return (flat.view(8, -1) * bit_values(flat.device)).sum(0, dtype=torch.uint8)


def unpack(bits: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    """Inverse of `pack`: booleans of `shape`, in the original layout."""
    flat = (bits & bit_values(bits.device)).to(torch.bool).view(-1)[: math.prod(shape)]
    if channels_last:
        batch, channels, height, width = shape
        return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)


def bit_values(device: torch.device) -> Tensor:
    """1, 2, 4, ... 128 as a column, made on the device: a captured step cannot copy from the host."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)[:, None]


def fold(layer: PlainLayer, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that computes norm(layer(x)) with the norm's running statistics."""
    assert isinstance(norm, BATCH_NORMS) and norm.running_mean is not None and norm.running_var is not None
    precise = torch.promote_types(norm.running_var.dtype, torch.float32)
    scale = torch.rsqrt(norm.running_var.to(precise) + norm.eps)  # (C_out,)
    if norm.weight is not None:
        scale = scale * norm.weight
    bias = -norm.running_mean * scale
    if layer.bias is not None:
        bias = bias + layer.bias * scale
    if norm.bias is not None:
        bias = bias + norm.bias
    weight = layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1))
    return weight.to(layer.weight.dtype), bias.to(layer.weight.dtype)


def is_unusual() -> bool:
    """Whether a forward is exported, traced or transformed (torch.func, forward-mode gradients): it needs the layers'
    own parameters and operations."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return transformed or torch.jit.is_tracing()


class ForwardPatch:
    """A callable that replaces `forward` in the `__dict__` of `module`. As an object it is copied with its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Any = None  # what the module had there, mostly nothing

    def attach(self) -> None:
        self.before = replaced_forward(self.module)
        self.module.__dict__["forward"] = self

    def detach(self) -> None:
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before

    @property
    def __globals__(self) -> Any:
        """torch.jit.script needs them; torch.fx can do without."""
        raise AttributeError(f"torch.jit.script cannot read a frozen {type(self.module).__name__}; thaw it first")


class FrozenLayer(ForwardPatch):
    """Forward of a frozen convolution or linear layer; `norm`, if given, is folded in while `holder` holds it.

    The folded tensors are made again when a state_dict is loaded and, by eager code, if a source tensor has changed.
    After a thaw they keep their memory: a captured graph may still read it.

    The layer computes what its own forward does, and the norm for itself, wherever folding could be wrong: if the norm
    was replaced or did not follow, if a parameter was replaced or trains, in a copy without the norm, if `is_unusual`.
    """

    module: PlainLayer

    def __init__(self, layer: PlainLayer, norm: nn.Module | None = None, root: nn.Module | None = None) -> None:
        super().__init__(layer)
        self.norm, self.sources = norm, [layer] if norm is None else [layer, norm]  # of the folded tensors
        self.root, self.holder = root, norm_holder(root, norm)  # None if the norm is not folded
        self.parameters = self._parameters()
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.versions: list[tuple[int, ...]] = []
        self.handles: list[RemovableHandle] = []
        self.waiting: list[weakref.ref[Tensor]] = []  # outputs that have not reached the norm
        self.compiled = False  # code that does not note its outputs

    def __call__(self, input: Tensor) -> Tensor:
        layer = self.module
        if not self.is_intact(input):
            return type(layer).forward(layer, input)  # type: ignore[arg-type]
        folds = self.folds()
        weight, bias = (self.weight, self.bias) if folds else (layer.weight, layer.bias)
        assert weight is not None
        if isinstance(layer, nn.Linear):
            output = F.linear(input, weight, bias)
        else:
            padding: Any = layer.padding
            if isinstance(padding, str) or layer.padding_mode != "zeros":
                input, padding = pad(layer, input), (0, 0)
            output = frozen_conv2d(input, weight, bias, layer.stride, padding, layer.dilation, layer.groups)  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            self.compiled = True
        elif folds:
            self.waiting.append(weakref.ref(output))
        return output

    def is_intact(self, input: Any) -> bool:
        """Whether the parameters are those that were frozen. Also folds anew if they have other values."""
        if is_unusual() or not isinstance(input, Tensor):
            return False
        if self.norm is None or torch.compiler.is_compiling() or isinstance(input, FakeTensor):
            return self._is_untouched()
        if self.versions != self._versions():
            self.refresh()
        return bool(self.versions)

    def folds(self) -> bool:
        """Whether the norm is folded in now."""
        if self.holder is None:
            return False
        if self.holder[0]._modules.get(self.holder[1]) is not self.norm:
            return self._keep_apart("was replaced")
        skipped = self.waiting and not self.compiled and any(ref() is None for ref in self.waiting)
        return self._keep_apart(SKIPPED) if skipped else True

    def has_normalised(self, input: Tensor) -> bool:
        """Whether the norm's input is an output of this layer with the norm folded in."""
        if torch.compiler.is_compiling() or self.compiled:
            self.compiled = True
            return self.is_intact(input) and self.folds()
        # The output itself or, if a hook or a cast has made another tensor of it, the oldest one.
        place = next((place for place, ref in enumerate(self.waiting) if ref() is input), 0)
        return bool(self.waiting) and self.waiting.pop(place) is not None

    def _keep_apart(self, what: str) -> bool:
        if not torch.compiler.is_compiling():
            self.holder, self.waiting = None, []
            names = f"{type(self.norm).__name__} of a frozen {type(self.module).__name__}"
            logger.warning("the %s %s; it is folded no more; thaw before you change a module", names, what)
        return False

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, *loaded: Any) -> None:
        """Fold again, into the same memory if shape and layout match: a captured graph reads from there."""
        if loaded:
            self.parameters = self._parameters()
        self.versions = []
        if self.norm is None or not self._is_untouched():
            return
        weight, bias = fold(self.module, self.norm)
        if self.weight is not None and self.bias is not None and layout(self.weight) == layout(weight):
            self.weight.copy_(weight)
            self.bias.copy_(bias)
        else:
            self.weight, self.bias = weight, bias
        self.versions = [()] if isinstance(weight, FakeTensor) else self._versions()

    def attach(self) -> None:
        super().attach()
        self.parameters, self.holder = self._parameters(), norm_holder(self.root, self.norm)
        # On both: whichever is loaded last folds what the other one has loaded.
        if self.norm is not None:
            self.handles = [source.register_load_state_dict_post_hook(self.refresh) for source in self.sources]
        self.refresh()

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.waiting and not self.compiled:
            self._keep_apart(SKIPPED)
        super().detach()

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]

    def _parameters(self) -> list[nn.Parameter | None]:
        return [parameter for source in self.sources for parameter in source._parameters.values()]

    def _is_untouched(self) -> bool:
        """Whether nobody has made a parameter train or replaced one (fully_shard does, but then no norm is folded)."""
        now, before = self._parameters(), self.parameters
        same = len(now) == len(before) and (self.norm is None or all(map(operator.is_, now, before)))
        return same and not any(parameter is not None and parameter.requires_grad for parameter in now)

    def _versions(self) -> list[tuple[int, ...]]:
        """Of every source tensor; they detect replaced tensors and data, in-place changes, and what trains."""
        tensors = (t for s in self.sources for t in (*s._parameters.values(), *s._buffers.values()) if t is not None)
        return [(id(t), t.data_ptr(), t._version, t.requires_grad) for t in tensors]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "waiting": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenLayer":
        """In a copy of the layer alone no norm follows it."""
        twin = memo[id(self)] = object.__new__(type(self))
        outer = self.holder if id(self.root) in memo else None
        twin.__dict__.update(copy.deepcopy({**self.__getstate__(), "holder": outer, "root": None}, memo))
        twin.root = memo.get(id(self.root))
        return twin


def norm_holder(root: nn.Module | None, norm: nn.Module | None) -> tuple[nn.Module, str] | None:
    """The module inside `root` that has the norm as a child, and the child's name."""
    parts = [] if root is None or norm is None else root.modules()
    return next(((part, name) for part in parts for name, child in part._modules.items() if child is norm), None)


def replaced_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What is called in place of this module's own forward, such as a `ForwardPatch` while it is frozen; or None."""
    return module.__dict__.get("forward")


def layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def pad(layer: Convolution, images: Tensor) -> Tensor:
    """The images with the convolution's padding, of any mode, around them."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    amounts = layer._reversed_padding_repeated_twice  # left, right, top, bottom
    if not isinstance(layer.padding, str):  # it may have been changed since the layer was made
        amounts = [amount for amount in reversed(layer.padding) for _ in range(2)]
    return F.pad(images, amounts, mode=mode) if any(amounts) else images


def keep_statistics() -> None:
    """In place of the method `reset_running_stats` of a frozen norm."""


class EvalMode(ForwardPatch):
    """Forward of a frozen norm that cannot be folded, or of a frozen weight's parametrization: always in eval mode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.plain = is_plain_batch_norm(module)
        self.forward: Callable[..., Any] = module.forward

    def __call__(self, input: Tensor, *others: Tensor) -> Any:
        module: Any = self.module
        if self.plain:
            statistics = module.running_mean, module.running_var
            return F.batch_norm(input, *statistics, module.weight, module.bias, False, 0.0, module.eps)
        was_training, module.training = module.training, False
        try:
            return self.forward(input, *others)
        finally:
            module.training = was_training


class PassThrough(EvalMode):
    """Forward of a norm that is folded into its layer."""

    def __init__(self, norm: nn.Module, layer: FrozenLayer) -> None:
        super().__init__(norm)
        self.layer = layer

    def __call__(self, input: Tensor, *others: Tensor) -> Any:
        return input if self.layer.has_normalised(input) else super().__call__(input, *others)


class MaskedReLU(ForwardPatch):
    """Forward of an nn.ReLU whose output is not saved for any other backward."""

    module: nn.ReLU

    def __call__(self, input: Tensor) -> Tensor:
        if is_unusual():
            return type(self.module).forward(self.module, input)
        output = masked_relu(input)
        # Other code may hold the input and expect the in-place change. The copy saves nothing for backward.
        return input.copy_(output) if self.module.inplace else output


def is_plain_layer(layer: nn.Module) -> bool:
    """Whether the layer is a standard Conv2d or Linear: no overridden forward, no computed weight."""
    inherited = type(layer).forward in (nn.Linear.forward, nn.Conv2d.forward) and replaced_forward(layer) is None
    if isinstance(layer, nn.Conv2d):
        inherited = inherited and type(layer)._conv_forward is nn.Conv2d._conv_forward
    return inherited and layer._parameters.get("weight") is not None


def is_plain_batch_norm(norm: nn.Module | None) -> bool:
    """Whether the norm is a standard BatchNorm with running statistics; a subclass may add an activation."""
    if not isinstance(norm, BATCH_NORMS) or norm.running_mean is None:
        return False
    return type(norm).forward in STANDARD_FORWARDS and replaced_forward(norm) is None
