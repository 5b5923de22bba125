"""Triton kernels for the ImageNet stem's norm, ReLU and max-pool in training: one pass over memory each way.

The pool is 3 x 3 with stride 2 and a border of 1. Tensors are those of `ptlf.training.triton_bn`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.training.triton_bn import Tiles, _affine, _tile, arrived, batch_statistics, channels_last, norm_gradients


@triton.jit
def _pool(
    x, mean, inv_std, weight, bias, out, positions, rows, channels, height, width, out_height, out_width,
    NORM: tl.constexpr, POSITIONS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Max-pool of relu(norm(x)) or (not NORM) of x, 3 x 3 with stride 2 and a border of 1. Rows are pixels of `out`.

    positions: which of the nine was the largest, the first of equals; 9 if that is 0, where the ReLU has no gradient.
    """
    at, inside, cv, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    pixel = tl.program_id(2) * rows + tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    image, row, column = pixel // (out_height * out_width), pixel // out_width % out_height, pixel % out_width
    if NORM:
        scale, shift = _affine(mean, inv_std, weight, bias, cv, c, channels)
    best = tl.full((BLOCK_R, BLOCK_C), float("-inf"), tl.float32)
    where = tl.full((BLOCK_R, BLOCK_C), 9, tl.int32)
    for place in tl.static_range(9):
        y, z = row * 2 + place // 3 - 1, column * 2 + place % 3 - 1
        there = inside & ((y >= 0) & (y < height) & (z >= 0) & (z < width))[:, None]
        source = (((image * height + y) * width + z).to(tl.int64) * channels)[:, None] + c[None, :]
        value = tl.load(x + source, mask=there, other=0.0).to(tl.float32)
        if NORM:
            value = value * scale[None, :] + shift[None, :]
            value = tl.where(value < 0, 0.0, value)  # keeps NaN
            value = value.to(out.dtype.element_ty).to(tl.float32)
        larger = there & ((value > best) | (value != value))
        best = tl.where(larger, value, best)
        where = tl.where(larger, place, where)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=inside)
    if POSITIONS:
        tl.store(positions + at, tl.where(best == 0, 9, where).to(tl.uint8), mask=inside)


@triton.jit
def _pool_gradient(
    grad, other, positions, out, rows, channels, height, width, out_height, out_width,
    OTHER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradient of what `_pool` pools, from that of the result, which may come as two terms. Rows are pixels of `out`.
    An even row lies in one window, an odd one in two; columns alike."""
    at, inside, _, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    pixel = tl.program_id(2) * rows + tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    image, row, column = pixel // (height * width), pixel // width % height, pixel % width
    result = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for which in tl.static_range(4):
        down, across = which // 2, which % 2
        y, z = (row + down) // 2, (column + across) // 2
        place = (row - 2 * y + 1) * 3 + column - 2 * z + 1
        there = inside & ((row % 2 >= down) & (column % 2 >= across) & (y < out_height) & (z < out_width))[:, None]
        source = (((image * out_height + y) * out_width + z).to(tl.int64) * channels)[:, None] + c[None, :]
        gradient = tl.load(grad + source, mask=there, other=0.0).to(tl.float32)
        if OTHER:
            gradient += tl.load(other + source, mask=there, other=0.0).to(tl.float32)
        position = tl.load(positions + source, mask=there, other=9).to(tl.int32)
        result += tl.where(position == place[:, None], gradient, 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def pooled_size(size: int) -> int:
    return (size - 1) // 2 + 1


def pool(x: Tensor, affine: tuple[Tensor, ...] | None = None, views: int = 1) -> tuple[Tensor, Tensor | None]:
    """Max-pool 3 x 3, stride 2, border 1; autograd does not see it.

    With `affine`, a norm's (mean, inv_std, weight, bias), that of relu(norm(x)), and the positions of the largest
    values, one byte each.
    """
    x = channels_last(x)
    n, channels, height, width = x.shape
    size = (pooled_size(height), pooled_size(width))
    out = torch.empty(n, channels, *size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    positions = None if affine is None else torch.empty_like(out, dtype=torch.uint8)
    tiles = Tiles(out, views, "pool")
    norm = affine or (x, x, x, x)  # x and out stand for pointers that are not read
    given = (x, *norm, out, out if positions is None else positions)
    flags = {"NORM": affine is not None, "POSITIONS": positions is not None}
    _pool[tiles.grid](*given, *tiles.size, height, width, *size, **flags, **tiles.block)
    return out, positions


class _NormReLUPool(torch.autograd.Function):
    """The max-pool of relu(norm(x)), twice, as in _NormReLU. relu(norm(x)) itself is never in memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, views: int
    ) -> tuple[Tensor, Tensor]:
        x = channels_last(x)
        mean, inv_std, ctx.shared = batch_statistics(x, norm, views)
        out, positions = pool(x, (mean, inv_std, weight, bias), views)
        ctx.views = views
        ctx.save_for_backward(x, weight, bias, mean, inv_std, positions)
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inv_std, positions = ctx.saved_tensors
        grad, other = arrived(grad, other)
        total, each = torch.empty_like(x), Tiles(x, ctx.views, "pool_gradient")
        given = (grad, grad if other is None else other, positions, total)  # grad stands for a pointer that is not read
        sizes = (*each.size, *x.shape[2:], *grad.shape[2:])
        _pool_gradient[each.grid](*given, *sizes, OTHER=other is not None, **each.block)
        *grads, _ = norm_gradients(x, (mean, inv_std, weight, bias), total, ctx.views, shared=ctx.shared)
        return *grads, None, None


def norm_relu_pool(x: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """The max-pool, 3 x 3 with stride 2 and a border of 1, of relu(norm(x)) in train mode, twice."""
    return _NormReLUPool.apply(x, norm.weight, norm.bias, norm, getattr(norm, "views", 1))
