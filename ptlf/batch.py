"""What one training step reads: fixed tensors on the device, filled by the host before the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Host tensor to the device without waiting for it, through pinned memory on a GPU."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
