"""The views of published protocols. To add some: an entry in VIEWS."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ptlf.core.errors import unknown
from ptlf.core.settings import key
from ptlf.views.operations import View

TINY_MEAN, TINY_STD = (0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)  # .228 as in CaSSLe's code, not .229


@dataclass
class ViewsConfig:
    name: str = key("lump", "the two views (see `ptlf list views`)")
    memory: str = key("memory", "views for the fresh view of a memory image; its first view is taken")
    size: int | None = key(None, "side of the views in pixels; null = that of the stored images", ge=1, le=8192)


# SimCLR's colours, without its blur.
COLOURED = View(jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2)
# CaSSLe's ImageNet-100 views. CaSSLe applies the colour jitter in a fixed order; here it is random, as in torchvision.
LARGE = replace(COLOURED, crop_scale=(0.08, 1.0), interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)

MEMORY = View(crop_scale=(0.08, 1.0), interpolation="bicubic")
BARLOW = replace(LARGE, saturation=0.2)
DIGITS = View(
    crop_scale=(0.5, 1.0), flip=0.0, jitter=0.8, brightness=0.4, contrast=0.4, mean=(0.5,) * 3, std=(0.5,) * 3
)
GENTLE = View(crop_scale=(0.6, 1.0), jitter=0.8, brightness=0.2, contrast=0.2, saturation=0.1, hue=0.02, grey=0.2)

# A sentence on them, and what makes them for images of a size in pixels.
VIEWS: dict[str, tuple[str, Callable[[int], tuple[View, ...]]]] = {
    "lump": (
        "LUMP's two equal views; blur only above 32 px.",
        lambda size: (replace(COLOURED, blur=0.5 if size > 32 else 0.0),) * 2,
    ),
    "memory": ("LUMP's fresh view of a stored image.", lambda size: (MEMORY,)),
    "memory-tinyimagenet": (
        "LUMP's fresh view of a Tiny-ImageNet image: as in its code, normalised with other statistics than its views.",
        lambda size: (replace(MEMORY, mean=TINY_MEAN, std=TINY_STD),),
    ),
    "supervised": (
        "Two equal views: a crop of the image with 4 px of padding, and a flip.",
        lambda size: (View(padding=4),) * 2,
    ),
    "cassle-barlow": (
        "CaSSLe's views for Barlow Twins: one is always blurred, the other seldom, and sometimes solarised.",
        lambda size: (replace(BARLOW, blur=1.0), replace(BARLOW, blur=0.1, solarise=0.2)),
    ),
    "cassle-moco": (
        "MoCo v2+: two equal views, without solarisation.",
        lambda size: (replace(LARGE, blur=0.5),) * 2,
    ),
    "cassle-simclr": (
        "CaSSLe's views for SimCLR: as for MoCo v2+, with twice the colours.",
        lambda size: (replace(LARGE, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, blur=0.5),) * 2,
    ),
    "cassle-vicreg": (
        "CaSSLe's views for VICReg: no crop below a fifth of the image, and sometimes solarised.",
        lambda size: (replace(LARGE, crop_scale=(0.2, 1.0), saturation=0.2, blur=0.5, solarise=0.1),) * 2,
    ),
    "digits": (
        "For grey digits of 8 to 16 px: no flip, because a mirrored digit is no digit, and no hue.",
        lambda size: (DIGITS,) * 2,
    ),
    "gentle": (
        "Two equal views for a pretrained encoder: weak colours, for images told apart by colours and textures.",
        lambda size: (GENTLE,) * 2,
    ),
}


def named_views(name: str, size: int) -> tuple[View, ...]:
    """`named_views("lump", 32)`: the views of that name for images of `size` pixels."""
    if name not in VIEWS:
        raise unknown("views", name, VIEWS)
    return VIEWS[name][1](size)
