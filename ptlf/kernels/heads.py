"""Heads, and the cosine between their outputs, in Triton kernels.

All views take one pass. Nothing is compiled by torch.compile, which would take many seconds before the first step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.encoders.norm import SharedBatchNorm1d, is_usual
from ptlf.freezing import replaced_forward
from ptlf.kernels.norm import next_power_of_2, norm_relu
from ptlf.objectives.heads import MLP, NegativeCosine

EPS = tl.constexpr(1e-8)  # of torch.cosine_similarity: the least norm that is divided by
MAX_WIDTH = 16384  # values of a vector, which one program holds


def fuse_heads(module: nn.Module) -> None:
    """Replace every MLP and cosine below the module by one that runs on the kernels, with the same layers."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is MLP:
                setattr(parent, name, FusedMLP(*child))
            elif type(child) is NegativeCosine:
                setattr(parent, name, FusedNegativeCosine())


class FusedMLP(MLP):
    def each_view(self, views: Sequence[Tensor]) -> list[Tensor]:
        """All views in one pass."""
        layers = list(self)
        known = is_as_built(self) and all(is_known(layer) for layer in layers)
        if not known or len({len(view) for view in views}) > 1:
            return [self(view) for view in views]
        x = torch.cat(list(views))
        while layers:
            layer = layers.pop(0)
            if isinstance(layer, nn.BatchNorm1d) and layer.training:
                relu = bool(layers) and isinstance(layers[0], nn.ReLU)
                layers = layers[relu:]
                x = norm_relu(x[:, :, None, None], layer, relu=relu, views=len(views))[0].flatten(1)
            else:
                x = layer(x)
        return list(x.chunk(len(views)))


def is_known(layer: nn.Module) -> bool:
    """Whether the layer takes rows one by one, or is a norm that the kernels know."""
    if isinstance(layer, nn.BatchNorm1d):
        plain = type(layer) in (nn.BatchNorm1d, SharedBatchNorm1d) and is_as_built(layer)
        return plain and (is_usual(layer) or not layer.training)
    return type(layer) in (nn.Linear, nn.ReLU, nn.Identity) and is_as_built(layer)


def is_as_built(module: nn.Module) -> bool:
    """Whether its forward is its class's own, and no hooks are registered."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return replaced_forward(module) is None and not any(hooks)


class FusedNegativeCosine(NegativeCosine):
    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        rows = prediction.ndim == 2 and prediction.shape == target.shape and prediction.shape[1] <= MAX_WIDTH
        exact = prediction.dtype is target.dtype is torch.float32
        if target.requires_grad or not (rows and exact):
            return super().forward(prediction, target)
        return -_Cosine.apply(prediction, target).mean()


class _Cosine(torch.autograd.Function):
    """Of each row, (N, D) and (N, D) to (N,). The second gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        cosines, factors = x.new_empty(len(x)), x.new_empty(2, len(x))
        _cosine[(len(x),)](x, y, cosines, factors, *x.shape, BLOCK=next_power_of_2(x.shape[1]))
        ctx.save_for_backward(x, y, factors)
        return cosines

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y, factors = ctx.saved_tensors
        out = torch.empty_like(x)
        _cosine_gradient[(len(x),)](grad.contiguous(), x, y, factors, out, *x.shape, BLOCK=next_power_of_2(x.shape[1]))
        return out, None


@triton.jit
def _cosine(x, y, cosines, factors, rows, width, BLOCK: tl.constexpr):
    """The cosine of one row, and the a and b of its gradient, a * y - b * x."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    one = tl.load(x + row * width + at, mask=at < width, other=0.0)
    two = tl.load(y + row * width + at, mask=at < width, other=0.0)
    length, other = tl.sqrt(tl.sum(one * one)), tl.sqrt(tl.sum(two * two))
    a = 1 / (tl.maximum(length, EPS) * tl.maximum(other, EPS))
    cosine = tl.sum(one * two) * a
    tl.store(cosines + row, cosine)
    tl.store(factors + row, a)
    b = cosine / (tl.maximum(length, EPS) * tl.where(length > 0, length, 1.0))  # zeros have no direction
    tl.store(factors + rows + row, b)


@triton.jit
def _cosine_gradient(grad, x, y, factors, out, rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    one = tl.load(x + row * width + at, mask=at < width, other=0.0)
    two = tl.load(y + row * width + at, mask=at < width, other=0.0)
    a, b = tl.load(factors + row), tl.load(factors + rows + row)
    tl.store(out + row * width + at, tl.load(grad + row) * (a * two - b * one), mask=at < width)
