"""Triton kernels for batch norm, residual sum and ReLU in training, with as few passes over memory as possible.

Tensors are channels-last: memory holds one row of C channels per (image, height, width). The batch consists of `views`
equal parts, each normalised by its own statistics. Reductions start at the end of a tensor, because the convolution
before has left its last rows in the cache. They add in a fixed order, so that a repeated step gives the same bits.

Where processes share the batch, the statistics of a norm are those of all rows of all processes: means and variances
are gathered in forward, the two sums of the gradient are added up in backward. Each is one small exchange.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.core import processes
from ptlf.encoders.norm import is_synchronised
from ptlf.freezing.kernels import input_gradient
from ptlf.training import weight_gradients
from ptlf.training.weight_gradients import Pair

# How backward gets the ReLU mask: no ReLU; recomputed from the norm's input; from the ReLU's output; from packed bits.
NONE, BY_INPUT, BY_OUTPUT, BY_BITS = 0, 1, 2, 3


class TileSize(NamedTuple):
    """How a kernel's work is divided."""

    elements: int  # values per tile; for the kernels that add up partial sums, channels per program
    warps: int
    programs: int = 512  # of a reduction, at most; they share its tiles: about four per multiprocessor of an H200


# For each kernel, its size from a number of values per view on. Found by trying on an H200 at 32, 64 and 224 px, where
# a second size for large tensors gains less than 3 % of any kernel. The size of a reduction decides in which order it
# adds, and so the last bits of a step: a new entry changes the bits for the tensors it covers. The other kernels give
# the same bits with any size.
SIZES: dict[str, dict[int, TileSize]] = {
    "sums": {0: TileSize(2048, 2, programs=1024)},
    "normalise": {0: TileSize(1024, 2)},
    "gradient_sums": {0: TileSize(4096, 2)},
    "gradient_total": {0: TileSize(1024, 2, programs=1024)},  # _gradient_sums with TOTAL
    "input_gradient": {0: TileSize(1024, 2)},
    "pool": {0: TileSize(1024, 4)},
    "pool_gradient": {0: TileSize(2048, 2)},
    "add_up": {0: TileSize(2, 1)},  # the kernels that add up partial sums
}


def tile_sizes(kernel: str, rows: int, channels: int) -> TileSize:
    """The size for a tensor with so many rows per view."""
    by_values = SIZES[kernel]
    return by_values[max(least for least in by_values if least <= rows * channels)]


def blocks_of(size: int, block: int) -> int:
    """size / block, rounded up. Called on the host in every step, where triton.cdiv is slow."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is >= size; faster than Triton's."""
    return 1 << (size - 1).bit_length()


class Tiles:
    """The tiling of a channels-last tensor for a kernel of `SIZES`.

    grid: one program per tile. sum_grid: `parts` programs per view and block of channels, which share its tiles.
    """

    def __init__(self, x: Tensor, views: int, kernel: str) -> None:
        self.channels, self.views = x.shape[1], views
        self.rows = x.numel() // self.channels // views
        size = tile_sizes(kernel, self.rows, self.channels)
        block_c = min(64, next_power_of_2(self.channels))
        block_r = size.elements // block_c
        self.block = {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": size.warps, "enable_fp_fusion": True}
        across, down = blocks_of(self.channels, block_c), blocks_of(self.rows, block_r)
        self.parts = min(down, max(1, size.programs // (views * across)))
        self.grid, self.sum_grid = (down, across, views), (self.parts, across, views)
        self.size, self.sum_size = (self.rows, self.channels), (self.rows, self.channels, self.parts)
        # For the kernels that add up the partial sums, with one program per few channels. Products are rounded before
        # they are added, so that the same formula gives the same bits in every kernel.
        few, warps, _ = tile_sizes("add_up", self.rows, self.channels)
        self.channel_grid = (blocks_of(self.channels, few),)
        self.channel_block = {
            "BLOCK_P": next_power_of_2(self.parts), "BLOCK_C": few, "num_warps": warps, "enable_fp_fusion": False
        }  # fmt: skip

    def partial_sums(self, x: Tensor) -> Tensor:
        return torch.empty(self.views, self.parts, 2, self.channels, device=x.device)

    def all_moments(self, partial: Tensor, x: Tensor) -> Tensor:
        """Mean and variance of every process's rows, (processes, views, 2, C), from this one's partial sums of x."""
        mine = torch.empty(1, self.views, 2, self.channels, device=x.device)
        _moments[self.channel_grid](partial, x, mine, *self.sum_size, VIEWS=self.views, **self.channel_block)
        return processes.all_gather_rows(mine)

    def all_sums(self, partial: Tensor) -> Tensor:
        """Both sums over the rows of all processes, (views, 2, C)."""
        sums = torch.empty(self.views, 2, self.channels, device=partial.device)
        _add_up[self.channel_grid](partial, sums, *self.sum_size[1:], VIEWS=self.views, **self.channel_block)
        processes.all_reduce_(sums)
        return sums


@triton.jit
def _tile(block, rows, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Offsets and mask of a tile, and its channels: as an index into (views, C), and into (C,)."""
    view = tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    start = (view * rows + block * BLOCK_R).to(tl.int64) * channels
    inside = (block * BLOCK_R + r < rows)[:, None] & (c < channels)[None, :]
    return start + (r[:, None] * channels + c[None, :]), inside, view * channels + c, c


@triton.jit
def _store_sums(partial, first, second, parts, channels, c):
    """Store one program's partial sums, which `_load_sums` adds up."""
    to = partial + (tl.program_id(2) * parts + tl.program_id(0)) * 2 * channels + c
    tl.store(to, tl.sum(first, 0), mask=c < channels)
    tl.store(to + channels, tl.sum(second, 0), mask=c < channels)


@triton.jit
def _load_sums(partial, view, parts, channels, c, BLOCK_P: tl.constexpr):
    """Both sums over all rows of a view, from the partial sums."""
    p = tl.arange(0, BLOCK_P)
    inside = (p < parts)[:, None] & (c < channels)[None, :]
    sums = partial + ((view * parts + p) * 2 * channels)[:, None] + c[None, :]
    first = tl.sum(tl.load(sums, mask=inside, other=0.0), 0)
    return first, tl.sum(tl.load(sums + channels, mask=inside, other=0.0), 0)


@triton.jit
def _add_up(partial, sums, channels, parts, VIEWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both sums of every view, (views, 2, C), from the partial sums."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    for view in tl.static_range(VIEWS):
        first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
        tl.store(sums + view * 2 * channels + c, first, mask=c < channels)
        tl.store(sums + (view * 2 + 1) * channels + c, second, mask=c < channels)


@triton.jit
def _affine(mean, inv_std, weight, bias, cv, c, channels):
    """The norm as scale and shift: the same bits in forward and backward, which recomputes the mask from them."""
    inside = c < channels
    scale = tl.load(inv_std + cv, mask=inside, other=0.0) * tl.load(weight + c, mask=inside, other=0.0)
    shift = tl.load(bias + c, mask=inside, other=0.0) - tl.load(mean + cv, mask=inside, other=0.0) * scale
    return scale, shift


@triton.jit
def _sums(x, partial, rows, channels, parts, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Partial sums of x - pivot and its square. The pivot, one value of the channel, lies near the mean; without it the
    variance would lose digits."""
    blocks = tl.cdiv(rows, BLOCK_R)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pivot = tl.load(x + c, mask=c < channels, other=0.0).to(tl.float32)
    for i in range(tl.program_id(0), blocks, parts):
        at, inside, _, _ = _tile(blocks - 1 - i, rows, channels, BLOCK_R, BLOCK_C)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        first += value
        second += value * value
    _store_sums(partial, first, second, parts, channels, c)


@triton.jit
def _moments_of(partial, x, view, rows, channels, parts, c, BLOCK_P: tl.constexpr):
    """Mean and variance of a view, from the partial sums."""
    pivot = tl.load(x + c, mask=c < channels, other=0.0).to(tl.float32)
    first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
    first /= rows
    var = second / rows - first * first
    return first + pivot, tl.where(var < 0, 0.0, var)


@triton.jit
def _moments(
    partial, x, moments, rows, channels, parts, VIEWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Mean and variance of this process's rows of every view: (views, 2, C)."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    for view in tl.static_range(VIEWS):
        mean, var = _moments_of(partial, x, view, rows, channels, parts, c, BLOCK_P)
        tl.store(moments + view * 2 * channels + c, mean, mask=c < channels)
        tl.store(moments + (view * 2 + 1) * channels + c, var, mask=c < channels)


@triton.jit
def _joint_moments(moments, view, processes, channels, c, VIEWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mean and variance of a view over all processes, from those of each, (processes, views, 2, C)."""
    at = moments + view * 2 * channels + c
    mean = tl.zeros((BLOCK_C,), tl.float32)
    var = tl.zeros((BLOCK_C,), tl.float32)
    for i in range(processes):
        mean += tl.load(at + i * VIEWS * 2 * channels, mask=c < channels, other=0.0)
    mean /= processes
    for i in range(processes):
        apart = tl.load(at + i * VIEWS * 2 * channels, mask=c < channels, other=0.0) - mean
        var += tl.load(at + (i * VIEWS * 2 + 1) * channels, mask=c < channels, other=0.0) + apart * apart
    return mean, var / processes


@triton.jit
def _statistics(
    partial, moments, x, running_mean, running_var, tracked, mean, inv_std, rows, channels, parts, processes,
    momentum, eps,
    VIEWS: tl.constexpr, TRACK: tl.constexpr, SHARED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / sqrt(var + eps) of every view, from the partial sums or (SHARED) the moments of all processes. The
    running statistics are updated by one view after the other."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    old_mean = tl.load(running_mean + c, mask=c < channels, other=0.0)
    old_var = tl.load(running_var + c, mask=c < channels, other=0.0)
    count = rows * processes
    for view in tl.static_range(VIEWS):
        if SHARED:
            center, var = _joint_moments(moments, view, processes, channels, c, VIEWS, BLOCK_C)
        else:
            center, var = _moments_of(partial, x, view, rows, channels, parts, c, BLOCK_P)
        tl.store(mean + view * channels + c, center, mask=c < channels)
        tl.store(inv_std + view * channels + c, 1 / tl.sqrt(var + eps), mask=c < channels)
        old_mean += momentum * (center - old_mean)
        old_var += momentum * (var * (count / (count - 1)) - old_var)
    if TRACK:
        tl.store(running_mean + c, old_mean, mask=c < channels)
        tl.store(running_var + c, old_var, mask=c < channels)
        if tl.program_id(0) == 0:
            tl.store(tracked, tl.load(tracked) + VIEWS)


@triton.jit
def _normalise(
    x, residual, extra, mean, inv_std, weight, bias, out, rows, channels,
    RESIDUAL: tl.constexpr, EXTRA: tl.constexpr, RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    at, inside, cv, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    scale, shift = _affine(mean, inv_std, weight, bias, cv, c, channels)
    if EXTRA:
        shift += tl.load(extra + c, mask=c < channels, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # keeps NaN
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _relu_mask(source, at, inside, MASK: tl.constexpr):
    """Where the ReLU's output is positive, from that output or from packed bits."""
    if MASK == 2:
        return tl.load(source + at, mask=inside, other=0.0).to(tl.float32) > 0
    else:
        return ((tl.load(source + at // 8, mask=inside, other=0) >> (at % 8).to(tl.uint8)) & 1) > 0


@triton.jit
def _gradient_sums(
    grad, other, source, x, mean, inv_std, weight, bias, total, partial, rows, channels, parts,
    MASK: tl.constexpr, OTHER: tl.constexpr, TOTAL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Partial sums of the masked gradient, and of its product with x - mean.

    The gradient may come as two terms (OTHER). With TOTAL their masked sum is stored, to be reused.
    """
    blocks = tl.cdiv(rows, BLOCK_R)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    cv = tl.program_id(2) * channels + c
    center = tl.load(mean + cv, mask=c < channels, other=0.0)
    scale, shift = _affine(mean, inv_std, weight, bias, cv, c, channels)
    for i in range(tl.program_id(0), blocks, parts):
        at, inside, _, _ = _tile(blocks - 1 - i, rows, channels, BLOCK_R, BLOCK_C)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if OTHER:
            gradient += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        if MASK == 1:
            gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
        if MASK > 1:
            gradient = tl.where(_relu_mask(source, at, inside, MASK), gradient, 0.0)
        if TOTAL:
            rounded = gradient.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=inside)
            gradient = rounded.to(tl.float32)
        first += gradient
        second += gradient * (value - center[None, :])
    _store_sums(partial, first, second, parts, channels, c)


@triton.jit
def _coefficients(
    partial, sums, mean, inv_std, weight, coefficients, grad_weight, grad_bias, rows, channels, parts, processes,
    VIEWS: tl.constexpr, SHARED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """a, b, d of every view and channel: the input gradient is a * gradient + b * input + d. Also the gradients of the
    norm's weight and bias.

    SHARED: a, b, d are of the sums over all processes, (views, 2, C). The gradients of weight and bias are of this
    process's rows: they are averaged with all others.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    factor = tl.load(weight + c, mask=c < channels, other=0.0)
    weights = tl.zeros((BLOCK_C,), tl.float32)
    biases = tl.zeros((BLOCK_C,), tl.float32)
    count = rows * processes
    for view in tl.static_range(VIEWS):
        scale = tl.load(inv_std + view * channels + c, mask=c < channels, other=0.0)
        center = tl.load(mean + view * channels + c, mask=c < channels, other=0.0)
        first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
        weights += second * scale
        biases += first
        if SHARED:
            first = tl.load(sums + view * 2 * channels + c, mask=c < channels, other=0.0)
            second = tl.load(sums + (view * 2 + 1) * channels + c, mask=c < channels, other=0.0)
        a = scale * factor
        b = -a * scale * (second * scale / count)
        to = coefficients + view * 3 * channels + c
        tl.store(to, a, mask=c < channels)
        tl.store(to + channels, b, mask=c < channels)
        tl.store(to + 2 * channels, -a * (first / count) - b * center, mask=c < channels)
    tl.store(grad_weight + c, weights, mask=c < channels)
    tl.store(grad_bias + c, biases, mask=c < channels)


@triton.jit
def _input_gradient(
    grad, x, mean, inv_std, weight, bias, coefficients, out, rows, channels,
    BY_INPUT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    at, inside, cv, c = _tile(tl.program_id(0), rows, channels, BLOCK_R, BLOCK_C)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if BY_INPUT:
        scale, shift = _affine(mean, inv_std, weight, bias, cv, c, channels)
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
    base = coefficients + tl.program_id(2) * 3 * channels + c
    a = tl.load(base, mask=c < channels, other=0.0)
    b = tl.load(base + channels, mask=c < channels, other=0.0)
    d = tl.load(base + 2 * channels, mask=c < channels, other=0.0)
    result = gradient * a[None, :] + value * b[None, :] + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pack(x, bits, size, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    positive = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) > 0
    packed = tl.sum(positive.to(tl.int32) << bit[None, :], 1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < size)


@triton.jit
def _mask(grad, other, source, out, size, MASK: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if OTHER:
        gradient += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(_relu_mask(source, at, inside, MASK), gradient, 0.0)
    tl.store(out + at, gradient.to(out.dtype.element_ty), mask=inside)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def pack(x: Tensor) -> Tensor:
    """One bit per element of x, in memory order: whether it is positive."""
    bits = torch.empty(blocks_of(x.numel(), 8), dtype=torch.uint8, device=x.device)
    _pack[(blocks_of(len(bits), 512),)](x, bits, x.numel(), BLOCK=512)
    return bits


def arrived(grad: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of the two consumers, of which one may have sent none: the first is always there."""
    if grad is None:
        grad, other = other, None
    assert grad is not None
    return channels_last(grad), None if other is None else channels_last(other)


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
        weight_gradients.join(given[0].device)
        cast = [torch.empty_like(grad, dtype=ctx.dtype) for grad in given]
        torch._foreach_copy_(cast, given)
        back = iter(cast)
        return None, *(None if grad is None else next(back) for grad in grads)


def cast_all(weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return _Cast.apply(dtype, *weights) if weights and weights[0].dtype is not dtype else tuple(weights)


def batch_statistics(x: Tensor, norm: nn.modules.batchnorm._BatchNorm, views: int) -> tuple[Tensor, Tensor, bool]:
    """Mean and 1 / sqrt(var + eps) of every view, (views, C) each, and whether they are those of all processes. The
    running statistics are updated."""
    tiles = Tiles(x, views, "sums")
    mean, inv_std = torch.empty(2, views, tiles.channels, device=x.device)
    partial = tiles.partial_sums(x)
    _sums[tiles.sum_grid](x, partial, *tiles.sum_size, **tiles.block)
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    shared = processes.joined() and is_synchronised(norm)
    moments = tiles.all_moments(partial, x) if shared else partial
    flags = {"VIEWS": views, "TRACK": norm.track_running_stats, "SHARED": shared, **tiles.channel_block}
    sizes = (*tiles.sum_size, processes.world_size() if shared else 1)
    settings = (norm.momentum, norm.eps)
    _statistics[tiles.channel_grid](partial, moments, x, *running, mean, inv_std, *sizes, *settings, **flags)
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
    _gradient_sums[tiles.sum_grid](*given, x, *affine, total, partial, *tiles.sum_size, **flags)

    coefficients = torch.empty(views, 3, tiles.channels, device=x.device)
    grad_input, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    sums = tiles.all_sums(partial) if shared else partial
    flags = {"VIEWS": views, "SHARED": shared, **tiles.channel_block}
    sizes = (*tiles.sum_size, processes.world_size() if shared else 1)
    results = (coefficients, grad_weight, grad_bias)
    _coefficients[tiles.channel_grid](partial, sums, mean, inv_std, weight, *results, *sizes, **flags)

    small = Tiles(x, views, "input_gradient")
    flags = {"BY_INPUT": mask == BY_INPUT and not summed, **small.block}
    _input_gradient[small.grid](total, x, *affine, coefficients, grad_input, *small.size, **flags)
    return grad_input, grad_weight, grad_bias, total


class _NormReLU(torch.autograd.Function):
    """relu(norm(x) + extra + residual); ReLU, extra and residual are optional.

    Returns the result twice, for its two consumers (next layer and shortcut). Their gradients then arrive separately
    and are added in a kernel that reads them anyway; autograd would add them in a kernel of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, extra: Tensor | None,
        norm: nn.modules.batchnorm._BatchNorm, views: int, relu: bool, as_bits: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, residual = channels_last(x), None if residual is None else channels_last(residual)
        mean, inv_std, ctx.shared = batch_statistics(x, norm, views)
        small, out = Tiles(x, views, "normalise"), torch.empty_like(x)
        has_residual, has_extra = residual is not None, extra is not None
        terms = (residual if has_residual else x, extra if has_extra else x)  # x stands for a pointer that is not read
        flags = {"RESIDUAL": has_residual, "EXTRA": has_extra, "RELU": relu}
        _normalise[small.grid](x, *terms, mean, inv_std, weight, bias, out, *small.size, **small.block, **flags)
        ctx.mask = NONE
        if relu:
            ctx.mask = BY_INPUT if not (has_residual or has_extra) else BY_BITS if as_bits else BY_OUTPUT
        ctx.views, ctx.has_residual = views, has_residual
        source = pack(out) if ctx.mask == BY_BITS else out if ctx.mask == BY_OUTPUT else None
        ctx.save_for_backward(x, weight, bias, mean, inv_std, source)
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inv_std, source = ctx.saved_tensors
        grad, other = arrived(grad, other)
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
        if not x.is_cuda:
            out = F.conv2d(x, weight, bias, *settings)
            out = (out if residual is None else out + residual).relu()
        elif residual is None:
            out = torch.cudnn_convolution_relu(x, weight, bias, *settings)
        else:
            out = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *settings)
        out = channels_last(out)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            ctx.mask = BY_BITS if as_bits else BY_OUTPUT
            ctx.save_for_backward(weight, pack(out) if as_bits else out)
            ctx.settings, ctx.size = settings, x.shape[2:]
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, source = ctx.saved_tensors
        grad, other = arrived(grad, other)
        total, grad_input, size = torch.empty_like(grad), None, grad.numel()
        given = (grad, grad if other is None else other, source)  # grad stands for a pointer that is not read
        _mask[(blocks_of(size, 4096),)](*given, total, size, ctx.mask, other is not None, BLOCK=4096)
        if ctx.needs_input_grad[0]:
            grad_input = input_gradient(total, weight, ctx.size, *ctx.settings)
        return grad_input, None, None, total if ctx.needs_input_grad[3] else None, None, None, None
