"""The objective's contract: heads on top of the encoder's vectors, and the loss. It knows no backbone.

An objective sees float32 features, one tensor (B, feature_dim) per view, and the batch they were made from. Its
`projector` turns them into projections z (B, projection_dim); `compare` is the loss between the views' projections,
`distill` the same kind of loss between predicted projections and those of an earlier model. Its parameters train with
the encoder's; what moves without a gradient moves in `after_step`.

Where several processes share a run, each has its share of the batch. A loss that is a mean over images needs to know
nothing of it; one that compares images, or takes statistics over them, takes `all_gather_rows` of its vectors first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.objectives.heads import each_view
from ptlf.objectives.teacher import Teacher


@dataclass
class ObjectiveConfig:
    name: str = key("simsiam", "which objective; `ptlf list objectives` names them")


C = TypeVar("C", bound=ObjectiveConfig)


class Objective(nn.Module, Generic[C]):
    Config: type[ObjectiveConfig] = ObjectiveConfig
    needs_labels = False  # refuses streams and methods without a label per image
    presets: ClassVar[Presets] = {}

    projector: nn.Module
    projection_dim: int
    teacher: Teacher | None  # a copy whose projections of the mixed views are `batch.targets`

    def __init__(self, config: C, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        """`encoder` is there for objectives that keep a copy of it; `classes` for those that use labels."""
        super().__init__()
        self.config = config
        self.feature_dim = feature_dim
        self.projector = nn.Identity()
        self.projection_dim = feature_dim
        self.teacher = None

    @classmethod
    def can_distill(cls) -> bool:
        """Whether it compares projections with those of an earlier model."""
        return cls.compare is not Objective.compare and cls.distill is not Objective.distill

    def loss(self, features: Sequence[Tensor], batch: Batch) -> Tensor:
        return self.compare(each_view(self.projector, features), batch)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        """The loss, from the views' projections."""
        raise NotImplementedError

    def distill(self, predicted: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
        """The objective's own kind of loss between predictions of an earlier model's projections and these."""
        raise NotImplementedError

    def begin_task(self, steps: int) -> None:
        """Called before the first of a task's `steps` steps. What differs from task to task must be in a buffer: a
        graph captured in an earlier task may be replayed."""
        if self.teacher is not None:
            self.teacher.begin_task(steps)

    def after_step(self, encoder: nn.Module, batch: Batch) -> None:
        """Called after the optimizer's step on this batch, for what moves without a gradient."""
        if self.teacher is not None:
            self.teacher.follow(encoder, self.projector)


def mean_over_views(loss: Callable[..., Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """The mean of loss(a, b) over the pairs of the two sequences."""
    return torch.stack([loss(a, b) for a, b in zip(first, second, strict=True)]).mean()


def contrastive_distillation(predicted: Sequence[Tensor], old: Sequence[Tensor], temperature: float) -> Tensor:
    """Each prediction must find its own old projection among all of them, and each old projection its prediction.

    All views are pooled: V views of B images give V * B candidates.
    """
    p, z = (F.normalize(torch.cat([all_gather_rows(v) for v in vectors]), dim=1) for vectors in (predicted, old))
    logits = p @ z.T / temperature
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
