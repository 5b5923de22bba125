"""Copies of encoder and projector that take no gradient: the targets of some objectives, the past of some methods."""

import math
from copy import deepcopy

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """A copy of encoder and projector. `Model.encode` and `Model.project` run it, as fast as the model itself."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = deepcopy(encoder), deepcopy(projector)
        self.requires_grad_(False)

    def begin_task(self, steps: int) -> None:
        """Called before the first of a task's `steps` steps."""

    def follow(self, encoder: nn.Module, projector: nn.Module) -> None:
        """Called after each step with the trained modules."""


class MomentumTeacher(Teacher):
    """A moving average of the trained weights; its norms keep running statistics of their own.

    At each step the teacher keeps a share of itself that rises from `start` to `end` by half a cosine over the steps of
    a task, and starts again with the next task (as in CaSSLe's code). It is computed on the device from a step counter.
    """

    step: Tensor
    steps: Tensor

    def __init__(self, encoder: nn.Module, projector: nn.Module, start: float, end: float) -> None:
        super().__init__(encoder, projector)
        self.start, self.end = start, end
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("steps", torch.ones(()))

    def begin_task(self, steps: int) -> None:
        self.step.zero_()
        self.steps.fill_(steps)

    def kept(self) -> Tensor:
        return self.end - (self.end - self.start) * (torch.cos(math.pi * self.step / self.steps) + 1) / 2

    @torch.no_grad()
    def follow(self, encoder: nn.Module, projector: nn.Module) -> None:
        """teacher <- kept * teacher + (1 - kept) * student, for every parameter."""
        teacher: list[Tensor] = list(self.parameters())
        student: list[Tensor] = [*encoder.parameters(), *projector.parameters()]
        kept = self.kept()
        torch._foreach_mul_(teacher, kept)
        torch._foreach_add_(teacher, list(torch._foreach_mul(student, 1 - kept)))
        self.step += 1


class PreviousModel(Teacher):
    """Encoder and projector as the last task left them. Norms use batch statistics and do not update their running
    ones; weights never move. Other buffers that a forward in train mode changes, as those of a spectral norm, do."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__(encoder, projector)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.track_running_stats = False

    @torch.no_grad()
    def copy(self, encoder: nn.Module, projector: nn.Module) -> None:
        self.encoder.load_state_dict(encoder.state_dict())
        self.projector.load_state_dict(projector.state_dict())
