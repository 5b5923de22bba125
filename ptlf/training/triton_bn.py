"""Batch norm, ReLU and the residual sum of a training step in as few passes over memory as they need (Triton).

Tensors are channels-last, so memory holds rows (image, height, width) of C channels. The batch consists of `views`
equal parts, each normalised by its own statistics. Sums are taken from the end of a tensor, whose last rows the
convolution before has just left in the cache; they are added up in a fixed order, so a repeated step has the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.freezing.kernels import input_gradient

# Where a ReLU's mask comes from in backward: there is none; what went into the norm; what came out; packed bits.
NONE, BY_INPUT, BY_OUTPUT, BY_BITS = 0, 1, 2, 3
PROGRAMS = 512  # of a sum: about four for every multiprocessor of an H200


def blocks_of(size: int, block: int) -> int:
    """How many of them hold `size` elements. Triton has its own for this and the next, made to be compiled and slow."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()


class Tiles:
    """How a channels-last tensor is cut: a program per tile, or `parts` programs per view and block of channels that
    share its tiles. The sizes were found by trying, on an H200."""

    def __init__(self, x: Tensor, views: int, elements: int) -> None:
        self.channels, self.views = x.shape[1], views
        self.rows = x.numel() // self.channels // views
        block_c = min(64, power_of_2(self.channels))
        block_r = elements // block_c
        self.block = {"BLOCK_R": block_r, "BLOCK_C": block_c}
        across, down = blocks_of(self.channels, block_c), blocks_of(self.rows, block_r)
        self.parts = min(down, max(1, PROGRAMS // (views * across)))
        self.each, self.shared = (down, across, views), (self.parts, across, views)
        self.size = (self.rows, self.channels)

    def partial_sums(self, x: Tensor) -> Tensor:
        return torch.empty(self.views, self.parts, 2, self.channels, device=x.device)


@triton.jit
def _tile(block, rows, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets and mask of a tile, and its channels."""
    view = tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    start = (view * rows + block * BLOCK_R).to(tl.int64) * channels
    inside = (block * BLOCK_R + r < rows)[:, None] & (c < channels)[None, :]
    return start + (r[:, None] * channels + c[None, :]), inside, view * channels + c, c


@triton.jit
def _store_sums(partial, first, second, parts, channels, c):  # type: ignore[no-untyped-def]
    """What one program has summed up, for `_load_sums` to add to the others'."""
    to = partial + (tl.program_id(2) * parts + tl.program_id(0)) * 2 * channels + c
    tl.store(to, tl.sum(first, 0), mask=c < channels)
    tl.store(to + channels, tl.sum(second, 0), mask=c < channels)


@triton.jit
def _load_sums(partial, view, parts, channels, c, BLOCK_P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums over all rows of a view."""
    p = tl.arange(0, BLOCK_P)
    inside = (p < parts)[:, None] & (c < channels)[None, :]
    sums = partial + ((view * parts + p) * 2 * channels)[:, None] + c[None, :]
    first = tl.sum(tl.load(sums, mask=inside, other=0.0), 0)
    return first, tl.sum(tl.load(sums + channels, mask=inside, other=0.0), 0)


@triton.jit
def _affine(mean, deviation, weight, bias, cv, c, channels):  # type: ignore[no-untyped-def]
    """The norm as scale and shift: the same in forward and backward, or a recomputed mask would not agree."""
    scale = tl.load(deviation + cv, mask=c < channels, other=0.0) * tl.load(weight + c, mask=c < channels, other=0.0)
    return scale, tl.load(bias + c, mask=c < channels, other=0.0) - tl.load(
        mean + cv, mask=c < channels, other=0.0
    ) * scale


@triton.jit
def _sums(x, partial, rows, channels, parts, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over some rows of x - near and of its square; near is a value of the channel, not far from its mean."""
    blocks = tl.cdiv(rows, BLOCK_R)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    near = tl.load(x + c, mask=c < channels, other=0.0).to(tl.float32)
    for i in range(tl.program_id(0), blocks, parts):
        at, inside, _, _ = _tile(blocks - 1 - i, rows, channels, BLOCK_R, BLOCK_C)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - near[None, :], 0.0)
        first += value
        second += value * value
    _store_sums(partial, first, second, parts, channels, c)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    partial,
    x,
    running_mean,
    running_var,
    tracked,
    mean,
    deviation,
    rows,
    channels,
    parts,
    momentum,
    eps,
    VIEWS: tl.constexpr,
    TRACK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean and 1 / standard deviation of every view; the running statistics take one view after the other."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    near = tl.load(x + c, mask=c < channels, other=0.0).to(tl.float32)
    old_mean = tl.load(running_mean + c, mask=c < channels, other=0.0)
    old_var = tl.load(running_var + c, mask=c < channels, other=0.0)
    for view in tl.static_range(VIEWS):
        first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
        first /= rows
        var = second / rows - first * first
        var = tl.where(var < 0, 0.0, var)
        tl.store(mean + view * channels + c, first + near, mask=c < channels)
        tl.store(deviation + view * channels + c, 1 / tl.sqrt(var + eps), mask=c < channels)
        old_mean += momentum * (first + near - old_mean)
        old_var += momentum * (var * (rows / (rows - 1)) - old_var)
    if TRACK:
        tl.store(running_mean + c, old_mean, mask=c < channels)
        tl.store(running_var + c, old_var, mask=c < channels)
        if tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + VIEWS)


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    residual,
    extra,
    mean,
    deviation,
    weight,
    bias,
    out,
    rows,
    channels,
    RESIDUAL: tl.constexpr,
    EXTRA: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    at, inside, cv, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    scale, shift = _affine(mean, deviation, weight, bias, cv, c, channels)
    if EXTRA:
        shift += tl.load(extra + c, mask=c < channels, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # a NaN stays one
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _open(source, at, inside, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a ReLU let values through, from its output or from packed bits."""
    if MASK == 2:
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32) > 0
    else:
        return ((tl.load(source + at // 8, mask=inside, other=0) >> (at % 8).to(tl.uint8)) & 1) > 0


@triton.jit
def _gradient_sums(  # type: ignore[no-untyped-def]
    grad,
    other,
    source,
    x,
    mean,
    deviation,
    weight,
    bias,
    total,
    partial,
    rows,
    channels,
    parts,
    MASK: tl.constexpr,
    OTHER: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sums over some rows of the gradient behind the ReLU, and of its product with x - mean.

    The gradient may come in two summands; with TOTAL their masked sum is stored, so that nobody adds them again.
    """
    blocks = tl.cdiv(rows, BLOCK_R)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    cv = tl.program_id(2) * channels + c
    centre = tl.load(mean + cv, mask=c < channels, other=0.0)
    scale, shift = _affine(mean, deviation, weight, bias, cv, c, channels)
    for i in range(tl.program_id(0), blocks, parts):
        at, inside, _, _ = _tile(blocks - 1 - i, rows, channels, BLOCK_R, BLOCK_C)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if OTHER:
            gradient += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        if MASK == 1:
            gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
        if MASK > 1:
            gradient = tl.where(_open(source, at, inside, MASK), gradient, 0.0)
        if TOTAL:
            rounded = gradient.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=inside)
            gradient = rounded.to(tl.float32)
        first += gradient
        second += gradient * (value - centre[None, :])
    _store_sums(partial, first, second, parts, channels, c)


@triton.jit
def _coefficients(  # type: ignore[no-untyped-def]
    partial,
    mean,
    deviation,
    weight,
    coefficients,
    of_weight,
    of_bias,
    rows,
    channels,
    parts,
    VIEWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """a, b, d of every view and channel, with which the gradient of the input is a * gradient + b * input + d."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    factor = tl.load(weight + c, mask=c < channels, other=0.0)
    weights = tl.zeros((BLOCK_C,), tl.float32)
    biases = tl.zeros((BLOCK_C,), tl.float32)
    for view in tl.static_range(VIEWS):
        scale = tl.load(deviation + view * channels + c, mask=c < channels, other=0.0)
        centre = tl.load(mean + view * channels + c, mask=c < channels, other=0.0)
        first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
        second *= scale
        weights += second
        biases += first
        a = scale * factor
        b = -a * scale * (second / rows)
        to = coefficients + view * 3 * channels + c
        tl.store(to, a, mask=c < channels)
        tl.store(to + channels, b, mask=c < channels)
        tl.store(to + 2 * channels, -a * (first / rows) - b * centre, mask=c < channels)
    tl.store(of_weight + c, weights, mask=c < channels)
    tl.store(of_bias + c, biases, mask=c < channels)


@triton.jit
def _input_gradient(  # type: ignore[no-untyped-def]
    grad,
    x,
    mean,
    deviation,
    weight,
    bias,
    coefficients,
    out,
    rows,
    channels,
    BY_INPUT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    at, inside, cv, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if BY_INPUT:
        scale, shift = _affine(mean, deviation, weight, bias, cv, c, channels)
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
    from_ = coefficients + tl.program_id(2) * 3 * channels + c
    a = tl.load(from_, mask=c < channels, other=0.0)
    b = tl.load(from_ + channels, mask=c < channels, other=0.0)
    d = tl.load(from_ + 2 * channels, mask=c < channels, other=0.0)
    result = gradient * a[None, :] + value * b[None, :] + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pack(x, bits, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    positive = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) > 0
    packed = tl.sum(positive.to(tl.int32) << bit[None, :], 1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < size)


@triton.jit
def _mask(grad, other, source, out, size, MASK: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if OTHER:
        gradient += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(_open(source, at, inside, MASK), gradient, 0.0)
    tl.store(out + at, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _patches(x, out, size, height, width, by_image, by_channel, by_row, by_column, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of 32 for every pixel: the 27 values of its 3 x 3 surroundings, in a weight's order, and five zeros."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 32)
    channel, dy, dx = place // 9, place % 9 // 3 - 1, place % 3 - 1
    image, row, column = pixel // (height * width), pixel // width % height, pixel % width
    y, z = row[:, None] + dy[None, :], column[:, None] + dx[None, :]
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width) & (place < 27)[None, :] & (pixel < size)[:, None]
    at = (image * by_image)[:, None] + (channel * by_channel)[None, :] + y * by_row + z * by_column
    value = tl.load(x + at, mask=inside, other=0.0)
    to = pixel.to(tl.int64)[:, None] * 32 + place[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=(pixel < size)[:, None])


def rows_first(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def pack(x: Tensor) -> Tensor:
    """One bit per element of x, in memory order: whether it is positive."""
    bits = torch.empty(blocks_of(x.numel(), 8), dtype=torch.uint8, device=x.device)
    _pack[(blocks_of(len(bits), 512),)](x, bits, x.numel(), BLOCK=512)
    return bits


def masked(grad: Tensor, other: Tensor | None, source: Tensor, mask: int) -> Tensor:
    """The gradient, or the sum of two, where the ReLU let values through."""
    grad, other = rows_first(grad), None if other is None else rows_first(other)
    out = torch.empty_like(grad)
    grid = (blocks_of(grad.numel(), 4096),)
    _mask[grid](grad, grad if other is None else other, source, out, grad.numel(), mask, other is not None, BLOCK=4096)
    return out


def patches(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 3, H, W) of any layout -> (N * H * W, 32), the input of a 3 x 3 convolution written as a product."""
    n, channels, height, width = images.shape
    assert channels == 3
    size = n * height * width
    out = torch.empty(size, 32, dtype=dtype, device=images.device)
    _patches[(blocks_of(size, 128),)](images, out, size, height, width, *images.stride(), BLOCK=128)
    return out


class _Cast(torch.autograd.Function):
    """All weights to another type in one kernel, and all their gradients back in one."""

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


class _NormReLU(torch.autograd.Function):
    """relu(norm(x) + extra + residual), the last three as asked. Gives the result twice, for two who use it: their
    gradients then meet here, in the pass that has to read them anyway, and not in one of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        extra: Tensor | None,
        norm: nn.BatchNorm2d,
        views: int,
        relu: bool,
        as_bits: bool,
    ) -> tuple[Tensor, Tensor]:
        x, residual = rows_first(x), None if residual is None else rows_first(residual)
        tiles, small = Tiles(x, views, 4096), Tiles(x, views, 2048)
        mean, deviation = torch.empty(2, views, tiles.channels, device=x.device)
        partial, out = tiles.partial_sums(x), torch.empty_like(x)
        _sums[tiles.shared](x, partial, *tiles.size, tiles.parts, **tiles.block, num_warps=8)
        _statistics[(blocks_of(tiles.channels, 8),)](
            partial,
            x,
            norm.running_mean,
            norm.running_var,
            norm.num_batches_tracked,
            mean,
            deviation,
            *tiles.size,
            tiles.parts,
            norm.momentum,
            norm.eps,
            VIEWS=views,
            TRACK=norm.track_running_stats,
            BLOCK_P=power_of_2(tiles.parts),
            BLOCK_C=8,
        )
        has_residual, has_extra = residual is not None, extra is not None
        _normalise[small.each](
            x,
            residual if has_residual else x,
            extra if has_extra else x,
            mean,
            deviation,
            weight,
            bias,
            out,
            *small.size,
            RESIDUAL=has_residual,
            EXTRA=has_extra,
            RELU=relu,
            **small.block,
            num_warps=2,
        )
        ctx.mask = NONE
        if relu:
            ctx.mask = BY_INPUT if not (has_residual or has_extra) else BY_BITS if as_bits else BY_OUTPUT
        ctx.views, ctx.has_residual = views, has_residual
        source = pack(out) if ctx.mask == BY_BITS else out if ctx.mask == BY_OUTPUT else None
        ctx.save_for_backward(x, weight, bias, mean, deviation, source)
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, deviation, source = ctx.saved_tensors
        if grad is None:
            grad, other = other, None
        assert grad is not None
        grad, other = rows_first(grad), None if other is None else rows_first(other)
        summed = other is not None or ctx.mask > BY_INPUT
        tiles, small = Tiles(x, ctx.views, 4096 if summed else 2048), Tiles(x, ctx.views, 2048)
        total, of_input = torch.empty_like(grad) if summed else grad, torch.empty_like(x)
        partial = tiles.partial_sums(x)
        _gradient_sums[tiles.shared](
            grad,
            grad if other is None else other,
            x if source is None else source,
            x,
            mean,
            deviation,
            weight,
            bias,
            total,
            partial,
            *tiles.size,
            tiles.parts,
            MASK=ctx.mask,
            OTHER=other is not None,
            TOTAL=summed,
            **tiles.block,
            num_warps=8 if summed else 4,
        )
        coefficients = torch.empty(tiles.views, 3, tiles.channels, device=x.device)
        of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
        _coefficients[(blocks_of(tiles.channels, 8),)](
            partial,
            mean,
            deviation,
            weight,
            coefficients,
            of_weight,
            of_bias,
            *tiles.size,
            tiles.parts,
            VIEWS=tiles.views,
            BLOCK_P=power_of_2(tiles.parts),
            BLOCK_C=8,
        )
        _input_gradient[small.each](
            total,
            x,
            mean,
            deviation,
            weight,
            bias,
            coefficients,
            of_input,
            *small.size,
            BY_INPUT=ctx.mask == BY_INPUT and not summed,
            **small.block,
            num_warps=2,
        )
        return of_input, of_weight, of_bias, total if ctx.has_residual else None, None, None, None, None, None


def norm_relu(
    x: Tensor,
    norm: nn.BatchNorm2d,
    residual: Tensor | None = None,
    extra: Tensor | None = None,
    *,
    relu: bool = True,
    as_bits: bool = False,
) -> tuple[Tensor, Tensor]:
    """relu(norm(x) + extra + residual) in training mode, twice. `extra` (C,) gets no gradient; without residual there
    is none. as_bits: keep the ReLU's mask as bits, where nobody else keeps its output."""
    views = getattr(norm, "views", 1)
    return _NormReLU.apply(x, norm.weight, norm.bias, residual, extra, norm, views, relu, as_bits)


class _FrozenConvReLU(torch.autograd.Function):
    """relu(conv(x) + bias + residual) with a frozen weight, one kernel forward. Gives the result twice, as above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, layer: nn.Conv2d, as_bits: bool
    ) -> tuple[Tensor, Tensor]:
        assert not isinstance(layer.padding, str)
        where = (layer.stride, layer.padding, layer.dilation, layer.groups)
        if not x.is_cuda:
            out = F.conv2d(x, weight, bias, *where)
            out = (out if residual is None else out + residual).relu()
        elif residual is None:
            out = torch.cudnn_convolution_relu(x, weight, bias, *where)
        else:
            out = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *where)
        out = rows_first(out)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            ctx.mask = BY_BITS if as_bits else BY_OUTPUT
            ctx.save_for_backward(weight, pack(out) if as_bits else out)
            ctx.where, ctx.size = where, x.shape[2:]
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, source = ctx.saved_tensors
        if grad is None:
            grad, other = other, None
        assert grad is not None
        total, of_input = masked(grad, other, source, ctx.mask), None
        if ctx.needs_input_grad[0]:
            of_input = input_gradient(total, weight, ctx.size, *ctx.where)
        return of_input, None, None, total if ctx.needs_input_grad[3] else None, None, None


def frozen_conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, layer: nn.Conv2d, residual: Tensor | None = None, *, as_bits: bool = False
) -> tuple[Tensor, Tensor]:
    """relu(layer(x) + residual), twice, with this weight and bias in place of the layer's, which get no gradient."""
    return _FrozenConvReLU.apply(x, weight, bias, residual, layer, as_bits)
