"""CaSSLe and PFR: a predictor must find the previous model's vectors in the new ones."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.encoders import encode
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model
from ptlf.objectives.objective import mean_over_views, negative_cosine, predictor


@dataclass
class CassleConfig(MethodConfig):
    name: str = "cassle"
    weight: float = key(1.0, "weight of the loss against the previous model", least=0)
    hidden: int = key(2048, "hidden width of the predictor", least=1)


class Cassle(Method):
    """CaSSLe: predicted projections against the previous model's, with the objective's own kind of loss."""

    Config = CassleConfig
    distills = True

    def __init__(self, config: CassleConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        self.config = config
        self.predictor = predictor(self.width(model), config.hidden)
        self.previous = Previous(model)

    def width(self, model: Model) -> int:
        return model.objective.projection_dim

    def begin_task(self, index: int, model: Model) -> None:
        super().begin_task(index, model)
        self.previous.copy(model)

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        features = model.encode(batch.mixed)
        projected = [model.objective.projector(f) for f in features]
        losses = {"ssl": model.objective.compare(projected, batch)}
        if self.task > 0:
            losses["distill"] = self.config.weight * self.distill(model, features, projected, batch)
        return losses

    def distill(self, model: Model, features: Sequence[Tensor], projected: Sequence[Tensor], batch: Batch) -> Tensor:
        return model.objective.distill([self.predictor(z) for z in projected], self.previous.project(batch.mixed))


@dataclass
class PFRConfig(CassleConfig):
    name: str = "pfr"


class PFR(Cassle):
    """PFR: predicted features against the previous encoder's, by negative cosine, whatever the objective."""

    Config = PFRConfig

    def width(self, model: Model) -> int:
        return model.objective.feature_dim

    def distill(self, model: Model, features: Sequence[Tensor], projected: Sequence[Tensor], batch: Batch) -> Tensor:
        old = self.previous.encode(batch.mixed)
        return mean_over_views([negative_cosine(self.predictor(f), z) for f, z in zip(features, old, strict=True)])


class Previous(nn.Module):
    """Encoder and projector as the last task left them. Norms use the batch's statistics, and nothing ever moves."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.encoder = deepcopy(model.encoder)
        self.projector = deepcopy(model.objective.projector)
        self.dtype = model.dtype
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.track_running_stats = False

    @torch.no_grad()
    def copy(self, model: Model) -> None:
        self.encoder.load_state_dict(model.encoder.state_dict())
        self.projector.load_state_dict(model.objective.projector.state_dict())

    @torch.no_grad()
    def encode(self, views: Sequence[Tensor]) -> list[Tensor]:
        return encode(self.encoder, views, self.dtype)

    @torch.no_grad()
    def project(self, views: Sequence[Tensor]) -> list[Tensor]:
        return [self.projector(f) for f in self.encode(views)]
