"""Objectives in which a predictor finds the other view's projection, SimSiam and BYOL; and the supervised one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets, key
from ptlf.objectives.objective import (
    CASSLE_MOCO,
    CASSLE_SGD,
    MomentumTeacher,
    Objective,
    ObjectiveConfig,
    each_view,
    mean_over_views,
    mlp,
    negative_cosine,
)


@dataclass
class SimSiamConfig(ObjectiveConfig):
    name: str = "simsiam"
    projection: int = key(2048, "width of the projector", ge=1)
    bottleneck: int = key(512, "hidden width of the predictor", ge=1)


class SimSiam(Objective[SimSiamConfig]):
    """SimSiam: each view predicts the other's projection; the target passes no gradient."""

    Config = SimSiamConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"projection": 256, "bottleneck": 64}},
        "cassle": {
            "views": CASSLE_MOCO,
            "training": {**CASSLE_SGD, "lr": 0.05},  # SimSiam's rate
            "probes": {"linear": {"lr": 30.0}},
        },
    }

    def __init__(self, config: SimSiamConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = mlp(feature_dim, config.projection, config.projection, last_norm=True)
        self.predictor = mlp(config.projection, config.bottleneck, config.projection)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        return simsiam_loss(*each_view(self.predictor, projected), *projected)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return mean_over_views(negative_cosine, predicted, old)


def simsiam_loss(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """Predictions p of one view against the projections z of the other, (B, D) each. Targets pass no gradient."""
    return (negative_cosine(p1, z2.detach()) + negative_cosine(p2, z1.detach())) / 2


# Settings of Grill et al. 2020. Their squared distance of unit vectors is 2 - 2 cos.
@dataclass
class BYOLConfig(ObjectiveConfig):
    name: str = "byol"
    hidden: int = key(4096, "hidden width of projector and predictor", ge=1)
    predictor_hidden: int | None = key(None, "hidden width of the predictor; null = hidden", ge=1)
    projection: int = key(256, "length of a projection", ge=1)
    momentum_start: float = key(0.996, "share of itself the momentum network keeps, at a task's start", ge=0, le=1)
    momentum_end: float = key(1.0, "the same at a task's end", ge=0, le=1)


class BYOL(Objective[BYOLConfig]):
    """BYOL: each view predicts the other's projection by a momentum network."""

    Config = BYOLConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"hidden": 256, "projection": 64, "momentum_start": 0.9}},
        "cassle": {
            "objective": {"momentum_start": 0.99, "predictor_hidden": 8192},
            "training": {"optimizer": {"weight_decay": 1e-5}, "lr": 0.6},
            "probes": {"linear": {"lr": 3.0}},
        },
    }

    def __init__(self, config: BYOLConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = mlp(feature_dim, config.hidden, config.projection)
        self.predictor = mlp(config.projection, config.predictor_hidden or config.hidden, config.projection)
        self.teacher = MomentumTeacher(encoder, self.projector, config.momentum_start, config.momentum_end)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        return byol_loss(*each_view(self.predictor, projected), *batch.targets)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return mean_over_views(lambda p, z: 2 + 2 * negative_cosine(p, z), predicted, old)


def byol_loss(p1: Tensor, p2: Tensor, t1: Tensor, t2: Tensor) -> Tensor:
    """Squared distances of unit vectors (B, D): predictions p against the other view's targets t, without gradient."""
    return (2 + 2 * negative_cosine(p1, t2)) + (2 + 2 * negative_cosine(p2, t1))


class Supervised(Objective[ObjectiveConfig]):
    """Supervised cross-entropy over all classes of the stream, for the rows that learn with labels."""

    needs_labels = True
    presets: ClassVar[Presets] = {
        "lump": {"views": {"name": "supervised"}},
        "digits": {"training": {"lr": 0.06}},
        "cassle": {"views": CASSLE_MOCO, "training": {**CASSLE_SGD, "lr": 0.1}},
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
