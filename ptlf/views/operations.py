"""View, the settings of one augmentation, computed on the device from uint8 images and a row of uniforms per image.

Shapes are static and no value is read on the host, so the code runs eagerly, compiled, or in a CUDA graph. Values stay
float32 after the crop; a Pillow pipeline would round to 8 bits between steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ptlf.core.errors import UserError

BRIGHTNESS, CONTRAST, SATURATION = 0, 1, 2  # kinds of `blend`
Pair = tuple[float, float]
Triple = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)

# Columns of one row of uniforms: the areas of all crop attempts, their aspect ratios, then one column per name.
ATTEMPTS = 10
JITTER = ("jitter", "order", "brightness", "contrast", "saturation", "hue")
NAMES = ("top", "left", "flip", *JITTER, "grey", "blur", "sigma", "solarise")
COLUMNS = {name: 2 * ATTEMPTS + i for i, name in enumerate(NAMES)}
UNIFORMS_PER_VIEW = 2 * ATTEMPTS + len(NAMES)


@dataclass(frozen=True)
class View:
    """Settings of one view. A probability or strength of 0 skips the step."""

    crop_scale: Pair = (0.2, 1.0)  # fraction of the image's area
    crop_ratio: Pair = (3 / 4, 4 / 3)  # width / height
    interpolation: Interpolation = "bilinear"
    padding: int = 0  # pixels; > 0: crop `size` from the zero-padded image instead of a random resized crop
    flip: float = 0.5  # probability
    jitter: float = 0.0  # probability; the next four are strengths
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # in turns of the colour circle
    grey: float = 0.0  # probability
    blur: float = 0.0  # probability
    blur_sigma: Pair = (0.1, 2.0)  # pixels
    solarise: float = 0.0  # probability
    mean: Triple = CIFAR_MEAN
    std: Triple = CIFAR_STD


def draw(batch: int, generator: torch.Generator, views: int = 2) -> Tensor:
    """(views, batch, UNIFORMS_PER_VIEW) uniforms in [0, 1) on the CPU: all the randomness of the views."""
    return torch.rand((views, batch, UNIFORMS_PER_VIEW), generator=generator)


Augment = Callable[[Tensor, Tensor, View, int], Tensor]


@torch.no_grad()
def apply_view(images: Tensor, u: Tensor, view: View, size: int) -> Tensor:
    """images (B, H, W, 3) uint8, u (B, UNIFORMS_PER_VIEW) -> (B, 3, size, size) float32, normalised."""
    check_images(images)
    if u.shape != (len(images), UNIFORMS_PER_VIEW):
        raise ValueError(f"uniforms have shape {tuple(u.shape)}, expected {(len(images), UNIFORMS_PER_VIEW)}")
    u = u.to(images.device)
    x = crop(images, u, view, size)
    if view.jitter and (view.brightness or view.contrast or view.saturation or view.hue):
        x = jitter(x, u, view)
    if view.grey:
        x = torch.where(happens(u, "grey", view.grey)[:, None, None, None], luma(x), x)
    kernel = size // 20 * 2 + 1  # taps
    if view.blur and kernel > 1:
        blurred = blur(x, between(u, "sigma", *view.blur_sigma), kernel)
        x = torch.where(happens(u, "blur", view.blur)[:, None, None, None], blurred, x)
    if view.solarise:
        x = torch.where(happens(u, "solarise", view.solarise)[:, None, None, None] & (x >= 0.5), 1 - x, x)
    return normalise_channels(x, view.mean, view.std)


def make_views(
    images: Tensor, u: Tensor, specs: Sequence[View], size: int, augment: Augment = apply_view, *, at_once: bool = False
) -> list[Tensor]:
    """images (B, H, W, 3) uint8, u (V, B, UNIFORMS_PER_VIEW) -> V tensors (B, 3, size, size).

    augment: `apply_view`, or a compiled version of it. at_once: views with equal settings are computed in one call.
    """
    if at_once and all(view == specs[0] for view in specs):
        copies = images.repeat(len(specs), 1, 1, 1)
        return list(augment(copies, u.flatten(0, 1), specs[0], size).chunk(len(specs)))
    return [augment(images, row, view, size) for row, view in zip(u, specs, strict=True)]


@torch.no_grad()
def normalise(images: Tensor, mean: Triple, std: Triple, size: int | None = None) -> Tensor:
    """The evaluation view: (B, H, W, 3) uint8 -> (B, 3, size, size), centre-cropped.

    An image smaller than `size` is first enlarged, bilinearly, until its short side is `size`.
    """
    check_images(images)
    x = images.permute(0, 3, 1, 2)
    if size is not None:
        if (short := min(x.shape[2:])) < size:
            start = torch.zeros(len(x), device=x.device)
            sides = [(side, side * size // short) for side in x.shape[2:]]
            rows, columns = (resample_matrix(start, start + old, old, new, "bilinear") for old, new in sides)
            x = separable(x, rows, columns)
        top, left = (round((side - size) / 2) for side in x.shape[2:])
        x = x[:, :, top : top + size, left : left + size]
    return normalise_channels(x.to(torch.float32, memory_format=torch.contiguous_format) / 255, mean, std)


def check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 of shape (B, H, W, 3), got {images.dtype} {tuple(images.shape)}")


def between(u: Tensor, name: str, low: float, high: float) -> Tensor:
    """(B,) uniform on [low, high)."""
    return low + (high - low) * u[:, COLUMNS[name]]


def happens(u: Tensor, name: str, probability: float) -> Tensor:
    """(B,) bool, true with this probability."""
    return u[:, COLUMNS[name]] < probability


def pick(u: Tensor, name: str, choices: Tensor | int) -> Tensor:
    """Random integers 0 .. choices - 1, as floats. In float32 u * n < n for every u < 1, so n is never drawn."""
    return (u[:, COLUMNS[name]] * choices).floor()


def crop(images: Tensor, u: Tensor, view: View, size: int) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, size, size) in [0, 1]: cropped, resized and flipped."""
    height, width = images.shape[1:3]
    if view.padding:  # the corner in coordinates of the unpadded image: it may be negative
        pad = view.padding
        if min(height, width) + 2 * pad < size:
            raise UserError(f"{height}x{width} images padded by {pad} hold no crop of {size}: lower the size")
        top = pick(u, "top", height + 2 * pad - size + 1) - pad
        left = pick(u, "left", width + 2 * pad - size + 1) - pad
        h = w = torch.full_like(top, size)
    else:
        top, left, h, w = crop_boxes(u, height, width, view.crop_scale, view.crop_ratio)
    rows = resample_matrix(top, h, height, size, view.interpolation)
    columns = resample_matrix(left, w, width, size, view.interpolation, happens(u, "flip", view.flip))
    # Scaled to [0, 1] only afterwards: levels 0..255 are exact inputs, also where the GPU multiplies in TF32.
    x = separable(images.permute(0, 3, 1, 2), rows, columns, clamp=view.interpolation == "bicubic")
    return torch.mul(x, 1 / 255).contiguous()


def crop_boxes(u: Tensor, height: int, width: int, scale: Pair, ratio: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """top, left, height, width of each crop: (B,) integers as floats.

    Like torchvision's RandomResizedCrop: the first of ten attempts that fits, else the largest centred allowed crop.
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, :ATTEMPTS])
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(log_low + (log_high - log_low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    last_h, last_w = min(height, round(width / ratio[0])), min(width, round(height * ratio[1]))
    h = F.pad((area / aspect).sqrt().round(), (0, 1), value=last_h)  # (B, 11), the last column is the fallback
    w = F.pad((area * aspect).sqrt().round(), (0, 1), value=last_w)
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    first = fits.to(torch.uint8).argmax(dim=1, keepdim=True)
    h, w = h.gather(1, first).squeeze(1), w.gather(1, first).squeeze(1)
    centred = first.squeeze(1) == ATTEMPTS
    top = torch.where(centred, float((height - last_h) // 2), pick(u, "top", height - h + 1))
    left = torch.where(centred, float((width - last_w) // 2), pick(u, "left", width - w + 1))
    return top, left, h, w


def cubic(t: Tensor) -> Tensor:
    """Keys' cubic kernel with a = -0.5, as in Pillow."""
    t = t.abs()
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    return torch.where(t < 1, near, far * (t < 2))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": lambda t: (1 - t.abs()).clamp_min(0), "bicubic": cubic}


def resample_matrix(
    start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str, flip: Tensor | None = None
) -> Tensor:
    """(B, size_out, size_in) weights that resize the pixels [start, start + length) to size_out, mirrored where `flip`.

    Pillow's weights for a crop followed by a resize. Rows outside the image, where it is padded, are 0.
    """
    step = (length / size_out)[:, None, None]
    position = torch.arange(size_out, device=start.device, dtype=torch.float32)[None]  # (B or 1, size_out)
    if flip is not None:
        position = torch.where(flip[:, None], size_out - 1 - position, position)
    centre = (position + 0.5)[:, :, None] * step  # pixels from the crop's edge
    pixel = (torch.arange(size_in, device=start.device) + 0.5 - start[:, None])[:, None, :]
    weight = KERNELS[interpolation]((pixel - centre) / step.clamp_min(1))
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return weight / weight.sum(dim=2, keepdim=True).clamp_min(1e-6)


def separable(x: Tensor, rows: Tensor, columns: Tensor, clamp: bool = False) -> Tensor:
    """rows @ x @ columns^T per channel: x (B, C, H, W), rows (B, h, H), columns (B, w, W) -> (B, C, h, w) float32.

    clamp: clip to 0..255 after each product, as Pillow does with the overshoot of a bicubic kernel.
    """
    b, c, height, _ = x.shape
    # With the layout (B, H, C, W) both products are plain `bmm` calls without a copy between them.
    x = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)
    with torch.autocast(x.device.type, enabled=False):
        x = torch.bmm(x, columns.mT)
        x = x.clamp_(0, 255) if clamp else x
        x = torch.bmm(rows, x.view(b, height, -1))
    x = x.clamp_(0, 255) if clamp else x
    return x.view(b, rows.shape[1], c, columns.shape[1]).transpose(1, 2)


def jitter(x: Tensor, u: Tensor, view: View) -> Tensor:
    """Brightness, contrast, saturation and hue in a random order, with probability view.jitter per image."""
    on = happens(u, "jitter", view.jitter)
    strengths = {"brightness": view.brightness, "contrast": view.contrast, "saturation": view.saturation}
    factors = torch.stack([between(u, name, max(0.0, 1 - s), 1 + s) for name, s in strengths.items()], dim=1)
    factors = torch.where(on[:, None], factors, 1.0)
    shift = torch.where(on, between(u, "hue", -view.hue, view.hue), 0.0) if view.hue else None
    hue_position, kinds = jitter_order(pick(u, "order", 24))
    return jitter_in_order(x, factors, shift, hue_position, kinds)


def jitter_order(order: Tensor) -> tuple[Tensor, Tensor]:
    """order (B,) in 0..23 -> number of blends before the hue shift (B,), kinds of the three blends in order (B, 3)."""
    order = order.long()
    hue_position, rest = order // 6, order % 6
    first, step = rest // 2, 1 + rest % 2  # the six permutations of three kinds: three starts, ascending or descending
    return hue_position, torch.stack([(first + slot * step) % 3 for slot in range(3)], dim=1)


def jitter_in_order(x: Tensor, factors: Tensor, shift: Tensor | None, hue_position: Tensor, kinds: Tensor) -> Tensor:
    """factors (B, 3) by kind, shift (B,) in turns. For static shapes all blends run on both sides of the hue shift."""
    factors = factors.gather(1, kinds)
    if shift is None:
        return blends(x, factors, kinds)
    before = torch.arange(3, device=x.device) < hue_position[:, None]  # (B, 3)
    x = shift_hue(blends(x, torch.where(before, factors, 1.0), kinds), shift)
    return blends(x, torch.where(before, 1.0, factors), kinds)


def blends(x: Tensor, factors: Tensor, kinds: Tensor) -> Tensor:
    for slot in range(3):
        x = blend(x, factors[:, slot], kinds[:, slot])
    return x


def blend(x: Tensor, factor: Tensor, kind: Tensor) -> Tensor:
    """clamp(factor * x + (1 - factor) * base) with base black, the mean grey level, or the grey image, by `kind`."""
    grey = luma(x)
    factor, kind = factor[:, None, None, None], kind[:, None, None, None]
    to_mean, to_grey = (1 - factor) * (kind == CONTRAST), (1 - factor) * (kind == SATURATION)
    base = torch.addcmul(to_mean * grey.mean(dim=(2, 3), keepdim=True), grey, to_grey)
    return torch.addcmul(base, x, factor).clamp_(0, 1)


def luma(x: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 1, H, W), with the weights of Pillow's mode L."""
    return (x[:, 0:1] * 0.299).add_(x[:, 1:2], alpha=0.587).add_(x[:, 2:3], alpha=0.114)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of x (B, 3, H, W) in [0, 1] by shift (B,), in turns; value and saturation stay the same."""
    red, green, blue = x.unbind(dim=1)
    high, low = x.amax(dim=1), x.amin(dim=1)
    chroma = high - low
    scale = 1 / torch.where(chroma > 0, chroma, 1.0)
    # Hue in sixths of a turn: 0 red, 2 green, 4 blue.
    hue = torch.where(high == green, (blue - red) * scale + 2, (red - green) * scale + 4)
    hue = torch.where(high == red, (green - blue) * scale, hue) + 6 * shift[:, None, None]
    hue = hue - 6 * (hue / 6).floor()
    channels = ((hue - 3).abs_() - 1, 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    return torch.addcmul(low[:, None], torch.stack(channels, dim=1).clamp_(0, 1), chroma[:, None])


def normalise_channels(x: Tensor, mean: Triple, std: Triple) -> Tensor:
    """(x - mean) / std per channel. Filled on the device: a copy from the host cannot be captured in a CUDA graph."""
    offsets = [torch.full((1, 1, 1), -m / s, device=x.device) for m, s in zip(mean, std, strict=True)]
    scales = [torch.full((1, 1, 1), 1 / s, device=x.device) for s in std]
    return torch.addcmul(torch.cat(offsets), x, torch.cat(scales))


def blur(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Gaussian blur of x (B, C, H, W), sigma (B,) in pixels, `kernel` taps, reflected borders."""
    height, width = x.shape[2:]
    rows = blur_matrix(sigma, height, kernel)
    columns = rows if width == height else blur_matrix(sigma, width, kernel)
    return separable(x, rows, columns).contiguous()


def blur_matrix(sigma: Tensor, size: int, kernel: int) -> Tensor:
    """(B, size, size): row i holds the taps around pixel i; taps beyond an edge are added to their mirror pixel."""
    radius = kernel // 2
    distance = torch.arange(radius + 2, device=sigma.device)
    taps = torch.exp(-0.5 * (distance / sigma[:, None]) ** 2) * (distance <= radius)  # (B, radius + 2), the last tap 0
    taps = taps / (2 * taps.sum(dim=1, keepdim=True) - 1)
    pixel = torch.arange(size, device=sigma.device)
    i, j, last = pixel[:, None], pixel[None, :], size - 1
    zero = radius + 1  # index of the tap that is 0
    direct = (i - j).abs().clamp_max(zero)
    at_start = torch.where(j > 0, i + j, zero).clamp_max(zero)
    at_end = torch.where(j < last, 2 * last - i - j, zero).clamp_max(zero)
    return taps[:, direct] + taps[:, at_start] + taps[:, at_end]
