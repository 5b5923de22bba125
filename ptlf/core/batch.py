"""The inputs of one training step. The host draws them; the engine moves them to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Layout = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass
class Batch:
    images: Tensor  # (B, H, W, 3) uint8, as stored
    labels: Tensor  # (B,) int64; zeros for unlabelled images
    uniforms: Tensor  # (views, B, P) in [0, 1): randomness of the augmentation
    draws: Mapping[str, Tensor] = field(default_factory=dict)  # randomness of the method, by name
    views: list[Tensor] = field(default_factory=list)  # (B, 3, S, S) each, computed in the step
    mixed: list[Tensor] = field(default_factory=list)  # inputs of the loss: the views, or a mixture of them
    targets: list[Tensor] = field(default_factory=list)  # (B, D) each: projections by the objective's teacher
    outputs: Tensor | None = None  # (B, feature_dim) of the first mixed view, for methods that store them
    packed: Tensor | None = None  # after `to`: the bytes that labels, uniforms and draws are views of

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> Batch:
        """A copy on the device. Labels, uniforms and draws are sent in one transfer."""
        packed = to_device(to_bytes(self.drawn()), device)
        labels, uniforms, *draws = from_bytes(packed, self.drawn())
        named = dict(zip(self.draws, draws, strict=True))
        images = to_device(self.images, device)
        return replace(self, images=images, labels=labels, uniforms=uniforms, draws=named, packed=packed)

    def fill(self, other: Batch) -> None:
        """Copy the other batch into this one, in place. Both have the same layout; this one was made by `to`."""
        assert self.packed is not None
        self.images.copy_(pinned(other.images, self.images.device), non_blocking=True)
        self.packed.copy_(pinned(to_bytes(other.drawn()), self.packed.device), non_blocking=True)

    def layout(self) -> Layout:
        """Name, shape and dtype of every input."""
        tensors = {"images": self.images, "labels": self.labels, "uniforms": self.uniforms, **self.draws}
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())

    def drawn(self) -> list[Tensor]:
        return [self.labels, self.uniforms, *self.draws.values()]


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' bytes, one after the other, each padded to 16."""
    packed = torch.empty(sum(map(padded_size, tensors)), dtype=torch.uint8)
    for view, tensor in zip(from_bytes(packed, tensors), tensors, strict=True):
        view.copy_(tensor)
    return packed


def from_bytes(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `to_bytes`, as views of `packed`; `like` gives shapes and dtypes."""
    parts = zip(packed.split([padded_size(tensor) for tensor in like]), like, strict=True)
    return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in parts]


def padded_size(tensor: Tensor) -> int:
    """Bytes, padded to 16 so that the next tensor is aligned for any dtype."""
    return -(-tensor.nbytes // 16) * 16


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously, through pinned memory if it is a GPU."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In pinned memory if `device` is a GPU. torch keeps that memory until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
