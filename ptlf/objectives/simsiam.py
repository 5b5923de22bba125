"""SimSiam: each view predicts the other's projection; the target passes no gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets, key
from ptlf.objectives.heads import each_view, mlp, negative_cosine
from ptlf.objectives.objective import Objective, ObjectiveConfig, mean_over_views


@dataclass
class SimSiamConfig(ObjectiveConfig):
    name: str = "simsiam"
    projection: int = key(2048, "width of the projector", ge=1)
    bottleneck: int = key(512, "hidden width of the predictor", ge=1)


class SimSiam(Objective[SimSiamConfig]):
    Config = SimSiamConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"projection": 256, "bottleneck": 64}},
        "cassle": {
            "views": {"name": "cassle-moco"},
            "training": {"optimizer": {"name": "sgd", "weight_decay": 1e-4}, "lr": 0.05, "warmup": 0},  # SimSiam's rate
        },
    }

    def __init__(self, config: SimSiamConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projection_dim = config.projection
        self.projector = mlp(feature_dim, config.projection, config.projection, last_norm=True)
        self.predictor = mlp(config.projection, config.bottleneck, config.projection)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        z1, z2 = projected
        p1, p2 = each_view(self.predictor, projected)
        return simsiam_loss(p1, p2, z1, z2)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return mean_over_views(negative_cosine, predicted, old)


def simsiam_loss(p1: Tensor, p2: Tensor, z1: Tensor, z2: Tensor) -> Tensor:
    """Predictions p of one view against the projections z of the other, (B, D) each. Targets pass no gradient."""
    return (negative_cosine(p1, z2.detach()) + negative_cosine(p2, z1.detach())) / 2
