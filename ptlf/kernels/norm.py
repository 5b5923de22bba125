"""Batch norm, residual sum and ReLU in training, with as few passes over memory as possible; heads that run on them.

Processes that share a batch exchange means and variances in forward, and the two sums of the gradient in backward.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.core import processes
from ptlf.encoders.norm import SharedBatchNorm1d, is_synchronised, is_usual
from ptlf.freezing.kernels import input_gradient
from ptlf.kernels import triton_norm as kernels
from ptlf.objectives import MLP
from ptlf.objectives.objective import is_as_built

Pair = tuple[int, int]

# How backward gets the ReLU mask: no ReLU; recomputed from the norm's input; from the ReLU's output; from packed bits.
NONE, BY_INPUT, BY_OUTPUT, BY_BITS = 0, 1, 2, 3


class TileSize(NamedTuple):
    """How a kernel's work is divided."""

    elements: int  # values per tile; for the kernels that add up partial sums, channels per program
    warps: int
    programs: int = 512  # of a reduction, at most; they share its tiles: about four per multiprocessor of an H200


# Found by trying on an H200 at 32, 64 and 224 px. The size of a reduction decides in which order it adds, and so the
# last bits of a step.
SIZES = {
    "sums": TileSize(2048, 2, programs=1024),
    "normalise": TileSize(1024, 2),
    "gradient_sums": TileSize(4096, 2),
    "gradient_total": TileSize(1024, 2, programs=1024),  # _gradient_sums with TOTAL
    "input_gradient": TileSize(1024, 2),
    "add_up": TileSize(2, 1),  # the kernels that add up partial sums
}


# On the host in every step, where Triton's own are slow.
def ceil_div(size: int, block: int) -> int:
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Tiles:
    """Tiles of a channels-last tensor. grid: a program per tile. sum_grid: `parts` per view and block of channels."""

    def __init__(self, x: Tensor, views: int, kernel: str) -> None:
        self.channels, self.views = x.shape[1], views
        self.rows = x.numel() // self.channels // views
        size = SIZES[kernel]
        block_c = min(64, next_power_of_2(self.channels))
        block_r = size.elements // block_c
        self.block = {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": size.warps, "enable_fp_fusion": True}
        across, down = ceil_div(self.channels, block_c), ceil_div(self.rows, block_r)
        self.parts = min(down, max(1, size.programs // (views * across)))
        self.grid, self.sum_grid = (down, across, views), (self.parts, across, views)
        self.size, self.sum_size = (self.rows, self.channels), (self.rows, self.channels, self.parts)
        # For the kernels that add up the partial sums, with one program per few channels. Products are rounded before
        # they are added, so that the same formula gives the same bits in every kernel.
        few, warps, _ = SIZES["add_up"]
        self.channel_grid = (ceil_div(self.channels, few),)
        self.channel_block = {
            "BLOCK_P": next_power_of_2(self.parts), "BLOCK_C": few, "num_warps": warps, "enable_fp_fusion": False
        }  # fmt: skip

    def partial_sums(self, x: Tensor) -> Tensor:
        return torch.empty(self.views, self.parts, 2, self.channels, device=x.device)

    def add_up(self, partial: Tensor, x: Tensor, *, moments: bool) -> Tensor:
        """(1, views, 2, C) of this process's rows: both sums, or mean and variance of x, from the partial sums."""
        sums = torch.empty(1, self.views, 2, self.channels, device=x.device)
        flags = {"MOMENTS": moments, "VIEWS": self.views, **self.channel_block}
        kernels._add_up[self.channel_grid](partial, x, sums, *self.sum_size, **flags)
        return sums


to_channels_last = partial(Tensor.contiguous, memory_format=torch.channels_last)


def pack_signs(x: Tensor) -> Tensor:
    """One bit per element of x, in memory order: whether it is positive."""
    bits = torch.empty(ceil_div(x.numel(), 8), dtype=torch.uint8, device=x.device)
    kernels._pack[(ceil_div(len(bits), 512),)](x, bits, x.numel(), BLOCK=512)
    return bits


def received_gradients(grad: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of the two consumers, of which one may have sent none: the first is always there."""
    if grad is None:
        grad, other = other, None
    assert grad is not None
    return to_channels_last(grad), None if other is None else to_channels_last(other)


class _Cast(torch.autograd.Function):
    """Casts all weights with one kernel, and all their gradients back with one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        cast = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(cast, weights)
        ctx.dtype = weights[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        cast = [torch.empty_like(grad, dtype=ctx.dtype) for grad in given]
        torch._foreach_copy_(cast, given)
        back = iter(cast)
        return None, *(None if grad is None else next(back) for grad in grads)


def cast_all(weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _Cast.apply(dtype, *weights) if weights and weights[0].dtype is not dtype else tuple(weights)


def batch_statistics(x: Tensor, norm: nn.modules.batchnorm._BatchNorm, views: int) -> tuple[Tensor, Tensor, bool]:
    """(views, C) of mean and 1 / sqrt(var + eps), and whether of all processes. Updates the running statistics."""
    tiles = Tiles(x, views, "sums")
    mean, inv_std = torch.empty(2, views, tiles.channels, device=x.device)
    partial = tiles.partial_sums(x)
    kernels._sums[tiles.sum_grid](x, partial, *tiles.sum_size, **tiles.block)
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    shared = processes.joined() and is_synchronised(norm)
    moments = processes.all_gather_rows(tiles.add_up(partial, x, moments=True)) if shared else partial
    flags = {"VIEWS": views, "TRACK": norm.track_running_stats, "SHARED": shared, **tiles.channel_block}
    sizes = (*tiles.sum_size, processes.world_size() if shared else 1)
    settings = (norm.momentum, norm.eps)
    kernels._statistics[tiles.channel_grid](partial, moments, x, *running, mean, inv_std, *sizes, *settings, **flags)
    return mean, inv_std, shared


def norm_gradients(
    x: Tensor, affine: tuple[Tensor, ...], grad: Tensor, views: int, *, shared: bool,
    mask: int = NONE, other: Tensor | None = None, source: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of input, weight and bias of a norm with or without a ReLU, from that of its result, which may come as
    two terms, `grad` and `other`; and that sum after the ReLU's mask, where it is computed.

    affine: mean, inv_std, weight, bias. mask: where it comes from; `source` has it for BY_OUTPUT and BY_BITS.
    """
    mean, inv_std, weight, bias = affine
    summed = other is not None or mask > BY_INPUT
    tiles = Tiles(x, views, "gradient_total" if summed else "gradient_sums")
    total = torch.empty_like(grad) if summed else grad
    partial = tiles.partial_sums(x)
    given = (grad, grad if other is None else other, x if source is None else source)
    flags = {"MASK": mask, "OTHER": other is not None, "TOTAL": summed, **tiles.block}
    kernels._gradient_sums[tiles.sum_grid](*given, x, *affine, total, partial, *tiles.sum_size, **flags)

    coefficients = torch.empty(views, 3, tiles.channels, device=x.device)
    grad_input, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    sums = tiles.add_up(partial, x, moments=False) if shared else partial
    if shared:
        processes.all_reduce_(sums)
    flags = {"VIEWS": views, "SHARED": shared, **tiles.channel_block}
    sizes = (*tiles.sum_size, processes.world_size() if shared else 1)
    results = (coefficients, grad_weight, grad_bias)
    kernels._coefficients[tiles.channel_grid](partial, sums, mean, inv_std, weight, *results, *sizes, **flags)

    small = Tiles(x, views, "input_gradient")
    flags = {"BY_INPUT": mask == BY_INPUT and not summed, **small.block}
    kernels._input_gradient[small.grid](total, x, *affine, coefficients, grad_input, *small.size, **flags)
    return grad_input, grad_weight, grad_bias, total


class _NormReLU(torch.autograd.Function):
    """relu(norm(x) + extra + residual); ReLU, extra and residual are optional.

    Returns the result twice, for next layer and shortcut: a kernel that reads their gradients anyway adds them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, extra: Tensor | None,
        norm: nn.modules.batchnorm._BatchNorm, views: int, relu: bool, as_bits: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual = to_channels_last(x), None if residual is None else to_channels_last(residual)
        mean, inv_std, ctx.shared = batch_statistics(x, norm, views)
        small, out = Tiles(x, views, "normalise"), torch.empty_like(x)
        has_residual, has_extra = residual is not None, extra is not None
        terms = (residual if has_residual else x, extra if has_extra else x)  # x stands for a pointer that is not read
        flags = {"RESIDUAL": has_residual, "EXTRA": has_extra, "RELU": relu}
        kernels._normalise[small.grid](x, *terms, mean, inv_std, weight, bias, out, *small.size, **small.block, **flags)
        ctx.mask = NONE
        if relu:
            ctx.mask = BY_INPUT if not (has_residual or has_extra) else BY_BITS if as_bits else BY_OUTPUT
        ctx.views, ctx.has_residual = views, has_residual
        source = pack_signs(out) if ctx.mask == BY_BITS else out if ctx.mask == BY_OUTPUT else None
        ctx.save_for_backward(x, weight, bias, mean, inv_std, source)
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inv_std, source = ctx.saved_tensors
        grad, other = received_gradients(grad, other)
        given = {"mask": ctx.mask, "other": other, "source": source}
        affine = (mean, inv_std, weight, bias)
        *grads, total = norm_gradients(x, affine, grad, ctx.views, shared=ctx.shared, **given)
        return *grads, total if ctx.has_residual else None, None, None, None, None, None


def norm_relu(
    x: Tensor, norm: nn.modules.batchnorm._BatchNorm, residual: Tensor | None = None, extra: Tensor | None = None,
    *, relu: bool = True, as_bits: bool = False, views: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """relu(norm(x) + extra + residual) in train mode, twice. `extra` (C,) gets no gradient, and needs a residual.

    as_bits: save the ReLU mask as bits, for an output that no other layer saves. views: the norm's own, if not given.
    """
    views = views or getattr(norm, "views", 1)
    return _NormReLU.apply(x, norm.weight, norm.bias, residual, extra, norm, views, relu, as_bits)


class FrozenConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias + residual) in one kernel, with frozen weights. Twice, as in _NormReLU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None,
        stride: Pair, padding: Pair, as_bits: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        settings = (stride, padding, (1, 1), 1)  # without dilation and groups
        if not x.is_cuda or torch.version.hip:  # ROCm has no such kernels
            out = F.conv2d(x, weight, bias, *settings)
            out = (out if residual is None else out + residual).relu()
        elif residual is None:
            out = torch.cudnn_convolution_relu(x, weight, bias, *settings)
        else:
            out = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *settings)
        out = to_channels_last(out)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            ctx.mask = BY_BITS if as_bits else BY_OUTPUT
            ctx.save_for_backward(weight, pack_signs(out) if as_bits else out)
            ctx.settings, ctx.size = settings, x.shape[2:]
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, source = ctx.saved_tensors
        grad, other = received_gradients(grad, other)
        total, grad_input, size = torch.empty_like(grad), None, grad.numel()
        given = (grad, grad if other is None else other, source)  # grad stands for a pointer that is not read
        kernels._mask[(ceil_div(size, 4096),)](*given, total, size, ctx.mask, other is not None, BLOCK=4096)
        if ctx.needs_input_grad[0]:
            grad_input = input_gradient(total, weight, ctx.size, *ctx.settings)
        return grad_input, None, None, total if ctx.needs_input_grad[3] else None, None, None, None


def patches(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 3, H, W) -> (N * H * W, 32): im2col for the CIFAR stem, more than twice as fast as cuDNN's convolution."""
    n, _, height, width = images.shape
    size = n * height * width
    out = torch.empty(size, 32, dtype=dtype, device=images.device)
    kernels._patches[(ceil_div(size, 128),)](images, out, size, height, width, *images.stride(), BLOCK=128)
    return out


def fuse_heads(module: nn.Module) -> None:
    """Replace every MLP below the module by one that runs on the kernels, with the same layers."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is MLP:
                setattr(parent, name, FusedMLP(*child))


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
