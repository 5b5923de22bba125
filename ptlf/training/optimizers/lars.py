"""LARS: SGD with momentum, each layer's step in proportion to its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ptlf.core.settings import key
from ptlf.training.optimizers.optimizer import OptimizerConfig, UpdateRule
from ptlf.training.optimizers.sgd import SGD


@dataclass
class LarsConfig(OptimizerConfig):
    name: str = "lars"
    momentum: float = key(0.9, "momentum; carries over between tasks, but for what froze", ge=0, le=0.9999)
    weight_decay: float = key(5e-4, "weight decay; not on biases and norms", ge=0)
    eta: float = key(0.02, "a layer's step, as a share of the size of its weights, is at most so much", gt=0)


class Lars(UpdateRule[LarsConfig]):
    Config = LarsConfig
    lr = 0.3
    first_state = staticmethod(SGD.first_state)

    @staticmethod
    def make(config: LarsConfig, parameters: Sequence[nn.Parameter], lr: float | Tensor) -> Optimizer:
        return LARS(parameters, lr, config.momentum, config.weight_decay, eta=config.eta)


class LARS(Optimizer):
    """SGD with momentum whose step is scaled, per matrix or filter bank, by its trust ratio.

    trust = eta * |p| / (|g| + weight_decay * |p| + eps), and the gradient with its weight decay is multiplied by
    min(trust / lr, 1), so that lr is the most it can be. Parameters of one dimension (biases, norms) are neither
    adapted nor decayed. lr may be a tensor on the parameters' device, so that a captured step can read it. Parameters
    without a gradient do not move.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        eta: float = 0.02,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            matrices, vectors = [p for p in moving if p.ndim > 1], [p for p in moving if p.ndim <= 1]
            if matrices:
                self._move(matrices, self._adapted(matrices, group), group)
            if vectors:
                self._move(vectors, _decayed(vectors, 0.0), group)
        return loss

    def _adapted(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Gradients with weight decay, times the trust ratio. Zero weights or gradients are not adapted."""
        weights = torch.stack(torch._foreach_norm(params))
        gradients = torch.stack(torch._foreach_norm([p.grad for p in params if p.grad is not None]))
        trust = group["eta"] * weights / (gradients + group["weight_decay"] * weights + group["eps"])
        trust = (trust / group["lr"]).clamp(max=1.0)
        trust = torch.where((weights > 0) & (gradients > 0), trust, 1.0)
        direction = _decayed(params, group["weight_decay"])
        torch._foreach_mul_(direction, list(trust.unbind()))
        return direction

    def _move(self, params: list[Tensor], direction: list[Tensor], group: dict[str, Any]) -> None:
        if group["momentum"]:
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, direction)
            direction = buffers
        torch._foreach_sub_(params, torch._foreach_mul(direction, group["lr"]))


def _decayed(params: list[Tensor], weight_decay: float) -> list[Tensor]:
    gradients = [p.grad for p in params if p.grad is not None]
    return list(torch._foreach_add(gradients, params, alpha=weight_decay))
