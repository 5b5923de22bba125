"""Optimizers by name. To add one: a subclass of `UpdateRule`, and a line in `MEMBERS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ptlf.core.registry import Registry
from ptlf.core.settings import key

State = dict[str, Tensor]


@dataclass
class OptimizerConfig:
    name: str = key("sgd", "update rule, one for the whole stream; `ptlf list optimizers` names them")


C = TypeVar("C", bound=OptimizerConfig)


class UpdateRule(Generic[C]):
    """State carries over between tasks; that of what froze starts again."""

    Config: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    lr: ClassVar[float] = 0.03  # usual rate for a batch of 256, taken where a recipe is for another optimizer

    @staticmethod
    def make(config: C, parameters: ParamsT, lr: float | Tensor) -> Optimizer:
        """`lr` is a tensor on a GPU: the step may be captured there, and must read the rate from the device."""
        raise NotImplementedError

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State | None:
        """What the parameter's first step starts from. None = unknown: after a freeze, steps are captured again."""
        return None


@dataclass
class SGDConfig(OptimizerConfig):
    name: str = "sgd"
    momentum: float = key(0.9, "momentum; carries over between tasks, but for what froze", ge=0, le=0.9999)
    weight_decay: float = key(5e-4, "weight decay", ge=0)


class SGD(UpdateRule[SGDConfig]):
    """SGD with momentum."""

    Config = SGDConfig

    @staticmethod
    def make(config: SGDConfig, parameters: ParamsT, lr: float | Tensor) -> torch.optim.SGD:
        fused = True if isinstance(lr, Tensor) else None
        return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=fused)

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State:
        """torch's fused SGD also needs it uncaptured: it takes momentum for all parameters or for none."""
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}


@dataclass
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    beta1: float = key(0.9, "decay of the gradient's running mean", ge=0, le=0.999999)
    beta2: float = key(0.999, "decay of the squared gradient's running mean", ge=0, le=0.999999)
    eps: float = key(1e-8, "added to the root of the squared gradient's mean", gt=0)
    weight_decay: float = key(0.01, "share of a weight that a step takes away, times the learning rate", ge=0)


class AdamW(UpdateRule[AdamWConfig]):
    """Steps scaled by running moments of the gradient, weight decay apart from them."""

    Config = AdamWConfig
    lr = 1e-3

    @staticmethod
    def make(config: AdamWConfig, parameters: ParamsT, lr: float | Tensor) -> torch.optim.AdamW:
        on_device, betas = isinstance(lr, Tensor), (config.beta1, config.beta2)
        flags = {"fused": on_device or None, "capturable": on_device}
        return torch.optim.AdamW(parameters, lr, betas, config.eps, config.weight_decay, **flags)  # type: ignore[arg-type]

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


@dataclass
class LarsConfig(SGDConfig):
    name: str = "lars"
    weight_decay: float = key(5e-4, "weight decay; not on biases and norms", ge=0)
    eta: float = key(0.02, "a layer's step, as a share of the size of its weights, is at most so much", gt=0)


class Lars(UpdateRule[LarsConfig]):
    """SGD with momentum, each layer's step in proportion to its weights."""

    Config = LarsConfig
    lr = 0.3
    first_state = staticmethod(SGD.first_state)

    @staticmethod
    def make(config: LarsConfig, parameters: ParamsT, lr: float | Tensor) -> Optimizer:
        return LARS(parameters, lr, config.momentum, config.weight_decay, eta=config.eta)


class LARS(Optimizer):
    """SGD with momentum whose step is scaled, per matrix or filter bank, by its trust ratio.

    trust = eta * |p| / (|g| + weight_decay * |p| + eps), and the gradient with its weight decay is multiplied by
    min(trust / lr, 1). Parameters of one dimension (biases, norms) are neither adapted nor decayed.
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 0.1, momentum: float = 0.9, weight_decay: float = 0.0,
        *, eta: float = 0.02, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for params in ([p for p in moving if p.ndim > 1], [p for p in moving if p.ndim <= 1]):
                if params:
                    direction = [p.grad for p in params if p.grad is not None]
                    self._move(params, _adapted(params, direction, group) if params[0].ndim > 1 else direction, group)
        return loss

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


def _adapted(params: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Gradients with weight decay, times the trust ratio. Zero weights or gradients are not adapted."""
    weight, gradient = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, gradients))
    trust = group["eta"] * weight / (gradient + group["weight_decay"] * weight + group["eps"])
    trust = torch.where((weight > 0) & (gradient > 0), (trust / group["lr"]).clamp(max=1.0), 1.0)
    direction = torch._foreach_add(gradients, params, alpha=group["weight_decay"])
    torch._foreach_mul_(direction, list(trust.unbind()))
    return list(direction)


@torch.no_grad()
def prepare_state(rule: type[UpdateRule], optimizer: Optimizer, kept: dict[Tensor, State]) -> bool:
    """Give parameters that train their first state, before a step that may be captured: the rate is a tensor. Returns
    whether all have one. kept: the state of every parameter, whose tensors a graph writes to, also after a thaw."""
    complete = True
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad] if isinstance(group["lr"], Tensor) else []
        for parameter in trained:
            if not optimizer.state.get(parameter):
                first = rule.first_state(group, parameter)
                if not first:
                    complete = complete and first is not None
                    continue
                old = kept.get(parameter, {})
                optimizer.state[parameter] = {n: old[n].copy_(v) if n in old else v for n, v in first.items()}
            kept[parameter] = optimizer.state[parameter]
    return complete


MEMBERS: dict[str, type[UpdateRule[Any]]] = {"sgd": SGD, "lars": Lars, "adamw": AdamW}
OPTIMIZERS: Registry[type[UpdateRule[Any]]] = Registry("optimizer", "ptlf.optimizers", UpdateRule, MEMBERS)
