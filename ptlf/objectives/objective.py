"""The objective's contract: heads on top of the encoder's vectors, and the loss. It knows no backbone.

An objective sees float32 features, one tensor (B, feature_dim) per view, and the batch they were made from. Its
`projector` turns them into projections z (B, projection_dim); `compare` is the loss between the views' projections,
`distill` the same kind of loss between predicted projections and those of an earlier model. Its parameters train with
the encoder's; what moves without a gradient moves in `after_step`.

Where several processes share a run, each has its share of the batch. A loss that is a mean over images needs to know
nothing of it; one that compares images, or takes statistics over them, takes `all_gather_rows` of its vectors first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.memory import check_fits
from ptlf.core.processes import all_gather_rows
from ptlf.core.settings import Presets, key
from ptlf.encoders.norm import SharedStatistics
from ptlf.objectives.teacher import Teacher


@dataclass
class ObjectiveConfig:
    name: str = key("simsiam", "which objective; `ptlf list objectives` names them")


class Objective(nn.Module):
    Config: type[ObjectiveConfig] = ObjectiveConfig
    needs_labels = False
    presets: ClassVar[Presets] = {}

    projector: nn.Module
    projection_dim: int
    teacher: Teacher | None  # a copy whose projections of the mixed views are `batch.targets`

    def __init__(self, config: ObjectiveConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        """`encoder` is there for objectives that keep a copy of it; `classes` for those that use labels."""
        super().__init__()
        self.config: Any = config
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


class Kernels(Protocol):
    """Implementations of the functions below with these names, such as those of `ptlf.training.fused_heads`."""

    def each_view(self, head: nn.Module, views: Sequence[Tensor]) -> list[Tensor]: ...

    def negative_cosine(self, prediction: Tensor, target: Tensor) -> Tensor: ...


_kernels: Kernels | None = None


@contextmanager
def through(kernels: Kernels) -> Iterator[None]:
    """Inside the block, `each_view` and `negative_cosine` are computed by these."""
    global _kernels
    before, _kernels = _kernels, kernels
    try:
        yield
    finally:
        _kernels = before


def each_view(head: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """The head's output for every view, each with its own batch statistics. Compiled code takes the products of all
    views at once."""
    if _kernels is not None:
        return _kernels.each_view(head, views)
    if not torch.compiler.is_compiling() or not isinstance(head, nn.Sequential):
        return [head(view) for view in views]
    x = torch.cat(list(views))
    for layer in head:
        if isinstance(layer, SharedStatistics) and layer.training:
            x = torch.cat(layer.of_views(x.chunk(len(views))))
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            x = torch.cat([layer(view) for view in x.chunk(len(views))])
        else:
            x = layer(x)
    return list(x.chunk(len(views)))


def mlp(*widths: int, norm: bool = True, last_norm: bool = False) -> nn.Sequential:
    """Linear layers from each width to the next, ReLU between them.

    norm: a BatchNorm before each ReLU. last_norm: one after the last layer too, as in the projectors of SimSiam and
    Barlow Twins in the LUMP protocol.
    """
    layers: list[nn.Module] = []
    weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    # Weights, gradients and momentum, 4 bytes each.
    check_fits(f"a head of widths {' x '.join(map(str, widths))}", 12 * weights, hint="choose narrower ones")
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers[: -1 if last_norm or not norm else -2])


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean of -cos(prediction, target) over the rows."""
    if _kernels is not None:
        return _kernels.negative_cosine(prediction, target)
    return -torch.cosine_similarity(prediction, target, dim=1).mean()


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
