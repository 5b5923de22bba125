"""The encoder's contract: an `nn.Module` that maps images (B, 3, H, W) to vectors (B, feature_dim).

Any module that does so is an encoder. Attributes that it may have:

feature_dim: else it is found by one forward.
rowwise: no image's vector depends on the other images of the batch, so that all views may be one batch.
normalisation: mean and std of its inputs (pixels from 0 to 1), three numbers each, in place of the views' own.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.errors import UserError, short_repr
from ptlf.core.settings import Presets, key
from ptlf.freezing.recording import unchanged


@dataclass
class EncoderConfig:
    name: str = key("resnet18", "one of `ptlf list encoders`, timm:NAME, torchvision:NAME, hf:FOLDER or onnx:FILE")
    weights: str | None = key(None, "a run, safetensors file or state_dict to start from; null = random weights")
    mean: list[float] | None = key(None, "its inputs' mean by channel, pixels in 0..1; null = its own or the views'")
    std: list[float] | None = key(None, "their standard deviation per channel")

    def __post_init__(self) -> None:
        if (self.mean, self.std) != (None, None):
            check_normalisation(self.mean, self.std, "encoder.mean and encoder.std")


def check_normalisation(mean: Any, std: Any, whose: str) -> None:
    """Refuse numbers by which inputs would not be finite, or none."""
    for values, least in ((mean, -1e6), (std, 1e-6)):
        three = isinstance(values, list | tuple) and len(values) == 3
        if not three or not all(isinstance(value, int | float) and least <= value <= 1e6 for value in values):
            allowed = f"three numbers from {least:g} to 1e+06 each, std above 0"
            raise UserError(f"{whose} must be {allowed}, not {short_repr(mean)} and {short_repr(std)}")


@dataclass
class SizedConfig(EncoderConfig):
    image_size: int | None = key(None, "side of its images in pixels; null = that of the views", ge=1)


@dataclass(frozen=True)
class EncoderEntry:
    make: Callable[[Any], nn.Module]  # from an instance of Config; draws its weights from torch's global generator
    Config: type[EncoderConfig] = EncoderConfig
    about: str = ""
    presets: Presets = field(default_factory=dict)


def from_function(make: Callable[..., nn.Module]) -> EncoderEntry:
    """The entry of a function (or class), which may take the configuration or nothing."""
    parameters = inspect.signature(make).parameters.values()
    required = any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)
    return EncoderEntry(make if required else lambda config: make())


def ask_for_module(config: EncoderConfig) -> nn.Module:
    raise ValueError("it was a module given in Python; open the run there, with ptlf.Learner.load(RUN, encoder=MODULE)")


def brings_weights(config: EncoderConfig) -> bool:
    """Whether the encoder may have learnt something before the run."""
    own = config.name == "given" or config.name.startswith(("hf:", "onnx:"))
    return own or config.weights is not None or getattr(config, "pretrained", False)


def set_normalisation(encoder: nn.Module, config: EncoderConfig) -> None:
    """Note the settings' mean and std at the encoder. One with weights from elsewhere must have some."""
    if config.mean is not None and config.std is not None:
        encoder.normalisation = tuple(config.mean), tuple(config.std)  # type: ignore[assignment]
    if (own := getattr(encoder, "normalisation", None)) is not None:
        check_normalisation(own[0], own[1], f"mean and std of encoder {config.name!r}")
    elif brings_weights(config):
        example = "--encoder.mean '[0.485, 0.456, 0.406]' --encoder.std '[0.229, 0.224, 0.225]'"
        hint = f"give them, for ImageNet's {example}, or in Python set encoder.normalisation = (mean, std)"
        raise UserError(f"encoder {config.name!r} does not say by which mean and std its inputs are normalised; {hint}")


def feature_dim(encoder: nn.Module, image_size: int) -> int:
    """Length of the vectors the encoder makes of square images with sides of `image_size` pixels."""
    declared = getattr(encoder, "feature_dim", None)
    if isinstance(declared, int):
        return declared
    parameter = next(encoder.parameters())
    image = torch.zeros(2, 3, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
    with unchanged(encoder), torch.no_grad():
        features = encoder.eval()(image)
    if not isinstance(features, Tensor) or features.ndim != 2:
        given = f"a tensor {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"an encoder must map images to vectors (B, dim); {type(encoder).__name__} gives {given}")
    return features.shape[1]
