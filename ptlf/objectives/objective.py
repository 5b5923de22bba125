"""The objective's contract: heads on top of the encoder's vectors, and the loss. It knows no backbone.

An objective sees float32 features, one tensor (B, feature_dim) per view, and the batch they were made from. Its
`projector` turns them into projections (B, projection_dim). Its parameters train with the encoder's.

Where several processes share a run, each has its share of the batch. A loss that compares images, or takes statistics
over them, takes `all_gather_rows` of its vectors first.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.core.batch import Batch
from ptlf.core.memory import check_fits
from ptlf.core.settings import Presets, key
from ptlf.freezing import Freezer
from ptlf.freezing.kernels import replaced_forward
from ptlf.freezing.recording import BATCH_NORMS

# Of CaSSLe's protocol, for objectives that it trains by SGD on the views of MoCo.
CASSLE_MOCO = {"name": "cassle-moco"}
CASSLE_SGD = {"optimizer": {"name": "sgd", "weight_decay": 1e-4}, "warmup": 0}


class MLP(nn.Sequential):
    """Layers of which each norm sees one view at a time. On a GPU `ptlf.kernels` replaces it, with the same state."""

    bf16 = False  # the products of linear layers, with float32 around them

    def each_view(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The output for every view. A product takes the rows of all at once: it reads its weight once."""
        own = type(self).forward is not nn.Sequential.forward or not is_as_built(self)
        if own or len({len(view) for view in views}) > 1 or not all(map(is_norm_or_rowwise, self)):
            return [self(view) for view in views]
        x = torch.cat(list(views))
        for layer in self:
            if isinstance(layer, BATCH_NORMS):
                x = torch.cat([layer(view) for view in x.chunk(len(views))])
            elif self.bf16 and isinstance(layer, nn.Linear):
                x = F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).float()
            else:
                x = layer(x)
        return list(x.chunk(len(views)))


def is_norm_or_rowwise(layer: nn.Module) -> bool:
    """A batch norm, which sees one view at a time, or a layer that takes rows one by one."""
    return isinstance(layer, BATCH_NORMS) or (type(layer) in (nn.Linear, nn.ReLU, nn.Identity) and is_as_built(layer))


def is_as_built(module: nn.Module) -> bool:
    """Whether its forward is its class's own, and no hooks are registered."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return replaced_forward(module) is None and not any(hooks)


def mlp(*widths: int, norm: bool = True, last_norm: bool = False) -> MLP:
    """Linear layers from each width to the next, ReLU between them.

    norm: a BatchNorm before each ReLU. last_norm: one after the last layer too.
    """
    layers: list[nn.Module] = []
    weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    # Weights, gradients and momentum, 4 bytes each.
    check_fits(f"a head of widths {' x '.join(map(str, widths))}", 12 * weights, hint="choose narrower ones")
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] if norm else []), nn.ReLU()]
    return MLP(*layers[: -1 if last_norm or not norm else -2])


def each_view(head: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """The head's output for every view, each with its own batch statistics."""
    return head.each_view(views) if isinstance(head, MLP) else [head(view) for view in views]


class Teacher(nn.Module):
    """A copy of encoder and projector that takes no gradient. `Model.encode` and `Model.project` run it."""

    moves = False  # within a task; one that stands still may share the forward of a frozen prefix

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = deepcopy(encoder), deepcopy(projector)
        self.requires_grad_(False)

    def freeze_like(self, freezer: Freezer) -> None:
        """Called when other units of the model's encoder than before are frozen, and after a resume."""


class MomentumTeacher(Teacher):
    """A moving average of the trained weights; its norms keep running statistics of their own.

    The share of itself that it keeps rises from `start` to `end` by half a cosine over the steps of every task (as in
    CaSSLe's code). It is computed on the device from a step counter.
    """

    moves = True

    def __init__(self, encoder: nn.Module, projector: nn.Module, start: float, end: float) -> None:
        super().__init__(encoder, projector)
        self.start, self.end = start, end
        self.step, self.steps = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))

    def begin_task(self, steps: int) -> None:
        """Called before the first of a task's `steps` steps."""
        self.step.zero_()
        self.steps.fill_(steps)

    @torch.no_grad()
    def follow(self, encoder: nn.Module, projector: nn.Module) -> None:
        """teacher <- kept * teacher + (1 - kept) * student, for every parameter."""
        teacher: list[Tensor] = list(self.parameters())
        student: list[Tensor] = [*encoder.parameters(), *projector.parameters()]
        kept = self.end - (self.end - self.start) * (torch.cos(math.pi * self.step / self.steps) + 1) / 2
        torch._foreach_mul_(teacher, kept)
        torch._foreach_add_(teacher, list(torch._foreach_mul(student, 1 - kept)))
        self.step.add_(1)


@dataclass
class ObjectiveConfig:
    name: str = key("simsiam", "which objective; `ptlf list objectives` names them")


C = TypeVar("C", bound=ObjectiveConfig)


class Objective(nn.Module, Generic[C]):
    Config: type[ObjectiveConfig] = ObjectiveConfig
    needs_labels = False  # refuses streams and methods without a label per image
    distills_unit_vectors = False  # an earlier model's projections are predicted from normalised ones
    presets: ClassVar[Presets] = {}

    projector: nn.Module
    teacher: MomentumTeacher | None  # a copy whose projections of the mixed views are `batch.targets`

    def __init__(self, config: C, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        """`encoder` is there for objectives that keep a copy of it; `classes` for those that use labels."""
        super().__init__()
        self.config = config
        self.feature_dim = feature_dim
        self.projector = nn.Identity()
        self.projection_dim: int = getattr(config, "projection", feature_dim)
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
        """Before a task's first step. What differs between tasks must be in a buffer: captured graphs are replayed."""
        if self.teacher is not None:
            self.teacher.begin_task(steps)

    def after_step(self, encoder: nn.Module, batch: Batch) -> None:
        """Called after the optimizer's step on this batch, for what moves without a gradient."""
        if self.teacher is not None:
            self.teacher.follow(encoder, self.projector)


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean of -cos(prediction, target) over the rows."""
    return -torch.cosine_similarity(prediction, target, dim=1).mean()


def mean_over_views(loss: Callable[..., Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """The mean of loss(a, b) over the pairs of the two sequences."""
    return torch.stack([loss(a, b) for a, b in zip(first, second, strict=True)]).mean()
