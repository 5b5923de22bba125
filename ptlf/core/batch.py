"""What one training step reads. The host draws it; the engine moves it to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Layout = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass
class Batch:
    images: Tensor  # (B, H, W, 3) uint8, as stored
    labels: Tensor  # (B,) int64; zeros where there are none
    uniforms: Tensor  # (views, B, P) in [0, 1): the augmentation's randomness
    draws: Mapping[str, Tensor] = field(default_factory=dict)  # the method's own randomness, by name
    views: list[Tensor] = field(default_factory=list)  # (B, 3, S, S) each, made by the step
    mixed: list[Tensor] = field(default_factory=list)  # what the loss sees: the views, or the method's mixture of them
    targets: list[Tensor] = field(default_factory=list)  # (B, D) each: projections by the objective's teacher
    outputs: Tensor | None = None  # (B, feature_dim) of the first mixed view, where the method stores them
    packed: Tensor | None = None  # labels, uniforms and draws of a batch that was moved, which are views of it

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> Batch:
        """On the device. What the host drew goes there in one piece."""
        packed = to_device(to_bytes(self.drawn()), device)
        labels, uniforms, *draws = from_bytes(packed, self.drawn())
        named = dict(zip(self.draws, draws, strict=True))
        images = to_device(self.images, device)
        return replace(self, images=images, labels=labels, uniforms=uniforms, draws=named, packed=packed)

    def fill(self, other: Batch) -> None:
        """Take over what the other holds, in place. It has the same layout; this one has been moved."""
        assert self.packed is not None
        self.images.copy_(pinned(other.images, self.images.device), non_blocking=True)
        self.packed.copy_(pinned(to_bytes(other.drawn()), self.packed.device), non_blocking=True)

    def layout(self) -> Layout:
        """Names, shapes and types of all that it holds."""
        tensors = {"images": self.images, "labels": self.labels, "uniforms": self.uniforms, **self.draws}
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())

    def drawn(self) -> list[Tensor]:
        return [self.labels, self.uniforms, *self.draws.values()]


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """All of them as bytes, one after the other."""
    packed = torch.empty(sum(map(padded_size, tensors)), dtype=torch.uint8)
    for place, tensor in zip(from_bytes(packed, tensors), tensors, strict=True):
        place.copy_(tensor)
    return packed


def from_bytes(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as views of it; `like` tells shapes and types."""
    parts = zip(packed.split([padded_size(tensor) for tensor in like]), like, strict=True)
    return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]


def padded_size(tensor: Tensor) -> int:
    """Bytes, such that what comes next starts where any type may."""
    return -(-tensor.nbytes // 16) * 16


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Host tensor to the device without waiting for it, through pinned memory on a GPU."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory that a GPU can copy from by itself. torch keeps it until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
