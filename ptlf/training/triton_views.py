"""The augmentation of `ptlf.views.operations` as one Triton kernel: a program per image, which it holds in registers.

Every function does what the one of its name there does, in float32. Nothing is compiled but this kernel, once for every
view, image size and output size. Where rounding decides (the side of a crop, the threshold of a solarisation), a value
that lies on the edge may fall to the other side.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptlf.views import operations
from ptlf.views import view as names
from ptlf.views.view import COLUMNS, NAMES, UNIFORMS_PER_VIEW, View

LARGEST = 64  # side of the output in pixels: three channels of 4096 values in the registers of 16 warps
# Places in a row of uniforms.
TOP, LEFT, FLIP, JITTER, ORDER, BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY, BLUR, SIGMA, SOLARISE = (
    tl.constexpr(COLUMNS[name]) for name in NAMES
)
ATTEMPTS = tl.constexpr(names.ATTEMPTS)
TO_MEAN, TO_GREY = tl.constexpr(operations.CONTRAST), tl.constexpr(operations.SATURATION)  # kinds of `_blend`


def can_apply(images: Tensor, view: View, size: int) -> bool:
    """Whether the kernel covers this call. An impossible crop or blur is left to `operations`, which says so."""
    height, width = images.shape[1:3]
    fits = not view.padding or min(height, width) + 2 * view.padding >= size
    return size <= LARGEST and fits and blur_radius(view, size) < size


def apply_view(images: Tensor, u: Tensor, view: View, size: int, *, channels_last: bool = False) -> Tensor:
    """images (B, H, W, 3) uint8, u (B, UNIFORMS_PER_VIEW) -> (B, 3, size, size) float32, normalised."""
    operations.check_images(images)
    if u.shape != (len(images), UNIFORMS_PER_VIEW):
        raise ValueError(f"uniforms have shape {tuple(u.shape)}, expected {(len(images), UNIFORMS_PER_VIEW)}")
    images, u = images.contiguous(), u.to(images.device).contiguous()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((len(images), 3, size, size), device=images.device, memory_format=layout)
    if len(images):
        _apply_view[(len(images),)](images, u, out, *out.stride(), **settings(view, *images.shape[1:3], size))
    return out


def blur_radius(view: View, size: int) -> int:
    kernel = size // 20 * 2 + 1 if view.blur_kernel is None else view.blur_kernel
    return kernel // 2 if view.blur else 0


@functools.cache
def settings(view: View, height: int, width: int, size: int) -> dict[str, Any]:
    """The kernel's compile-time arguments. Ranges are (low, high), and probabilities have the names of `View`."""
    bicubic, pixels = view.interpolation == "bicubic", 1 << (size * size - 1).bit_length()
    # The longest step between output pixels, in input pixels, and the pixels that a kernel widened by it covers.
    steps = [1.0 if view.padding else max(1.0, side / size) for side in (height, width)]
    taps = [math.ceil((4 if bicubic else 2) * step) for step in steps]
    low, high = view.crop_ratio
    blends = {"brightness": view.brightness, "contrast": view.contrast, "saturation": view.saturation}
    return {
        "scale": floats(view.crop_scale),
        "log_ratio": (math.log(low), math.log(high)),
        "last_h": min(height, round(width / low)),
        "last_w": min(width, round(height * high)),
        "padding": view.padding,
        "bicubic": bicubic,
        "flip": view.flip,
        "jitter": view.jitter if any(blends.values()) or view.hue else 0.0,
        **{name: floats((max(0, 1 - strength), 1 + strength)) for name, strength in blends.items()},
        "hue": floats((-view.hue, view.hue)),
        "grey": view.grey,
        "blur": view.blur,
        "sigma": floats(view.blur_sigma),
        "radius": blur_radius(view, size),
        "solarise": view.solarise,
        "mean": floats(view.mean),
        "std": floats(view.std),
        "HEIGHT": height,
        "WIDTH": width,
        "SIZE": size,
        "DOWN": taps[0],
        "ACROSS": taps[1],
        "PIXELS": pixels,
        "UNIFORMS": UNIFORMS_PER_VIEW,
        "num_warps": min(16, max(1, pixels // 128)),
    }


def floats(values: Iterable[float]) -> tuple[float, ...]:
    """Triton 3.6 does not subtract a float from an integer that stands in a tuple."""
    return tuple(map(float, values))


@triton.jit
def _apply_view(
    images, uniforms, out, by_image, by_channel, by_row, by_column,
    scale: tl.constexpr, log_ratio: tl.constexpr, last_h: tl.constexpr, last_w: tl.constexpr, padding: tl.constexpr,
    bicubic: tl.constexpr, flip: tl.constexpr, jitter: tl.constexpr, brightness: tl.constexpr, contrast: tl.constexpr,
    saturation: tl.constexpr, hue: tl.constexpr, grey: tl.constexpr, blur: tl.constexpr, sigma: tl.constexpr,
    radius: tl.constexpr, solarise: tl.constexpr, mean: tl.constexpr, std: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    PIXELS: tl.constexpr, UNIFORMS: tl.constexpr,
):  # fmt: skip
    """One image. PIXELS: SIZE * SIZE, rounded up to a power of 2; a channel is a vector of that length."""
    image = tl.program_id(0).to(tl.int64)
    u = uniforms + image * UNIFORMS
    pixel = tl.arange(0, PIXELS)
    inside = pixel < SIZE * SIZE
    row, column = pixel // SIZE, pixel % SIZE
    if padding > 0:
        top, left = _padded_corner(u, padding, HEIGHT, WIDTH, SIZE)
        h, w = tl.full((), SIZE, tl.float32), tl.full((), SIZE, tl.float32)
    else:
        top, left, h, w = _crop_box(u, scale, log_ratio, last_h, last_w, HEIGHT, WIDTH)
    mirrored = tl.where(_happens(u, FLIP, flip), SIZE - 1 - column, column)
    red, green, blue = _crop(
        images + image * (HEIGHT * WIDTH * 3), row, mirrored, inside, top, left, h, w, bicubic, HEIGHT, WIDTH, SIZE,
        DOWN, ACROSS,
    )  # fmt: skip
    if jitter > 0 and _happens(u, JITTER, jitter):
        red, green, blue = _jitter(red, green, blue, u, inside, brightness, contrast, saturation, hue, SIZE)
    if grey > 0 and _happens(u, GREY, grey):
        luma = _luma(red, green, blue)
        red, green, blue = luma, luma, luma
    to = out + image * by_image + row * by_row + column * by_column
    if radius > 0 and _happens(u, BLUR, blur):
        width = _between(u, SIGMA, sigma)
        red, green, blue = _blur(red, green, blue, width, to, by_channel, by_column, column, inside, radius, SIZE)
        red, green, blue = _blur(red, green, blue, width, to, by_channel, by_row, row, inside, radius, SIZE)
    if solarise > 0 and _happens(u, SOLARISE, solarise):
        red, green, blue = _solarise(red), _solarise(green), _solarise(blue)
    tl.store(to, _standardise(red, mean[0], std[0]), mask=inside)
    tl.store(to + by_channel, _standardise(green, mean[1], std[1]), mask=inside)
    tl.store(to + 2 * by_channel, _standardise(blue, mean[2], std[2]), mask=inside)


# ---------------------------------------------------------------- reading the uniforms


@triton.jit
def _between(u, NAME: tl.constexpr, limits: tl.constexpr):
    """Uniform on [low, high)."""
    return limits[0] + (limits[1] - limits[0]) * tl.load(u + NAME)


@triton.jit
def _happens(u, NAME: tl.constexpr, probability: tl.constexpr):
    """True with this probability."""
    return tl.load(u + NAME) < probability


@triton.jit
def _pick(u, NAME: tl.constexpr, choices):
    """A random integer 0 .. choices - 1, as a float."""
    return tl.floor(tl.load(u + NAME) * choices)


# ---------------------------------------------------------------- crop, resize and flip


@triton.jit
def _crop_box(
    u, scale: tl.constexpr, log_ratio: tl.constexpr, last_h: tl.constexpr, last_w: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """top, left, height, width of the first attempt that fits into the image, else of the largest centred crop."""
    attempt = tl.arange(0, 16)
    real = attempt < ATTEMPTS
    area = (scale[0] + (scale[1] - scale[0]) * tl.load(u + attempt, mask=real, other=0.0)) * (HEIGHT * WIDTH)
    aspect = tl.load(u + ATTEMPTS + attempt, mask=real, other=0.0)
    aspect = tl.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * aspect)
    h = tl.where(real, _round(tl.sqrt_rn(tl.div_rn(area, aspect))), last_h)
    w = tl.where(real, _round(tl.sqrt_rn(area * aspect)), last_w)
    fits = (h > 0) & (h <= HEIGHT) & (w > 0) & (w <= WIDTH)
    first = tl.min(tl.where(fits, attempt, ATTEMPTS), 0)
    h = tl.sum(tl.where(attempt == first, h, 0.0), 0)
    w = tl.sum(tl.where(attempt == first, w, 0.0), 0)
    centred = first == ATTEMPTS
    top = tl.where(centred, (HEIGHT - last_h) // 2, _pick(u, TOP, HEIGHT - h + 1))
    left = tl.where(centred, (WIDTH - last_w) // 2, _pick(u, LEFT, WIDTH - w + 1))
    return top, left, h, w


@triton.jit
def _round(x):
    """To the nearest integer, halves to the even one: above 2^23 float32 holds only integers."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _padded_corner(u, padding: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Top and left in coordinates of the unpadded image (may be negative)."""
    top = _pick(u, TOP, HEIGHT + 2 * padding - SIZE + 1) - padding
    return top, _pick(u, LEFT, WIDTH + 2 * padding - SIZE + 1) - padding


@triton.jit
def _crop(
    image, row, column, inside, top, left, h, w, bicubic: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The three channels in [0, 1], resized from the box. Every output pixel reads DOWN x ACROSS pixels of the image,
    of which those outside the box have weight 0."""
    y, y_start, y_stop, y_centre, y_narrow = _window(row, top, h, bicubic, HEIGHT, SIZE)
    x, x_start, x_stop, x_centre, x_narrow = _window(column, left, w, bicubic, WIDTH, SIZE)
    y_norm = _norm(y, y_start, y_stop, y_centre, y_narrow, bicubic, DOWN)
    x_norm = _norm(x, x_start, x_stop, x_centre, x_narrow, bicubic, ACROSS)
    corner = image + (top.to(tl.int32) * WIDTH + left.to(tl.int32)) * 3
    zero = y_centre * 0.0
    red, green, blue = zero, zero, zero
    for i in range(DOWN):
        in_row = inside & (y + i >= y_start) & (y + i < y_stop)
        r, g, b = zero, zero, zero
        for j in range(ACROSS):
            used = in_row & (x + j >= x_start) & (x + j < x_stop)
            weight = _weight(x + j, x_start, x_stop, x_centre, x_narrow, bicubic) * x_norm
            at = corner + ((y + i) * WIDTH + x + j) * 3
            r += weight * tl.load(at, mask=used, other=0).to(tl.float32)
            g += weight * tl.load(at + 1, mask=used, other=0).to(tl.float32)
            b += weight * tl.load(at + 2, mask=used, other=0).to(tl.float32)
        weight = _weight(y + i, y_start, y_stop, y_centre, y_narrow, bicubic) * y_norm
        red += weight * _level(r, bicubic)
        green += weight * _level(g, bicubic)
        blue += weight * _level(b, bicubic)
    return _level(red, bicubic) * (1 / 255), _level(green, bicubic) * (1 / 255), _level(blue, bicubic) * (1 / 255)


@triton.jit
def _window(position, start, length, bicubic: tl.constexpr, SIDE: tl.constexpr, SIZE: tl.constexpr):
    """Where output pixels lie along one axis, in input pixels from the edge of the box: the first pixel with a weight,
    the range of pixels that are in box and image, the centre, and the factor by which the kernel is narrowed."""
    step = length / SIZE
    width = tl.maximum(step, 1.0)
    centre = (position.to(tl.float32) + 0.5) * step
    first = tl.floor(centre - (2.0 if bicubic else 1.0) * width + 0.5).to(tl.int32)
    stop = tl.minimum(length, SIDE - start)
    return first, tl.maximum(-start, 0.0).to(tl.int32), stop.to(tl.int32), centre, 1 / width


@triton.jit
def _weight(pixel, start, stop, centre, narrow, bicubic: tl.constexpr):
    """The kernel's weight of an input pixel, not normalised."""
    t = tl.abs(pixel.to(tl.float32) + 0.5 - centre) * narrow
    weight = _cubic(t) if bicubic else tl.maximum(1 - t, 0.0)
    return tl.where((pixel >= start) & (pixel < stop), weight, 0.0)


@triton.jit
def _norm(first, start, stop, centre, narrow, bicubic: tl.constexpr, TAPS: tl.constexpr):
    """1 / the sum of the weights."""
    total = centre * 0.0
    for i in range(TAPS):
        total += _weight(first + i, start, stop, centre, narrow, bicubic)
    return 1 / tl.maximum(total, 1e-6)


@triton.jit
def _cubic(t):
    """Keys' cubic kernel with a = -0.5, for t >= 0."""
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    return tl.where(t < 1, near, tl.where(t < 2, far, 0.0))


@triton.jit
def _level(x, bicubic: tl.constexpr):
    """Clipped to 0..255, where the kernel overshoots."""
    return tl.minimum(tl.maximum(x, 0.0), 255.0) if bicubic else x


# ---------------------------------------------------------------- colour


@triton.jit
def _jitter(
    red, green, blue, u, inside, brightness: tl.constexpr, contrast: tl.constexpr, saturation: tl.constexpr,
    hue: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Brightness, contrast, saturation and hue in a random order."""
    darker, flatter = _between(u, BRIGHTNESS, brightness), _between(u, CONTRAST, contrast)
    paler, turns = _between(u, SATURATION, saturation), _between(u, HUE, hue)
    order = _pick(u, ORDER, 24).to(tl.int32)
    hue_position, rest = order // 6, order % 6
    for slot in range(4):
        if slot == hue_position:
            if hue[1] > 0:
                red, green, blue = _shift_hue(red, green, blue, turns)
        else:
            blend = tl.where(slot < hue_position, slot, slot - 1)
            kind = (rest // 2 + blend * (1 + rest % 2)) % 3
            factor = tl.where(kind == TO_MEAN, flatter, tl.where(kind == TO_GREY, paler, darker))
            red, green, blue = _blend(red, green, blue, factor, kind, inside, SIZE)
    return red, green, blue


@triton.jit
def _blend(red, green, blue, factor, kind, inside, SIZE: tl.constexpr):
    """clamp(factor * x + (1 - factor) * base) with base black, the mean grey level, or the grey image, by `kind`."""
    base = red * 0.0
    if kind == TO_GREY:
        base = (1 - factor) * _luma(red, green, blue)
    elif kind == TO_MEAN:
        base += (1 - factor) * (tl.sum(tl.where(inside, _luma(red, green, blue), 0.0), 0) / (SIZE * SIZE))
    return _unit(base + factor * red), _unit(base + factor * green), _unit(base + factor * blue)


@triton.jit
def _unit(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luma(red, green, blue):
    """With the weights of Pillow's mode L."""
    return red * 0.299 + green * 0.587 + blue * 0.114


@triton.jit
def _shift_hue(red, green, blue, shift):
    """Rotate the hue by `shift` turns; value and saturation stay the same."""
    high = tl.maximum(tl.maximum(red, green), blue)
    low = tl.minimum(tl.minimum(red, green), blue)
    chroma = high - low
    scale = 1 / tl.where(chroma > 0, chroma, 1.0)
    hue = tl.where(high == green, (blue - red) * scale + 2, (red - green) * scale + 4)
    hue = tl.where(high == red, (green - blue) * scale, hue) + 6 * shift
    hue = hue - 6 * tl.floor(hue * (1 / 6))
    red = low + chroma * _unit(tl.abs(hue - 3) - 1)
    return red, low + chroma * _unit(2 - tl.abs(hue - 2)), low + chroma * _unit(2 - tl.abs(hue - 4))


@triton.jit
def _solarise(x):
    return tl.where(x >= 0.5, 1 - x, x)


@triton.jit
def _standardise(x, mean: tl.constexpr, std: tl.constexpr):
    return x * (1 / std) + (-mean / std)


# ---------------------------------------------------------------- blur


@triton.jit
def _blur(
    red, green, blue, sigma, to, by_channel, by_pixel, position, inside, radius: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Gaussian blur along one axis, with reflected borders: threads exchange their pixels through the output's memory.

    to: address of each pixel. by_pixel: from there to the next pixel along the axis. position: along the axis.
    """
    _exchange(red, green, blue, to, by_channel, inside)
    total = sigma * 0.0 + 1
    for distance in range(1, radius + 1):
        tap = tl.exp(-0.5 * (distance / sigma) * (distance / sigma))
        total += 2 * tap
        end = position + distance
        end = tl.where(end > SIZE - 1, 2 * (SIZE - 1) - end, end)
        before = to + (tl.abs(position - distance) - position) * by_pixel
        after = to + (end - position) * by_pixel
        red += tap * (tl.load(before, inside) + tl.load(after, inside))
        green += tap * (tl.load(before + by_channel, inside) + tl.load(after + by_channel, inside))
        blue += tap * (tl.load(before + 2 * by_channel, inside) + tl.load(after + 2 * by_channel, inside))
    tl.debug_barrier()  # all have read, before somebody writes again
    norm = 1 / total
    return red * norm, green * norm, blue * norm


@triton.jit
def _exchange(red, green, blue, to, by_channel, inside):
    """Stores the channels, where all threads of the program can read them afterwards."""
    tl.store(to, red, mask=inside)
    tl.store(to + by_channel, green, mask=inside)
    tl.store(to + 2 * by_channel, blue, mask=inside)
    tl.debug_barrier()
