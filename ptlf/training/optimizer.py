"""The update rule (SGD or LARS) and the learning rate over a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ptlf.core.errors import UserError
from ptlf.core.settings import key


@dataclass
class OptimizerConfig:
    optimizer: str = key("sgd", "update rule, one for the whole stream", choices=("sgd", "lars"))
    lr: float = key(0.03, "learning rate for a batch of 256; scaled with the batch", above=0)
    momentum: float = key(0.9, "momentum; carries over between tasks, but for what froze", least=0, most=1)
    weight_decay: float = key(5e-4, "weight decay; with lars not on biases and norms", least=0)
    schedule: str = key("constant", "learning rate over a task's epochs", choices=("constant", "cosine"))
    warmup: int = key(0, "epochs of linear warm-up at the start of each task", least=0)
    batch: int = key(256, "images per step (each gives two views)", least=2)


def learning_rate(config: OptimizerConfig, epoch: float, epochs: int) -> float:
    """The rate at a (fractional) epoch of a task: linear warm-up, then constant or half a cosine down to zero."""
    peak = config.lr * config.batch / 256
    if epoch < config.warmup:
        return peak * epoch / config.warmup
    if config.schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (epoch - config.warmup) / max(1, epochs - config.warmup)))


def check_warmup(config: OptimizerConfig, epochs: int) -> None:
    if config.warmup and config.warmup >= epochs:
        raise UserError(f"training.warmup is {config.warmup} epochs, but a task has only {epochs}; it must be less")


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    rate: float | Tensor = learning_rate(config, config.warmup, config.warmup + 1)
    parameters = list(parameters)
    if parameters[0].device.type == "cuda":  # a captured step reads the rate from the device
        rate = torch.tensor(rate, device=parameters[0].device)
        if config.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
            )
    kind = LARS if config.optimizer == "lars" else torch.optim.SGD
    return kind(parameters, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def settle_momentum(optimizer: Optimizer, before: dict[Tensor, Tensor]) -> None:
    """Zero momentum for parameters that have none yet, which is what a first step starts from: torch's fused SGD takes
    all or none, and after a thaw only some have it; and what a captured step made, each replay would make anew.

    `before` holds what each had before it froze, so that after a thaw it has its momentum in the same place.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if isinstance(group["lr"], Tensor) and parameter.requires_grad:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    buffer = before.get(parameter)
                    state["momentum_buffer"] = torch.zeros_like(parameter) if buffer is None else buffer.zero_()
                before[parameter] = state["momentum_buffer"]


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
