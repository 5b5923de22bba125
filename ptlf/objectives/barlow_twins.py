"""Barlow Twins: the cross-correlation of the two views' projections is driven to the identity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.objectives.heads import mlp
from ptlf.objectives.objective import Objective, ObjectiveConfig, mean_over_views


@dataclass
class BarlowTwinsConfig(ObjectiveConfig):
    name: str = "barlow_twins"
    projection: int = key(2048, "width of the projector", ge=1)
    redundancy: float = key(5e-3, "weight of the off-diagonal terms (the paper's lambda)", ge=0)
    scale: float = key(1.0, "factor on the whole loss, and on that against an earlier model (CaSSLe)", gt=0)


class BarlowTwins(Objective[BarlowTwinsConfig]):
    Config = BarlowTwinsConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
        "cassle": {"objective": {"scale": 0.1}},
    }

    def __init__(self, config: BarlowTwinsConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projection_dim = config.projection
        self.projector = mlp(feature_dim, config.projection, config.projection, last_norm=True)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        return self.config.scale * self.decorrelate(*projected)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return self.config.scale * mean_over_views(self.decorrelate, predicted, old)

    def decorrelate(self, z1: Tensor, z2: Tensor) -> Tensor:
        return barlow_twins_loss(z1, z2, self.config.redundancy)


def barlow_twins_loss(z1: Tensor, z2: Tensor, redundancy: float = 5e-3) -> Tensor:
    """Of the views' projections (B, D): the sum of (1 - C_ii)^2 plus `redundancy` times the sum of squared off-diagonal
    C_ij, where C (D, D) is their cross-correlation over the batch."""
    z1, z2 = all_gather_rows(z1), all_gather_rows(z2)
    correlation = standardise_columns(z1).T @ standardise_columns(z2) / len(z1)
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + redundancy * off_diagonal


def standardise_columns(z: Tensor) -> Tensor:
    """To mean 0 and (unbiased) std 1. A constant column becomes 0, not NaN: its std is held above 1e-5."""
    return (z - z.mean(0)) / (z.var(0) + 1e-10).sqrt()
