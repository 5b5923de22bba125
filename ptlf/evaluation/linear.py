"""A linear probe on cached features: softmax regression by SGD."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.settings import key
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig, Score, per_cent_equal


@dataclass
class LinearConfig(ProbeConfig):
    """CaSSLe's protocol: SGD with momentum 0.9, the rate divided by 10 at 60 % and 80 % of the epochs. There features
    stay as they are, which takes many steps: those of a random encoder are small, and would be underrated."""

    epochs: int = key(100, "passes over the cached features", ge=1, le=10_000)
    batch: int = key(256, "features per step", ge=1)
    lr: float = key(0.1, "learning rate", gt=0)
    momentum: float = key(0.9, "momentum", ge=0, le=0.9999)
    weight_decay: float = key(0.0, "weight decay", ge=0)
    standardise: bool = key(True, "scale features by mean and deviation of the bank; off in CaSSLe's protocol")


class Linear(Probe[LinearConfig]):
    """Softmax regression by SGD, within tasks and among all classes."""

    Config = LinearConfig
    rows: ClassVar[Mapping[str, str]] = {"linear_task": OWN, "linear": SEEN}

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int) -> Score:
        weight, bias, classes = linear_fit(features, labels, self.config)
        return lambda inputs, truth: per_cent_equal(classes[F.linear(inputs, weight, bias).argmax(1)], truth)


def linear_fit(features: Tensor, labels: Tensor, config: LinearConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax regression over the labels (N,) that occur, on features (N, D), from zero weights.

    Returns the weight (C, D), the bias (C,) and the label (C,) that each output stands for.
    """
    generator = torch.Generator().manual_seed(0)  # so that the accuracy is a function of the features alone
    classes, targets = labels.unique(return_inverse=True)
    mean, deviation = features.double().mean(0), features.double().std(0, correction=0).clamp_min(1e-6)
    if config.standardise:
        features = ((features - mean) / deviation).to(features.dtype)
    weight = torch.zeros(len(classes), features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(len(classes), device=features.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], config.lr, config.momentum, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(p * config.epochs) for p in (0.6, 0.8)])
    with torch.enable_grad():
        for _ in range(config.epochs):
            order = torch.randperm(len(features), generator=generator).to(features.device)
            for part in order.split(config.batch):
                loss = F.cross_entropy(F.linear(features[part], weight, bias), targets[part])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            schedule.step()
    weight, bias = weight.detach(), bias.detach()
    if config.standardise:  # for features as they were before
        unscaled = weight.double() / deviation
        weight, bias = unscaled.float(), (bias - unscaled @ mean).float()
    return weight, bias, classes
