"""SI: weights that earned much of the past tasks' progress are held near where those tasks left them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model


@dataclass
class SIConfig(MethodConfig):
    name: str = "si"
    strength: float = key(0.4, "weight of the penalty (the paper's c)", least=0)
    damping: float = key(1.0, "added to the squared distance that importance is divided by (the paper's xi)", above=0)
    clip: float = key(1.0, "gradients are clipped to +- this value", above=0)


class SI(Method):
    """Per encoder parameter, penalty = strength * sum of importance * (p - anchor)^2.

    Importance follows LUMP's public code, not Zenke et al.: the path counts lr * grad^2 with the clipped gradient of
    the whole loss, penalty included, in place of -grad * change.
    """

    Config = SIConfig
    step_kinds = 2

    def __init__(self, config: SIConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        self.path = state_like(model.encoder, torch.zeros_like)  # this task's sum of lr * grad^2
        self.importance = state_like(model.encoder, torch.zeros_like)
        self.anchor = state_like(model.encoder, torch.clone)

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        if self.task > 0:
            losses["penalty"] = self.config.strength * self.penalty(model)
        return losses

    def penalty(self, model: Model) -> Tensor:
        parts = zip(self.importance, model.encoder.parameters(), self.anchor, strict=True)
        return torch.stack([(weight * (p - anchor).square()).sum() for weight, p, anchor in parts]).sum()

    def after_backward(self, model: Model, lr: float | Tensor) -> None:
        nn.utils.clip_grad_value_(model.parameters(), self.config.clip)
        with torch.no_grad():
            for path, p in zip(self.path, model.encoder.parameters(), strict=True):
                if p.grad is not None:  # a frozen unit's parameters have none
                    path += lr * p.grad.square()

    @torch.no_grad()
    def end_task(self, index: int, model: Model) -> None:
        parts = zip(self.path, self.importance, self.anchor, model.encoder.parameters(), strict=True)
        for path, importance, anchor, p in parts:
            importance += path / ((p - anchor).square() + self.config.damping)
            anchor.copy_(p)
            path.zero_()


def state_like(encoder: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.ParameterList:
    """A tensor per encoder parameter that is state (saved, moved to the device) but never trained."""
    made = [make(parameter.detach()) for parameter in encoder.parameters()]
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in made])
