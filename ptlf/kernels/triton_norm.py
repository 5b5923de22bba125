"""Triton kernels for batch norm, residual sum and ReLU in training, and for the CIFAR stem; `norm` launches them.

Tensors are channels-last: memory holds one row of C channels per (image, height, width). The batch consists of `views`
equal parts, each normalised by its own statistics. Reductions start at the end of a tensor, because the convolution
before has left its last rows in the cache. They add in a fixed order, so that a repeated step gives the same bits.
"""

import triton
import triton.language as tl


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
def _affine(mean, inv_std, weight, bias, cv, c, channels):
    """The norm as scale and shift: the same bits in forward and backward, which recomputes the mask from them."""
    inside = c < channels
    scale = tl.load(inv_std + cv, mask=inside, other=0.0) * tl.load(weight + c, mask=inside, other=0.0)
    shift = tl.load(bias + c, mask=inside, other=0.0) - tl.load(mean + cv, mask=inside, other=0.0) * scale
    return scale, shift


@triton.jit
def _sums(x, partial, rows, channels, parts, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Partial sums of x - pivot and its square. The pivot, one value, is near the mean: no digits are lost."""
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
def _add_up(
    partial, x, sums, rows, channels, parts,
    MOMENTS: tl.constexpr, VIEWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Both sums of every view, (views, 2, C), or (MOMENTS) mean and variance, from the partial sums."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    for view in tl.static_range(VIEWS):
        if MOMENTS:
            first, second = _moments_of(partial, x, view, rows, channels, parts, c, BLOCK_P)
        else:
            first, second = _load_sums(partial, view, parts, channels, c, BLOCK_P)
        tl.store(sums + view * 2 * channels + c, first, mask=c < channels)
        tl.store(sums + (view * 2 + 1) * channels + c, second, mask=c < channels)


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
    """Mean and 1 / sqrt(var + eps) of every view, from partial sums or (SHARED) moments. Running ones follow."""
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
    """Partial sums of the masked gradient (OTHER: of two terms; TOTAL: stored), and of its product with x - mean."""
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
    """a, b, d of every view and channel: the input gradient is a * gradient + b * input + d. SHARED: of the sums over
    all processes, (views, 2, C). The gradients of the norm's weight and bias are of this process's rows."""
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


@triton.jit
def _patches(x, out, size, height, width, by_image, by_channel, by_row, by_column, BLOCK: tl.constexpr):
    """32 values per pixel: the 27 of its 3 x 3 neighbourhood, in the order of a conv weight, and five zeros."""
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
