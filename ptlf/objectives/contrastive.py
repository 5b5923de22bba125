"""Objectives in which each view must find its partner among others: SimCLR and MoCo v2+."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.memory import check_fits
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.objectives.objective import CASSLE_MOCO, CASSLE_SGD, MomentumTeacher, Objective, ObjectiveConfig, mlp


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
    """SimCLR: each view must find the other among all views of the batch."""

    Config = SimCLRConfig
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"hidden": 256, "projection": 64}},
        "cassle": {
            "objective": {"temperature": 0.2},
            "views": {"name": "cassle-simclr"},
            "probes": {"linear": {"lr": 1.0}},
        },
    }

    def __init__(self, config: SimCLRConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
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


# Settings of MoCo v2 (Chen et al. 2020); "+" is the symmetric loss and its hidden width, from SimSiam's comparison.
# The momentum schedule is CaSSLe's; MoCo v2 itself keeps 0.999 throughout.
@dataclass
class MoCoV2PlusConfig(ObjectiveConfig):
    name: str = "mocov2plus"
    hidden: int = key(2048, "hidden width of the projector", ge=1)
    projection: int = key(128, "length of a projection", ge=1)
    queue: int = key(65536, "earlier keys to tell apart from, for each view", ge=1)
    temperature: float = key(0.2, "similarities are divided by it", ge=1e-3)
    momentum_start: float = key(0.99, "share of itself the momentum network keeps, at a task's start", ge=0, le=1)
    momentum_end: float = key(0.999, "the same at a task's end", ge=0, le=1)
    distill_temperature: float = key(0.2, "temperature of the loss against an earlier model (CaSSLe)", ge=1e-3)


class MoCoV2Plus(Objective[MoCoV2PlusConfig]):
    """MoCo v2+: each view must find the other's momentum key among those of many earlier images (symmetric loss)."""

    Config = MoCoV2PlusConfig
    distills_unit_vectors = True  # as in CaSSLe's code
    presets: ClassVar[Presets] = {
        "digits": {"objective": {"hidden": 256, "projection": 64, "queue": 512}},
        "cassle": {"views": CASSLE_MOCO, "training": CASSLE_SGD, "probes": {"linear": {"lr": 3.0}}},
    }

    def __init__(self, config: MoCoV2PlusConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        super().__init__(config, encoder, feature_dim, classes)
        self.projector = mlp(feature_dim, config.hidden, config.projection, norm=False)
        self.teacher = MomentumTeacher(encoder, self.projector, config.momentum_start, config.momentum_end)
        check_fits(f"objective.queue {config.queue}", 24 * config.queue * config.projection)  # and what makes it
        self.queue = nn.Buffer(F.normalize(torch.randn(2, config.queue, config.projection), dim=2))
        self.pointer = nn.Buffer(torch.zeros((), dtype=torch.int64))  # the row that is overwritten next

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        q1, q2 = (F.normalize(z, dim=1) for z in projected)
        k1, k2 = (F.normalize(z, dim=1) for z in batch.targets)
        first, second = self.queue
        temperature = self.config.temperature
        return (moco_loss(q1, k2, second, temperature) + moco_loss(q2, k1, first, temperature)) / 2

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        return contrastive_distillation(predicted, old, self.config.distill_temperature)

    @torch.no_grad()
    def after_step(self, encoder: nn.Module, batch: Batch) -> None:
        super().after_step(encoder, batch)
        keys = torch.stack([F.normalize(all_gather_rows(z), dim=1) for z in batch.targets])  # (2, B, D)
        keys = keys[:, -self.config.queue :]
        rows = (self.pointer + torch.arange(keys.shape[1], device=keys.device)) % self.config.queue
        self.queue.index_copy_(1, rows, keys)
        self.pointer.copy_((self.pointer + keys.shape[1]) % self.config.queue)


def moco_loss(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float = 0.2) -> Tensor:
    """Of picking each query's own key among it and the queue's. Unit vectors: queries, keys (B, D), queue (K, D)."""
    own = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat((own, queries @ queue.T), dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def contrastive_distillation(predicted: Sequence[Tensor], old: Sequence[Tensor], temperature: float) -> Tensor:
    """Each prediction must find its own old projection among those of all views, and each old one its prediction."""
    p, z = (F.normalize(torch.cat([all_gather_rows(v) for v in vectors]), dim=1) for vectors in (predicted, old))
    logits = p @ z.T / temperature
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
