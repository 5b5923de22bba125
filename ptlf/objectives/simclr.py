"""SimCLR: each view must find the other among all views of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.objectives.heads import mlp
from ptlf.objectives.objective import Objective, ObjectiveConfig, contrastive_distillation


# Settings of Chen et al. 2020: a head with one hidden layer as wide as ResNet-50's vectors, output 128; temperature 0.5
# is theirs for CIFAR-10 and small batches, 0.1 for ImageNet with batches of thousands.
@dataclass
class SimCLRConfig(ObjectiveConfig):
    name: str = "simclr"
    hidden: int = key(2048, "hidden width of the projector", ge=1)
    projection: int = key(128, "length of a projection", ge=1)
    temperature: float = key(0.5, "similarities are divided by it", ge=1e-3)
    distill_temperature: float = key(0.2, "temperature of the loss against an earlier model (CaSSLe)", ge=1e-3)


class SimCLR(Objective[SimCLRConfig]):
    Config = SimCLRConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"hidden": 256, "projection": 64}},
        "cassle": {"objective": {"temperature": 0.2}, "views": {"name": "cassle-moco"}},
    }

    def __init__(self, config: SimCLRConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projection_dim = config.projection
        self.projector = mlp(feature_dim, config.hidden, config.projection, norm=False)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        z1, z2 = projected
        return simclr_loss(z1, z2, self.config.temperature)

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return contrastive_distillation(predicted, old, self.config.distill_temperature)


def simclr_loss(z1: Tensor, z2: Tensor, temperature: float = 0.5) -> Tensor:
    """Of the views' projections (B, D): cross-entropy of picking an image's other view among all others (NT-Xent)."""
    z = F.normalize(torch.cat([all_gather_rows(z) for z in (z1, z2)]), dim=1)  # (2B, D)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, float("-inf"))
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(logits, partner)
