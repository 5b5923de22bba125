"""The encoder's contract: an `nn.Module` that maps images (B, 3, H, W) to vectors (B, feature_dim).

Any module that does so is an encoder; `feature_dim` is read from its attribute of that name or found by one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.settings import key
from ptlf.encoders.norm import views_in_one_pass


@dataclass
class EncoderConfig:
    name: str = key("resnet18", "which encoder; `ptlf list encoders` names them")


@dataclass(frozen=True)
class EncoderEntry:
    make: Callable[[Any], nn.Module]  # from an instance of Config; draws its weights from torch's global generator
    Config: type[EncoderConfig] = EncoderConfig
    about: str = ""


def from_function(make: Callable[[], nn.Module]) -> EncoderEntry:
    """The entry of a function (or class) that takes no settings."""
    return EncoderEntry(lambda config: make())


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
    if not isinstance(features, torch.Tensor) or features.ndim != 2:
        shape = tuple(features.shape) if isinstance(features, torch.Tensor) else type(features).__name__
        raise ValueError(f"an encoder must map images to vectors (B, dim); {type(encoder).__name__} gave {shape}")
    return features.shape[1]


def encode(encoder: nn.Module, views: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Float32 features (B, feature_dim) of each view, computed in `dtype` (bf16 through autocast, or float32).

    Every view has its own batch statistics. An encoder marked `one_pass` takes all views in one batch.
    """
    with torch.autocast(views[0].device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        if len(views) > 1 and getattr(encoder, "one_pass", False):
            with views_in_one_pass(encoder, len(views)):
                features: Sequence[Tensor] = encoder(torch.cat(list(views))).chunk(len(views))
        else:
            features = [encoder(view) for view in views]
    return [f.float() for f in features]
