"""AdamW: steps scaled by running moments of the gradient, weight decay apart from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.settings import key
from ptlf.training.optimizers.optimizer import OptimizerConfig, State, UpdateRule


@dataclass
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    beta1: float = key(0.9, "decay of the gradient's running mean", ge=0, le=0.999999)
    beta2: float = key(0.999, "decay of the squared gradient's running mean", ge=0, le=0.999999)
    eps: float = key(1e-8, "added to the root of the squared gradient's mean", gt=0)
    weight_decay: float = key(0.01, "share of a weight that a step takes away, times the learning rate", ge=0)


class AdamW(UpdateRule[AdamWConfig]):
    Config = AdamWConfig
    lr = 1e-3

    @staticmethod
    def make(config: AdamWConfig, parameters: Sequence[nn.Parameter], lr: float | Tensor) -> torch.optim.AdamW:
        on_device, betas = isinstance(lr, Tensor), (config.beta1, config.beta2)
        flags = {"fused": on_device or None, "capturable": on_device}
        return torch.optim.AdamW(parameters, lr, betas, config.eps, config.weight_decay, **flags)  # type: ignore[arg-type]

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}
