"""A copy of encoder and projector that follows the trained ones without gradient, for the objectives that need one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from ptlf.encoders import encode


class MomentumNetwork(nn.Module):
    """Moving average of weights; norms keep statistics of their own.

    The share kept at each step rises from `start` to `end` by half a cosine over every task's steps, as where each task
    is a training of its own (CaSSLe's code). It is computed on the device, from a step counter there.
    """

    step: Tensor
    steps: Tensor

    def __init__(self, encoder: nn.Module, projector: nn.Module, start: float, end: float) -> None:
        super().__init__()
        self.encoder, self.projector = deepcopy(encoder), deepcopy(projector)
        self.requires_grad_(False)
        self.start, self.end = start, end
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("steps", torch.ones(()))

    def begin_task(self, steps: int) -> None:
        self.step.zero_()
        self.steps.fill_(steps)

    def kept(self) -> Tensor:
        return self.end - (self.end - self.start) * (torch.cos(math.pi * self.step / self.steps) + 1) / 2

    @torch.no_grad()
    def forward(self, views: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Projections of each view."""
        return [self.projector(f) for f in encode(self.encoder, views, dtype)]

    @torch.no_grad()
    def follow(self, encoder: nn.Module, projector: nn.Module) -> None:
        mine: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        theirs: list[Tensor] = [*encoder.parameters(), *projector.parameters()]
        kept = self.kept()
        torch._foreach_mul_(mine, kept)
        torch._foreach_add_(mine, list(torch._foreach_mul(theirs, 1 - kept)))
        self.step += 1
