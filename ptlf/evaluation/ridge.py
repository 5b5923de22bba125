"""Ridge probe on cached features: a linear classifier in closed form, as a second opinion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.settings import key
from ptlf.evaluation.classifier import Classifier
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig, Score


@dataclass
class RidgeConfig(ProbeConfig):
    """One linear solve on standardised features against one-hot labels."""

    penalty: float = key(1e-3, "ridge penalty, as a share of the number of images", above=0)


class Ridge(Probe):
    Config = RidgeConfig
    rows: ClassVar[Mapping[str, str]] = {"ridge_task": OWN, "ridge": SEEN}

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int) -> Score:
        return ridge_fit(features, labels, self.config).accuracy


def ridge_fit(features: Tensor, labels: Tensor, config: RidgeConfig) -> Classifier:
    """Least squares on one-hot labels with a penalty on the weights of the standardised features."""
    classes, targets = labels.unique(return_inverse=True)
    x, y = features.double(), F.one_hot(targets).double()
    mean, deviation = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    x, offset = (x - mean) / deviation, y.mean(0)
    gram = x.T @ x + config.penalty * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, x.T @ (y - offset)).T / deviation
    return Classifier(weight.to(features.dtype), (offset - weight @ mean).to(features.dtype), classes)
