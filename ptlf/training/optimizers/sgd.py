"""SGD with momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.settings import key
from ptlf.training.optimizers.optimizer import OptimizerConfig, State, UpdateRule


@dataclass
class SGDConfig(OptimizerConfig):
    name: str = "sgd"
    momentum: float = key(0.9, "momentum; carries over between tasks, but for what froze", ge=0, le=0.9999)
    weight_decay: float = key(5e-4, "weight decay", ge=0)


class SGD(UpdateRule[SGDConfig]):
    Config = SGDConfig

    @staticmethod
    def make(config: SGDConfig, parameters: Sequence[nn.Parameter], lr: float | Tensor) -> torch.optim.SGD:
        fused = True if isinstance(lr, Tensor) else None
        return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=fused)

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State:
        """torch's fused SGD also needs it uncaptured: it takes momentum for all parameters or for none."""
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}
