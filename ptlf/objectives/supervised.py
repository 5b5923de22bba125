"""Supervised cross-entropy over all classes of the stream, for the rows that learn with labels."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets
from ptlf.objectives.heads import negative_cosine
from ptlf.objectives.objective import Objective, ObjectiveConfig, mean_over_views


class Supervised(Objective[ObjectiveConfig]):
    needs_labels = True
    presets: ClassVar[Presets] = {
        "lump": {"views": {"name": "supervised"}},
        "digits": {"training": {"lr": 0.06}},
        "cassle": {
            "views": {"name": "cassle-moco"},
            "training": {"optimizer": {"name": "sgd", "weight_decay": 1e-4}, "lr": 0.1, "warmup": 0},
        },
    }

    def __init__(self, config: ObjectiveConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.classifier = nn.Linear(feature_dim, classes)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        logits = self.classifier(torch.cat(list(projected)))
        return F.cross_entropy(logits, batch.labels.repeat(len(projected)))

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        """Negative cosine between features: an earlier model's logits know nothing of the new classes."""
        return mean_over_views(negative_cosine, predicted, old)
