"""The inputs of one training step. The host draws them; the engine moves them to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Layout = tuple[tuple[str, torch.Size, torch.dtype], ...]  # name, shape and dtype of every input


@dataclass
class Batch:
    images: Tensor  # (B, H, W, 3) uint8, as stored
    labels: Tensor  # (B,) int64; zeros for unlabelled images
    uniforms: Tensor  # (views, B, P) in [0, 1): randomness of the augmentation
    draws: Mapping[str, Tensor] = field(default_factory=dict)  # randomness of the method, by name
    views: list[Tensor] = field(default_factory=list)  # (B, 3, S, S) each, computed in the step
    indices: Tensor | None = None  # (B,) of the images in the task's, on the host
    mixed: list[Tensor] = field(default_factory=list)  # inputs of the loss: the views, or a mixture of them
    targets: list[Tensor] = field(default_factory=list)  # (B, D) each: projections by the objective's teacher
    outputs: Tensor | None = None  # (B, feature_dim) of the first mixed view, for methods that store them

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> Batch:
        draws = {name: to_device(draw, device) for name, draw in self.draws.items()}
        images, labels, uniforms = (to_device(tensor, device) for tensor in (self.images, self.labels, self.uniforms))
        return replace(self, images=images, labels=labels, uniforms=uniforms, draws=draws)

    def fill(self, other: Batch) -> None:
        """Copy the other batch, of the same layout, into this one, in place."""
        for mine, its in zip(self.inputs().values(), other.inputs().values(), strict=True):
            mine.copy_(pinned(its, mine.device), non_blocking=True)

    def layout(self) -> Layout:
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in self.inputs().items())

    def inputs(self) -> dict[str, Tensor]:
        return {"images": self.images, "labels": self.labels, "uniforms": self.uniforms, **self.draws}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously, through pinned memory if it is a GPU."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In pinned memory if `device` is a GPU. torch keeps that memory until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
