"""A linear classifier on features, as linear and ridge probes fit it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Classifier:
    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)
    classes: Tensor  # (C,) the label each output stands for

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Per cent of the features (N, D) whose largest output stands for their label."""
        predicted = self.classes[F.linear(features, self.weight, self.bias).argmax(1)]
        return 100 * float((predicted == labels).double().mean())
