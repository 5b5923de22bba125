"""The encoder's contract: an `nn.Module` that maps images (B, 3, H, W) to vectors (B, feature_dim).

Any module that does so is an encoder; `feature_dim` is read from its attribute of that name or found by one forward.
One with the attribute `segmented` takes a second argument, `call`, and runs its segments through it, `call(module, x)`:
they are then compiled one by one, with few variants each, however units freeze.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.settings import key

Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass
class EncoderConfig:
    name: str = key("resnet18", "which encoder; `ptlf list encoders` names them")


@dataclass(frozen=True)
class EncoderEntry:
    make: Callable[[Any], nn.Module]  # from an instance of Config; draws its weights from torch's global generator
    Config: type[EncoderConfig] = EncoderConfig
    about: str = ""


def from_function(make: Callable[..., nn.Module]) -> EncoderEntry:
    """The entry of a function (or class), which may take the configuration or nothing."""
    parameters = inspect.signature(make).parameters.values()
    required = any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)
    return EncoderEntry(make if required else lambda config: make())


def ask_for_module(config: EncoderConfig) -> nn.Module:
    raise ValueError("it was a module given in Python; open the run there, with ptlf.Learner.load(RUN, encoder=MODULE)")


def feature_dim(encoder: nn.Module, image_size: int) -> int:
    """Length of the vectors the encoder makes of square images with sides of `image_size` pixels."""
    declared = getattr(encoder, "feature_dim", None)
    if isinstance(declared, int):
        return declared
    parameter = next(encoder.parameters())
    image = torch.zeros(2, 3, image_size, image_size, device=parameter.device, dtype=parameter.dtype)
    was_training = encoder.training
    encoder.eval()
    with torch.no_grad():
        features = encoder(image)
    encoder.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"an encoder must map images to vectors (B, dim); {type(encoder).__name__} gave {shape}")
    return features.shape[1]
