"""SI: per encoder parameter, penalty = strength * sum of importance * (p - anchor)^2."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model


@dataclass
class SIConfig(MethodConfig):
    name: str = "si"
    strength: float = key(100.0, "weight of the penalty (SI's c); LUMP's code ships 0.4", ge=0)
    damping: float = key(1.0, "added to the squared distance that importance is divided by (the paper's xi)", gt=0)
    clip: float = key(1.0, "gradients are clipped to +- this value", gt=0)


class SI(Method[SIConfig]):
    """SI: weights that earned much of the past tasks' progress are held near where those tasks left them.

    Importance follows LUMP's public code: the path counts lr * grad^2 of the whole loss, in place of -grad * change.
    """

    Config = SIConfig
    recapture = "second_task"

    def __init__(self, config: SIConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        self.path = state_like(model.encoder, torch.zeros_like)  # this task's sum of lr * grad^2
        self.importance = state_like(model.encoder, torch.zeros_like)
        self.anchor = state_like(model.encoder, torch.clone)

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        losses = super().losses(model, batch)
        if self.task > 0:
            penalty = _Penalty.apply(list(self.importance), list(self.anchor), *model.encoder.parameters())
            losses["penalty"] = self.config.strength * penalty
        return losses

    @torch.no_grad()
    def after_backward(self, model: Model, lr: float | Tensor) -> None:
        nn.utils.clip_grad_value_(model.parameters(), self.config.clip)
        pairs = zip(self.path, model.encoder.parameters(), strict=True)
        known = [(path, p.grad) for path, p in pairs if p.grad is not None]  # a frozen unit's parameters have none
        if known:
            paths, gradients = zip(*known, strict=True)
            squares = torch._foreach_mul(gradients, gradients)
            torch._foreach_mul_(squares, lr)
            torch._foreach_add_(paths, squares)

    @torch.no_grad()
    def end_task(self, index: int, model: Model) -> None:
        parts = zip(self.path, self.importance, self.anchor, model.encoder.parameters(), strict=True)
        for path, importance, anchor, p in parts:
            importance += path / ((p - anchor).square() + self.config.damping)
            anchor.copy_(p)
            path.zero_()


class _Penalty(torch.autograd.Function):
    """The sum of importance * (p - anchor)^2, in a few kernels for all parameters together."""

    @staticmethod
    def forward(ctx: Any, importance: list[Tensor], anchors: list[Tensor], *parameters: Tensor) -> Tensor:
        apart = torch._foreach_sub(parameters, anchors)
        ctx.importance = importance
        ctx.save_for_backward(*apart)
        squares = torch._foreach_mul(apart, apart)
        torch._foreach_mul_(squares, importance)
        return torch.stack(torch._foreach_norm(squares, 1)).sum()  # nothing is negative

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch._foreach_mul(ctx.importance, grad)
        torch._foreach_mul_(gradients, torch._foreach_mul(ctx.saved_tensors, 2))
        needed = ctx.needs_input_grad[2:]
        return None, None, *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True))


def state_like(encoder: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.ParameterList:
    """A tensor per encoder parameter that is state (saved, moved to the device) but never trained."""
    made = [make(parameter.detach()) for parameter in encoder.parameters()]
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in made])
