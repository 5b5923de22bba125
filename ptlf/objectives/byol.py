"""BYOL: each view predicts the other's projection by a momentum network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets, key
from ptlf.objectives.heads import each_view, mlp, negative_cosine
from ptlf.objectives.objective import Objective, ObjectiveConfig, mean_over_views
from ptlf.objectives.teacher import MomentumTeacher


# Settings of Grill et al. 2020. Their squared distance of unit vectors is 2 - 2 cos.
@dataclass
class BYOLConfig(ObjectiveConfig):
    name: str = "byol"
    hidden: int = key(4096, "hidden width of projector and predictor", ge=1)
    projection: int = key(256, "length of a projection", ge=1)
    momentum_start: float = key(0.996, "share of itself the momentum network keeps, at a task's start", ge=0, le=1)
    momentum_end: float = key(1.0, "the same at a task's end", ge=0, le=1)


class BYOL(Objective[BYOLConfig]):
    Config = BYOLConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"hidden": 256, "projection": 64, "momentum_start": 0.9}},
        "cassle": {"objective": {"momentum_start": 0.99}, "training": {"optimizer": {"weight_decay": 1e-5}, "lr": 0.6}},
    }

    def __init__(self, config: BYOLConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projection_dim = config.projection
        self.projector = mlp(feature_dim, config.hidden, config.projection)
        self.predictor = mlp(config.projection, config.hidden, config.projection)
        self.teacher = MomentumTeacher(encoder, self.projector, config.momentum_start, config.momentum_end)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        p1, p2 = each_view(self.predictor, projected)
        t1, t2 = batch.targets
        return byol_loss(p1, p2, t1, t2)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return mean_over_views(lambda p, z: 2 + 2 * negative_cosine(p, z), predicted, old)


def byol_loss(p1: Tensor, p2: Tensor, t1: Tensor, t2: Tensor) -> Tensor:
    """Squared distances of unit vectors: predictions p of one view against the momentum network's projections t of the
    other, (B, D) each. `t` must come without gradient."""
    return (2 + 2 * negative_cosine(p1, t2)) + (2 + 2 * negative_cosine(p2, t1))
