"""Supervised cross-entropy over all classes of the stream, for the rows that learn with labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.batch import Batch
from ptlf.objectives.objective import Objective, ObjectiveConfig


class Supervised(Objective):
    needs_labels = True

    def __init__(self, config: ObjectiveConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.classifier = nn.Linear(feature_dim, classes)

    def loss(self, features: Sequence[Tensor], batch: Batch) -> Tensor:
        logits = self.classifier(torch.cat(list(features)))
        return F.cross_entropy(logits, batch.labels.repeat(len(features)))
