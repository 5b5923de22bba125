"""The learning rate over a task's epochs."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from ptlf.core.errors import UserError
from ptlf.core.settings import key


@dataclass
class RateConfig:
    lr: float = key(0.03, "learning rate for a batch of 256; scaled with the batch", gt=0)
    schedule: str = key("constant", "learning rate over a task's epochs", choices=("constant", "cosine"))
    warmup: int = key(0, "epochs of linear warm-up at the start of each task", ge=0)
    batch: int = key(256, "images per step, of all processes (each gives two views)", ge=2)


def peak_rate(config: RateConfig) -> float:
    return config.lr * config.batch / 256


def learning_rate(config: RateConfig, epoch: float, epochs: int) -> float:
    """The rate at a (fractional) epoch of a task: linear warm-up, then constant or half a cosine down to zero."""
    peak = peak_rate(config)
    if epoch < config.warmup:
        return peak * epoch / config.warmup
    if config.schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (epoch - config.warmup) / max(1, epochs - config.warmup)))


def check_warmup(config: RateConfig, epochs: int) -> None:
    if config.warmup and config.warmup >= epochs:
        raise UserError(f"training.warmup is {config.warmup} epochs, but a task has only {epochs}; it must be less")


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """In place where the rate is a tensor: a captured step reads the one it saw."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
