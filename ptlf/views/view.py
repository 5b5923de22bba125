"""View, the settings of one augmentation, and the uniforms from which it is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ptlf.core.errors import UserError, unknown

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
    blur_kernel: int | None = None  # taps; None: size // 20 * 2 + 1
    solarise: float = 0.0  # probability
    mean: Triple = CIFAR_MEAN
    std: Triple = CIFAR_STD

    def __post_init__(self) -> None:
        for names, valid, rule in RULES:
            for name in names.split():
                if not valid(getattr(self, name)):
                    raise UserError(f"{name} {rule}; got {getattr(self, name)}")
        if self.interpolation not in get_args(Interpolation):
            raise unknown("interpolation", self.interpolation, get_args(Interpolation))


RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("flip jitter grey blur solarise", lambda p: 0 <= p <= 1, "is a probability, between 0 and 1"),
    ("crop_scale crop_ratio blur_sigma", lambda r: 0 < r[0] <= r[1], "is a range (low, high) with 0 < low <= high"),
    ("brightness contrast saturation padding", lambda value: value >= 0, "must not be negative"),
    ("hue", lambda hue: 0 <= hue <= 0.5, "is a strength between 0 and 0.5 turns"),
    ("blur_kernel", lambda k: k is None or (k > 0 and k % 2 == 1), "must be odd and positive, or left out"),
)


def draw(batch: int, generator: torch.Generator, views: int = 2) -> Tensor:
    """(views, batch, UNIFORMS_PER_VIEW) uniforms in [0, 1) on the CPU: all the randomness of the views."""
    return torch.rand((views, batch, UNIFORMS_PER_VIEW), generator=generator)
