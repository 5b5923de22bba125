"""CaSSLe and PFR: a predictor must find the previous model's vectors in the new ones."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model
from ptlf.objectives.objective import Teacher, each_view, mean_over_views, mlp, negative_cosine


class PreviousModel(Teacher):
    """Encoder and projector as the last task left them. Norms use batch statistics and do not update their running
    ones; weights never move. Other buffers that a forward in train mode changes, as those of a spectral norm, do."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__(encoder, projector)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.track_running_stats = False


@dataclass
class CassleConfig(MethodConfig):
    name: str = "cassle"
    weight: float = key(1.0, "weight of the loss against the previous model", ge=0)
    hidden: int = key(2048, "hidden width of the predictor", ge=1)


class Cassle(Method[CassleConfig]):
    """CaSSLe: predicted projections against the previous model's, with the objective's own kind of loss."""

    Config = CassleConfig
    distills = True
    recapture = "second_task"

    def __init__(self, config: CassleConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        width = model.objective.projection_dim if self.distills else model.objective.feature_dim
        self.predictor = mlp(width, config.hidden, width)
        self.previous = PreviousModel(model.encoder, model.objective.projector)

    def begin_task(self, index: int, model: Model, steps: int) -> None:
        super().begin_task(index, model, steps)
        self.previous.encoder.load_state_dict(model.encoder.state_dict())
        self.previous.projector.load_state_dict(model.objective.projector.state_dict())

    def teacher(self) -> Teacher:
        return self.previous

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        vectors = self.vectors(model, batch)
        losses = {"ssl": model.compare(vectors, batch) if self.distills else model.loss(vectors, batch)}
        if self.task > 0:
            old, predicted = self.vectors(model, batch, self.previous), each_view(self.predictor, vectors)
            distilled = model.objective.distill if self.distills else partial(mean_over_views, negative_cosine)
            losses["distill"] = self.config.weight * distilled(predicted, old)
        return losses

    def vectors(self, model: Model, batch: Batch, teacher: Teacher | None = None) -> list[Tensor]:
        """What is compared with the previous model's: projections, or features."""
        features = model.encode(batch.mixed, teacher)
        return model.project(features, teacher) if self.distills else features


class PFR(Cassle):
    """PFR: predicted features against the previous encoder's, by negative cosine, whatever the objective."""

    distills = False
