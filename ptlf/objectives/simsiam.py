"""SimSiam: each view predicts the other's projection; the target passes no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ptlf.batch import Batch
from ptlf.objectives.objective import Objective, ObjectiveConfig, negative_cosine, projector
from ptlf.settings import key


@dataclass
class SimSiamConfig(ObjectiveConfig):
    name: str = "simsiam"
    projection: int = key(2048, "width of the projector", least=1)
    bottleneck: int = key(512, "hidden width of the predictor", least=1)


class SimSiam(Objective):
    Config = SimSiamConfig

    def __init__(self, config: SimSiamConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = projector(feature_dim, config.projection, config.projection)
        self.predictor = nn.Sequential(
            nn.Linear(config.projection, config.bottleneck),
            nn.BatchNorm1d(config.bottleneck),
            nn.ReLU(),
            nn.Linear(config.bottleneck, config.projection),
        )

    def loss(self, features: Sequence[Tensor], batch: Batch) -> Tensor:
        z1, z2 = (self.projector(f) for f in features)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return (negative_cosine(p1, z2.detach()) + negative_cosine(p2, z1.detach())) / 2
