"""LARS: SGD with momentum, each layer's step in proportion to its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ptlf.core.settings import key
from ptlf.training.optimizers.optimizer import OptimizerConfig, State, UpdateRule
from ptlf.training.optimizers.sgd import momentum_buffer


@dataclass
class LarsConfig(OptimizerConfig):
    name: str = "lars"
    momentum: float = key(0.9, "momentum; carries over between tasks, but for what froze", least=0, most=1)
    weight_decay: float = key(5e-4, "weight decay; not on biases and norms", least=0)
    eta: float = key(0.02, "a layer's step, as a share of the size of its weights, is at most so much", above=0)


class Lars(UpdateRule):
    Config = LarsConfig
    lr = 0.3

    @staticmethod
    def make(config: LarsConfig, parameters: Sequence[nn.Parameter], lr: float | Tensor) -> Optimizer:
        return LARS(parameters, lr, config.momentum, config.weight_decay, eta=config.eta)

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State:
        return momentum_buffer(group, parameter)


class LARS(Optimizer):
    """SGD with momentum whose step is scaled, per matrix or filter bank, by its trust ratio.

    trust = eta * |p| / (|g| + weight_decay * |p| + eps), and the gradient with its weight decay is multiplied by
    min(trust / lr, 1) (`clip`, so that lr is the most it can be) or by trust. Parameters of one dimension (biases,
    norms) are not adapted, and decayed only with `decay_vectors`. lr may be a tensor on the parameters' device, so that
    a captured step can read it. Parameters without a gradient do not move.
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
        clip: bool = True,
        decay_vectors: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta}.items():
            if not isinstance(value, Tensor) and value < 0:
                raise ValueError(f"LARS: {name} must not be negative, got {value}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "eps": eps,
            "clip": clip,
            "decay_vectors": decay_vectors,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in moving if p.ndim > 1]
            vectors = [p for p in moving if p.ndim <= 1]
            if matrices:
                self._move(matrices, self._adapted(matrices, group), group)
            if vectors:
                decay = group["weight_decay"] if group["decay_vectors"] else 0.0
                self._move(vectors, _decayed(vectors, decay), group)
        return loss

    def _adapted(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Gradients with weight decay, times the trust ratio. Zero weights or gradients are not adapted."""
        weights = torch.stack(torch._foreach_norm(params))
        gradients = torch.stack(torch._foreach_norm([p.grad for p in params if p.grad is not None]))
        trust = group["eta"] * weights / (gradients + group["weight_decay"] * weights + group["eps"])
        if group["clip"]:
            trust = (trust / group["lr"]).clamp(max=1.0)
        trust = torch.where((weights > 0) & (gradients > 0), trust, 1.0)
        direction = _decayed(params, group["weight_decay"])
        torch._foreach_mul_(direction, list(trust.unbind()))
        return direction

    def _move(self, params: list[Tensor], direction: list[Tensor], group: dict[str, Any]) -> None:
        if group["momentum"]:
            buffers = [self._buffer(p) for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, direction)
            direction = buffers
        torch._foreach_sub_(params, torch._foreach_mul(direction, group["lr"]))

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def _decayed(params: list[Tensor], weight_decay: float) -> list[Tensor]:
    gradients = [p.grad for p in params if p.grad is not None]
    return list(torch._foreach_add(gradients, params, alpha=weight_decay))
