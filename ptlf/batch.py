"""What one training step reads. The host draws it; the engine moves it to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Batch:
    images: Tensor  # (B, H, W, 3) uint8, as stored
    labels: Tensor  # (B,) int64; zeros where there are none
    uniforms: Tensor  # (views, B, P) in [0, 1): the augmentation's randomness
    draws: Mapping[str, Tensor] = field(default_factory=dict)  # the method's own randomness, by name
    views: list[Tensor] = field(default_factory=list)  # (B, 3, S, S) each, made by the step
    mixed: list[Tensor] = field(default_factory=list)  # what the loss sees: the views, or the method's mixture of them

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            images=to_device(self.images, device),
            labels=to_device(self.labels, device),
            uniforms=to_device(self.uniforms, device),
            draws={name: to_device(value, device) for name, value in self.draws.items()},
        )

    def fill(self, other: Batch) -> None:
        """Take over what the other holds, in place."""
        for mine, new in ((self.images, other.images), (self.labels, other.labels), (self.uniforms, other.uniforms)):
            mine.copy_(pinned(new, mine.device), non_blocking=True)
        for name, value in self.draws.items():
            value.copy_(pinned(other.draws[name], value.device), non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Host tensor to the device without waiting for it, through pinned memory on a GPU."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory that a GPU can copy from by itself. torch keeps it until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
