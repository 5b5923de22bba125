"""Batched views on the device: a pure function of the uint8 images and of one row of uniforms per image.

`draw` makes the uniforms on the CPU; everything after it is tensor code with static shapes and no look at a value, so
it runs eagerly, compiled, or captured. Order: crop, flip, colour jitter, grey, blur, solarise, normalise. Values stay
float32 from the crop on: nothing is rounded to 8 bits between steps, as it is in a Pillow pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ptlf.core.errors import UserError, unknown
from ptlf.core.settings import key

Triple = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)
TINY_MEAN, TINY_STD = (0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)  # CaSSLe's public code has .228, not .229

# One row of uniforms: (area, ratio) for each crop attempt, then one column per name.
ATTEMPTS = 10
CROP = ("top", "left", "flip")
COLOUR = ("jitter", "order", "brightness", "contrast", "saturation", "hue", "grey")
NAMES = (*CROP, *COLOUR, "blur", "sigma", "solarise")
COLUMNS = {name: 2 * ATTEMPTS + i for i, name in enumerate(NAMES)}
UNIFORMS_PER_VIEW = 2 * ATTEMPTS + len(NAMES)

BRIGHTNESS, CONTRAST, SATURATION = 0, 1, 2


@dataclass(frozen=True)
class View:
    """One view's augmentation. A probability or a strength of 0 leaves the step out."""

    crop_scale: tuple[float, float] = (0.2, 1.0)  # share of the image's area
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    interpolation: Interpolation = "bilinear"
    padding: int = 0  # > 0: crop of `size` from the zero-padded image, in place of the resized crop
    flip: float = 0.5
    jitter: float = 0.0  # probability; the four below are strengths
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # in turns of the colour circle
    grey: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # pixels
    blur_kernel: int | None = None  # None: size // 20 * 2 + 1
    solarise: float = 0.0
    mean: Triple = CIFAR_MEAN
    std: Triple = CIFAR_STD

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grey", "blur", "solarise"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a probability, between 0 and 1; got {getattr(self, name)}")
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UserError(f"{name} is a range (low, high) with 0 < low <= high; got ({low}, {high})")
        for name in ("brightness", "contrast", "saturation", "padding"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative; got {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise UserError(f"hue is a strength between 0 and 0.5 turns; got {self.hue}")
        if self.interpolation not in KERNELS:
            raise unknown("interpolation", self.interpolation, KERNELS)
        if self.blur_kernel is not None and (self.blur_kernel < 1 or self.blur_kernel % 2 == 0):
            raise UserError(f"blur_kernel must be odd and positive, or left out; got {self.blur_kernel}")


# ---------------------------------------------------------------- the two calls of a training step


def draw(batch: int, generator: torch.Generator, views: int = 2) -> Tensor:
    """(views, batch, UNIFORMS_PER_VIEW) uniforms in [0, 1) on the CPU: all the randomness of the views."""
    return torch.rand((views, batch, UNIFORMS_PER_VIEW), generator=generator)


def make_views(
    images: Tensor,
    uniforms: Tensor,
    specs: Sequence[View],
    size: int,
    augment: Callable[[Tensor, Tensor, View, int], Tensor] | None = None,
    *,
    at_once: bool = False,
) -> list[Tensor]:
    """images (B, H, W, 3) uint8, uniforms (V, B, UNIFORMS_PER_VIEW) -> V tensors (B, 3, size, size).

    augment: `apply_view`, or a compiled form of it. at_once: views of the same kind are made in one call.
    """
    if len(uniforms) != len(specs):
        raise ValueError(f"there are {len(specs)} views, uniforms were drawn for {len(uniforms)}")
    augment = augment or apply_view
    if at_once and all(view == specs[0] for view in specs):
        copies = images.repeat(len(specs), 1, 1, 1)
        return list(augment(copies, uniforms.flatten(0, 1), specs[0], size).chunk(len(specs)))
    return [augment(images, u, view, size) for u, view in zip(uniforms, specs, strict=True)]


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
        x = torch.where(happens(u, "grey", view.grey), luma(x), x)
    kernel = size // 20 * 2 + 1 if view.blur_kernel is None else view.blur_kernel
    if view.blur and kernel > 1:
        x = torch.where(happens(u, "blur", view.blur), blur(x, between(u, "sigma", *view.blur_sigma), kernel), x)
    if view.solarise:
        x = torch.where(happens(u, "solarise", view.solarise), solarise(x), x)
    return standardise(x, view.mean, view.std)


@torch.no_grad()
def normalise(images: Tensor, mean: Triple, std: Triple, size: int | None = None) -> Tensor:
    """The evaluation view: (B, H, W, 3) uint8 -> (B, 3, size, size). Larger images are cropped at the centre; of
    smaller ones the shorter side is first enlarged to `size`, bilinearly."""
    check_images(images)
    x = images.permute(0, 3, 1, 2)
    if size is not None:
        if min(x.shape[2:]) < size:
            x = enlarge(x, size)
        top, left = (round((side - size) / 2) for side in x.shape[2:])
        x = x[:, :, top : top + size, left : left + size]
    return standardise(x.to(torch.float32, memory_format=torch.contiguous_format) / 255, mean, std)


def check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 of shape (B, H, W, 3), got {images.dtype} {tuple(images.shape)}")


# ---------------------------------------------------------------- reading the uniforms


def column(u: Tensor, name: str) -> Tensor:
    return u[:, COLUMNS[name]]


def between(u: Tensor, name: str, low: float, high: float) -> Tensor:
    """(B,) uniform on [low, high)."""
    return low + (high - low) * column(u, name)


def happens(u: Tensor, name: str, probability: float) -> Tensor:
    """(B, 1, 1, 1) bool, true with this probability."""
    return (column(u, name) < probability)[:, None, None, None]


def pick(uniform: Tensor, choices: Tensor | int) -> Tensor:
    """Whole numbers 0 .. choices - 1, equally likely, as floats. A float32 below 1, times n, never rounds up to n."""
    return (uniform * choices).floor()


# ---------------------------------------------------------------- crop, resize and flip: one product per axis


def crop(images: Tensor, u: Tensor, view: View, size: int) -> Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, size, size) in [0, 1]: cropped, resized and flipped."""
    height, width = images.shape[1:3]
    flip = column(u, "flip") < view.flip
    if view.padding:
        top, left = padded_corner(u, height, width, view.padding, size)
        rows, columns = shift_matrix(top, height, size), shift_matrix(left, width, size, flip)
    else:
        top, left, h, w = crop_boxes(u, height, width, view.crop_scale, view.crop_ratio)
        rows = resample_matrix(top, h, height, size, view.interpolation)
        columns = resample_matrix(left, w, width, size, view.interpolation, flip)
    # Levels 0..255 until here: they are exact in every precision the products might be run in.
    x = separable(images.permute(0, 3, 1, 2), rows, columns, clamp=view.interpolation == "bicubic")
    return torch.mul(x, 1 / 255).contiguous()


def crop_boxes(
    u: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """top, left, height, width of each crop, (B,) whole numbers as floats.

    As torchvision's RandomResizedCrop: the first of ten attempts that fits in the image, else the largest centred
    crop whose ratio is allowed.
    """
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:, :ATTEMPTS])
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(log_low + (log_high - log_low) * u[:, ATTEMPTS : 2 * ATTEMPTS])
    last_h, last_w = fallback_box(height, width, ratio)
    h = F.pad((area / aspect).sqrt().round(), (0, 1), value=last_h)  # (B, 11), the last column always fits
    w = F.pad((area * aspect).sqrt().round(), (0, 1), value=last_w)
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    first = fits.to(torch.uint8).argmax(dim=1, keepdim=True)
    h, w = h.gather(1, first).squeeze(1), w.gather(1, first).squeeze(1)
    centred = first.squeeze(1) == ATTEMPTS
    top = torch.where(centred, float((height - last_h) // 2), pick(column(u, "top"), height - h + 1))
    left = torch.where(centred, float((width - last_w) // 2), pick(column(u, "left"), width - w + 1))
    return top, left, h, w


def fallback_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def padded_corner(u: Tensor, height: int, width: int, padding: int, size: int) -> tuple[Tensor, Tensor]:
    """Top and left of a crop of `size` from the padded image, in coordinates of the image itself (may be negative)."""
    room = [side + 2 * padding - size for side in (height, width)]
    if min(room) < 0:
        raise UserError(f"{height}x{width} images padded by {padding} hold no crop of {size}: lower the size")
    return pick(column(u, "top"), room[0] + 1) - padding, pick(column(u, "left"), room[1] + 1) - padding


def triangle(t: Tensor) -> Tensor:
    return (1 - t.abs()).clamp_min(0)


def cubic(t: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, Pillow's."""
    t = t.abs()
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    return torch.where(t < 1, near, far * (t < 2))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": triangle, "bicubic": cubic}


def resample_matrix(
    start: Tensor, length: Tensor, size_in: int, size_out: int, interpolation: str, flip: Tensor | None = None
) -> Tensor:
    """(B, size_out, size_in): the pixels [start, start + length) of a line, resized to size_out, mirrored where flip.

    Pillow's weights for a crop that is then resized: half-pixel centres, a kernel widened when shrinking, nothing
    read outside of the crop, rows that sum to 1.
    """
    step = (length / size_out)[:, None, None]
    centre = (places(size_out, flip, start) + 0.5)[:, :, None] * step  # from the crop's edge
    pixel = (torch.arange(size_in, device=start.device) + 0.5 - start[:, None])[:, None, :]
    weight = KERNELS[interpolation]((pixel - centre) / step.clamp_min(1))
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return weight / weight.sum(dim=2, keepdim=True)


def shift_matrix(start: Tensor, size_in: int, size_out: int, flip: Tensor | None = None) -> Tensor:
    """(B, size_out, size_in): the pixels [start, start + size_out) of a line, zero outside of it."""
    source = places(size_out, flip, start) + start[:, None]
    pixel = torch.arange(size_in, device=start.device)
    return (source[:, :, None] == pixel).float()


def places(size: int, flip: Tensor | None, like: Tensor) -> Tensor:
    """(B or 1, size): 0, 1, .. size - 1, or the reverse where flip."""
    forward = torch.arange(size, device=like.device, dtype=torch.float32)[None]
    return forward if flip is None else torch.where(flip[:, None], size - 1 - forward, forward)


def separable(x: Tensor, rows: Tensor, columns: Tensor, clamp: bool = False) -> Tensor:
    """x (B, C, H, W), rows (B, h, H), columns (B, w, W) -> rows x columns^T, (B, C, h, w) float32.

    clamp to levels 0..255 after each product, where Pillow clips what a bicubic kernel overshoots.
    """
    b, c, height, _ = x.shape
    # Stored as (B, H, C, W), both products are plain batched ones with no copy between them.
    x = x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)
    with torch.autocast(x.device.type, enabled=False):
        x = torch.bmm(x, columns.mT)
        x = x.clamp_(0, 255) if clamp else x
        x = torch.bmm(rows, x.view(b, height, -1))
    x = x.clamp_(0, 255) if clamp else x
    return x.view(b, rows.shape[1], c, columns.shape[1]).transpose(1, 2)


def enlarge(x: Tensor, size: int) -> Tensor:
    """(B, C, H, W) with its shorter side resized to `size`, the ratio kept."""
    lines = []
    for side in x.shape[2:]:
        whole = torch.full((1,), float(side), device=x.device)
        side_out = side * size // min(x.shape[2:])
        lines.append(resample_matrix(whole * 0, whole, side, side_out, "bilinear").expand(len(x), -1, -1))
    return separable(x, lines[0], lines[1])


# ---------------------------------------------------------------- colour


def jitter(x: Tensor, u: Tensor, view: View) -> Tensor:
    """Brightness, contrast, saturation and hue in a random order, with probability view.jitter per image."""
    on = column(u, "jitter") < view.jitter
    strengths = {"brightness": view.brightness, "contrast": view.contrast, "saturation": view.saturation}
    factors = torch.stack([between(u, name, max(0.0, 1 - s), 1 + s) for name, s in strengths.items()], dim=1)
    factors = torch.where(on[:, None], factors, 1.0)
    shift = torch.where(on, between(u, "hue", -view.hue, view.hue), 0.0) if view.hue else None
    hue_place, kinds = jitter_order(pick(column(u, "order"), 24))
    return jitter_in_order(x, factors, shift, hue_place, kinds)


def jitter_order(order: Tensor) -> tuple[Tensor, Tensor]:
    """order (B,) in 0..23 -> how many blends come before the hue shift (B,), and the blends' kinds (B, 3)."""
    order = order.long()
    hue_place, rest = order // 6, order % 6
    first, step = rest // 2, 1 + rest % 2  # the six orders of three: three starts, walked up or down
    return hue_place, torch.stack([(first + slot * step) % 3 for slot in range(3)], dim=1)


def jitter_in_order(x: Tensor, factors: Tensor, shift: Tensor | None, hue_place: Tensor, kinds: Tensor) -> Tensor:
    """factors (B, 3) by kind, shift (B,) in turns. Each blend has a slot on both sides of the one hue shift, and
    does nothing (factor 1) in one of them."""
    factors = factors.gather(1, kinds)
    if shift is None:
        for slot in range(3):
            x = blend(x, factors[:, slot], kinds[:, slot])
        return x
    for slot in range(3):
        x = blend(x, torch.where(slot < hue_place, factors[:, slot], 1.0), kinds[:, slot])
    x = shift_hue(x, shift)
    for slot in range(3):
        x = blend(x, torch.where(slot >= hue_place, factors[:, slot], 1.0), kinds[:, slot])
    return x


def blend(x: Tensor, factor: Tensor, kind: Tensor) -> Tensor:
    """clamp(factor * x + (1 - factor) * base); base is black, the mean grey level, or the grey image, by kind."""
    grey = luma(x)
    factor, kind = factor[:, None, None, None], kind[:, None, None, None]
    to_mean, to_grey = (1 - factor) * (kind == CONTRAST), (1 - factor) * (kind == SATURATION)
    base = torch.addcmul(to_mean * grey.mean(dim=(2, 3), keepdim=True), grey, to_grey)
    return torch.addcmul(base, x, factor).clamp_(0, 1)


def luma(x: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 1, H, W), the weights of Pillow's mode L."""
    return (x[:, 0:1] * 0.299).add_(x[:, 1:2], alpha=0.587).add_(x[:, 2:3], alpha=0.114)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of (B, 3, H, W) in [0, 1] by shift (B,), in turns; value and saturation stay."""
    red, green, blue = x.unbind(dim=1)
    high, low = x.amax(dim=1), x.amin(dim=1)
    chroma = high - low
    scale = 1 / torch.where(chroma > 0, chroma, 1.0)
    # Hue in sixths of a turn: 0 red, 2 green, 4 blue.
    from_red, from_green, from_blue = green - blue, blue - red, red - green
    hue = torch.where(high == green, from_green * scale + 2, from_blue * scale + 4)
    hue = torch.where(high == red, from_red * scale, hue) + 6 * shift[:, None, None]
    hue = hue - 6 * (hue / 6).floor()
    red = ((hue - 3).abs_() - 1).clamp_(0, 1)
    green = (2 - (hue - 2).abs_()).clamp_(0, 1)
    blue = (2 - (hue - 4).abs_()).clamp_(0, 1)
    return torch.addcmul(low[:, None], torch.stack((red, green, blue), dim=1), chroma[:, None])


def solarise(x: Tensor) -> Tensor:
    return torch.where(x >= 0.5, 1 - x, x)


def standardise(x: Tensor, mean: Triple, std: Triple) -> Tensor:
    scale = constant([1 / s for s in std], x)
    return torch.addcmul(constant([-m / s for m, s in zip(mean, std, strict=True)], x), x, scale)


def constant(values: Sequence[float], like: Tensor) -> Tensor:
    """(C, 1, 1), filled on the device: a copy from the host could not be captured."""
    return torch.cat([torch.full((1, 1, 1), value, device=like.device) for value in values])


# ---------------------------------------------------------------- blur


def blur(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Gaussian of sigma (B,) pixels cut at `kernel` taps, borders reflected, on (B, C, H, W)."""
    height, width = x.shape[2:]
    rows = blur_matrix(sigma, height, kernel)
    columns = rows if width == height else blur_matrix(sigma, width, kernel)
    return separable(x, rows, columns).contiguous()


def blur_matrix(sigma: Tensor, size: int, kernel: int) -> Tensor:
    """(B, size, size): row i holds the taps around pixel i, those beyond an edge folded back on their mirror pixel."""
    radius = kernel // 2
    if radius >= size:
        raise UserError(f"a blur kernel of {kernel} does not fit images of {size} px: lower blur_kernel")
    distance = torch.arange(radius + 2, device=sigma.device)
    taps = torch.exp(-0.5 * (distance / sigma[:, None]) ** 2) * (distance <= radius)  # (B, radius + 2), last one 0
    taps = taps / (2 * taps.sum(dim=1, keepdim=True) - 1)
    place = torch.arange(size, device=sigma.device)
    i, j, last = place[:, None], place[None, :], size - 1
    none = radius + 1
    straight = (i - j).abs().clamp_max(none)
    over_start = torch.where(j > 0, i + j, none).clamp_max(none)
    over_end = torch.where(j < last, 2 * last - i - j, none).clamp_max(none)
    return taps[:, straight] + taps[:, over_start] + taps[:, over_end]


# ---------------------------------------------------------------- named views, as functions of the size


def lump(size: int) -> tuple[View, ...]:
    """LUMP's two equal views; blur only above 32 px."""
    view = View(
        jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2, blur=0.5 if size > 32 else 0.0
    )
    return view, view


def memory(size: int) -> tuple[View, ...]:
    """LUMP's fresh view of a stored image; at 64 px with Tiny-ImageNet's own mean and deviation, as there."""
    mean, std = (TINY_MEAN, TINY_STD) if size == 64 else (CIFAR_MEAN, CIFAR_STD)
    return (View(crop_scale=(0.08, 1.0), interpolation="bicubic", mean=mean, std=std),)


def supervised(size: int) -> tuple[View, ...]:
    view = View(padding=4)
    return view, view


def cassle(saturation: float, blurs: tuple[float, float], solarises: tuple[float, float]) -> tuple[View, ...]:
    """CaSSLe's ImageNet-100 views. There the colour twist has a fixed order; here it is random, as in torchvision."""
    first, second = (
        View(
            crop_scale=(0.08, 1.0),
            interpolation="bicubic",
            jitter=0.8,
            brightness=0.4,
            contrast=0.4,
            saturation=saturation,
            hue=0.1,
            grey=0.2,
            blur=blur,
            solarise=solarise,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )
        for blur, solarise in zip(blurs, solarises, strict=True)
    )
    return first, second


def cassle_barlow(size: int) -> tuple[View, ...]:
    return cassle(saturation=0.2, blurs=(1.0, 0.1), solarises=(0.0, 0.2))


def cassle_moco(size: int) -> tuple[View, ...]:
    """MoCo v2+: two equal views, blur 0.5, no solarisation, and saturation 0.4 (Barlow's is 0.2)."""
    return cassle(saturation=0.4, blurs=(0.5, 0.5), solarises=(0.0, 0.0))


def digits(size: int) -> tuple[View, ...]:
    """Grey digits of 8 to 16 px: a mirrored or a tinted digit is another thing, so neither flip nor hue."""
    half = (0.5, 0.5, 0.5)
    view = View(crop_scale=(0.5, 1.0), flip=0.0, jitter=0.8, brightness=0.4, contrast=0.4, mean=half, std=half)
    return view, view


VIEWS: dict[str, Callable[[int], tuple[View, ...]]] = {
    "lump": lump,
    "memory": memory,
    "supervised": supervised,
    "cassle-barlow": cassle_barlow,
    "cassle-moco": cassle_moco,
    "digits": digits,
}


def named_views(name: str, size: int) -> tuple[View, ...]:
    """The views called `name` at this image size: `named_views("lump", 32)`."""
    if name not in VIEWS:
        raise unknown("views", name, VIEWS)
    return VIEWS[name](size)


@dataclass
class ViewsConfig:
    name: str = key("lump", "the two views; `ptlf list views` names them")
    memory: str = key("memory", "views for the fresh view of a memory image; its first view is taken")
    size: int | None = key(None, "side of the views in pixels; null = that of the stored images", least=1)
