"""Objectives that keep the dimensions of a projection from correlating: Barlow Twins and VICReg."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.objectives.objective import Objective, ObjectiveConfig, mean_over_views, mlp


@dataclass
class BarlowTwinsConfig(ObjectiveConfig):
    name: str = "barlow_twins"
    projection: int = key(2048, "width of the projector", ge=1)
    layers: int = key(2, "linear layers of the projector: 2, the last with a norm, or 3, the last without", ge=2, le=3)
    redundancy: float = key(5e-3, "weight of the off-diagonal terms (the paper's lambda)", ge=0)
    scale: float = key(1.0, "factor on the whole loss, and on that against an earlier model (CaSSLe)", gt=0)


class BarlowTwins(Objective[BarlowTwinsConfig]):
    """Barlow Twins: the cross-correlation of the two views' projections is driven to the identity."""

    Config = BarlowTwinsConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
        "cassle": {"objective": {"scale": 0.1, "layers": 3}},
    }

    def __init__(self, config: BarlowTwinsConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = mlp(feature_dim, *[config.projection] * config.layers, last_norm=config.layers == 2)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        z1, z2 = projected
        return self.config.scale * barlow_twins_loss(z1, z2, self.config.redundancy)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        redundancy = self.config.redundancy
        return self.config.scale * mean_over_views(lambda p, z: barlow_twins_loss(p, z, redundancy), predicted, old)


def barlow_twins_loss(z1: Tensor, z2: Tensor, redundancy: float = 5e-3) -> Tensor:
    """Sum of (1 - C_ii)^2 + `redundancy` * C_ij^2, of the cross-correlation C (D, D) of projections (B, D)."""
    z1, z2 = all_gather_rows(z1), all_gather_rows(z2)
    correlation = standardise_columns(z1).T @ standardise_columns(z2) / len(z1)
    diagonal = correlation.diagonal()
    off_diagonal = correlation.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + redundancy * off_diagonal


def standardise_columns(z: Tensor) -> Tensor:
    """To mean 0 and (unbiased) std 1. A constant column becomes 0, not NaN: its std is held above 1e-5."""
    return (z - z.mean(0)) / (z.var(0) + 1e-10).sqrt()


# Settings of Bardes et al. 2022. As in their code, the invariance term is the mean over images and dimensions, and the
# variance term that over the views (lightly averages it too; solo-learn and CaSSLe sum it).
@dataclass
class VICRegConfig(ObjectiveConfig):
    name: str = "vicreg"
    projection: int = key(8192, "width of the projector, hidden layers included", ge=1)
    invariance: float = key(25.0, "weight of the squared distance of views, or to an earlier model", ge=0)
    variance: float = key(25.0, "weight of the hinge on each dimension's deviation", ge=0)
    covariance: float = key(1.0, "weight of the squared covariances between dimensions", ge=0)


class VICReg(Objective[VICRegConfig]):
    """VICReg: the views' projections agree, while every dimension keeps its variance and no two correlate."""

    Config = VICRegConfig
    presets: ClassVar[Presets] = {
        "lump": {"objective": {"projection": 2048}},
        "digits": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
        "cassle": {
            "objective": {"projection": 2048},
            "views": {"name": "cassle-vicreg"},
            "probes": {"linear": {"lr": 0.3}},
        },
    }

    def __init__(self, config: VICRegConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = mlp(feature_dim, *[config.projection] * 3)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        z1, z2 = projected
        return vicreg_loss(z1, z2, self.config.invariance, self.config.variance, self.config.covariance)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        """Only invariance, as in CaSSLe: the earlier model's projections have their variance already."""
        return self.config.invariance * mean_over_views(F.mse_loss, predicted, old)


def vicreg_loss(
    z1: Tensor, z2: Tensor, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0
) -> Tensor:
    """Of the views' projections (B, D), with a weight for each term."""
    z1, z2 = all_gather_rows(z1), all_gather_rows(z2)
    loss = invariance * F.mse_loss(z1, z2) + variance * (variance_loss(z1) + variance_loss(z2)) / 2
    return loss + covariance * (covariance_loss(z1) + covariance_loss(z2))


def variance_loss(z: Tensor) -> Tensor:
    """Mean over dimensions of what the deviation over the batch lacks to 1."""
    return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()


def covariance_loss(z: Tensor) -> Tensor:
    """Sum of the squared off-diagonal covariances over the batch, per dimension."""
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
