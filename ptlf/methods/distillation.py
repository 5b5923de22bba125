"""Methods with an earlier model as teacher: CaSSLe and PFR predict its vectors, Anchor stays near them."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets, key
from ptlf.freezing import Freezer
from ptlf.freezing.kernels import EvalMode
from ptlf.methods.memory import Memory
from ptlf.methods.method import Method, MethodConfig
from ptlf.model import Model
from ptlf.objectives.objective import Teacher, each_view, mean_over_views, mlp, negative_cosine

SMOOTHING = 0.1  # share of a step in the running mean of the objective's gradient

GENTLE = {"views": {"name": "gentle"}}
CONTINUED = {
    "objective": {"projection": 1024},
    "training": {
        "optimizer": {"name": "adamw", "weight_decay": 1e-2},
        "lr": 1.2e-4,
        "head_lr": 4e-3,
        "schedule": "cosine",
        "warmup": 0,
        "batch": 64,
        "epochs": 40,
        "keep_views": 8,
    },
}


class PreviousModel(Teacher):
    """Encoder and projector as the last task left them. Norms use batch statistics and do not update their running
    ones; weights never move. Other buffers that a forward in train mode changes, as those of a spectral norm, do."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__(encoder, projector)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.track_running_stats = False
        self.held: list[EvalMode] = []

    def freeze_like(self, freezer: Freezer) -> None:
        """Norms of units that are frozen in the model, and still the same in both, use running statistics here too: the
        two then compute the same in a frozen prefix, and share its forward."""
        while self.held:
            self.held.pop().detach()
        paths = {module: path for path, module in freezer.module.named_modules()}
        for unit in freezer.units:
            if unit.name not in freezer.frozen or freezer.batch_statistics:
                continue
            copies = {module: self.encoder.get_submodule(paths[module]) for module in (unit.layer, *unit.norms)}
            states = ((module.state_dict().values(), copy.state_dict().values()) for module, copy in copies.items())
            if all(all(map(torch.equal, own, other)) for own, other in states):
                norms = [copies[norm] for norm in unit.norms]
                self.held += [EvalMode(norm) for norm in norms if getattr(norm, "running_mean", None) is not None]
        for patch in self.held:
            patch.attach()


@dataclass
class CassleConfig(MethodConfig):
    name: str = "cassle"
    weight: float = key(1.0, "weight of the loss against the previous model", ge=0)
    hidden: int | None = key(2048, "hidden width of the predictor; null = half of what goes in", ge=1)


class Cassle(Method[CassleConfig]):
    """CaSSLe: predicted projections against the previous model's, with the objective's own kind of loss."""

    Config = CassleConfig
    distills = True
    recapture = "second_task"

    def __init__(self, config: CassleConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        width = model.objective.projection_dim if self.distills else model.objective.feature_dim
        self.predictor = mlp(width, config.hidden or max(1, width // 2), width)
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
            old = self.vectors(model, batch, self.previous)
            if self.distills and model.objective.distills_unit_vectors:
                vectors = [F.normalize(vector, dim=1) for vector in vectors]
            predicted = each_view(self.predictor, vectors)
            distilled = model.objective.distill if self.distills else partial(mean_over_views, negative_cosine)
            losses["distill"] = self.config.weight * distilled(predicted, old)
        return losses

    def vectors(self, model: Model, batch: Batch, teacher: Teacher | None = None) -> list[Tensor]:
        """What is compared with the previous model's: projections, or features."""
        features = model.encode(batch.mixed, teacher)
        return model.project(features, teacher) if self.distills else features


@dataclass
class PFRConfig(CassleConfig):
    name: str = "pfr"
    hidden: int | None = key(None, "hidden width of the predictor; null = half of what goes in, as in PFR's code", ge=1)


class PFR(Cassle):
    """PFR: predicted features against the previous encoder's, by negative cosine, whatever the objective."""

    Config = PFRConfig
    distills = False


@dataclass
class AnchorConfig(MethodConfig):
    name: str = "anchor"
    weight: float = key(0.1, "strongest pull on a feature vector, as a share of the objective's pull", ge=0)
    teacher: str = key("previous", "the last task's encoder, or always the given one", choices=("previous", "given"))


class Anchor(Method[AnchorConfig]):
    """Anchor: features stay near those of the encoder that the run began with, or of the last task's.

    They are held by negative cosine. The weight is relative to the size of the objective's gradient at the features.
    """

    Config = AnchorConfig
    starts_from_given = True
    recapture = "never"
    presets: ClassVar[Presets] = {"lump": GENTLE | CONTINUED, "cassle": GENTLE | CONTINUED, "digits": CONTINUED}

    def __init__(self, config: AnchorConfig, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        super().__init__(config, model, memory, generator)
        self.previous = Teacher(model.encoder, nn.Identity()).eval()
        self.pull = nn.Buffer(torch.zeros(()))  # running mean: norm of the objective's gradient at the features

    def train(self, mode: bool = True) -> "Anchor":
        """The teacher's norms keep to their running statistics."""
        super().train(mode)
        self.previous.eval()
        return self

    def begin_task(self, index: int, model: Model, steps: int) -> None:
        super().begin_task(index, model, steps)
        if index == 0 or self.config.teacher == "previous":
            self.previous.encoder.load_state_dict(model.encoder.state_dict())
        self.pull.zero_()

    def teacher(self) -> Teacher:
        return self.previous

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        features = model.encode(batch.mixed)
        ssl = model.loss(features, batch)
        if not self.config.weight:
            return {"ssl": ssl}
        earlier = model.encode(batch.mixed, self.previous)
        distance = 1 + mean_over_views(negative_cosine, features, earlier)
        return {"ssl": ssl, "anchor": self.config.weight * self.scale(ssl, features) * distance}

    def scale(self, ssl: Tensor, features: list[Tensor]) -> Tensor:
        """What makes the anchor's gradient, at a right angle to the earlier vector, as large as the objective's."""
        if not ssl.requires_grad:
            return self.pull
        gradients = torch.autograd.grad(ssl, features, retain_graph=True)
        with torch.no_grad():
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            share = torch.where(self.pull > 0, SMOOTHING, 1.0)
            self.pull.lerp_(norm, share)
            # d(1 - cos)/dx is at most 1 / |x|; the loss is a mean over all rows of all views.
            rows = torch.cat([feature.norm(dim=1) for feature in features])
            return self.pull / (rows.reciprocal().norm() / len(rows))
