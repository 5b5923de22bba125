"""Encoder and objective together. In a training step `Model` is the one door to them: acceleration happens here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.encoders.norm import views_in_one_pass
from ptlf.freezing.prefix import FrozenPrefix, find_prefix
from ptlf.freezing.recording import unchanged
from ptlf.objectives import Objective, each_view
from ptlf.objectives.objective import MLP, Teacher
from ptlf.views import apply_view


class Accelerator:
    """Runs the parts of a training step: here as they are. `ptlf.kernels.FastParts` has faster code."""

    def __init__(self, bf16_heads: bool = False) -> None:
        self.bf16_heads = bf16_heads

    def prepare(self, module: nn.Module) -> None:
        """Called once with the objective and with the method: may replace heads by faster modules of the same state."""
        for head in module.modules():
            if isinstance(head, MLP):
                head.bf16 = self.bf16_heads

    def takes_views_in_one_pass(self, encoder: nn.Module) -> bool:
        """Whether `encode` may be given several views as one batch."""
        return False

    def encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        return encoder(images)

    def augment(self, images: Tensor, *arguments: Any) -> Tensor:
        """`apply_view` of the images."""
        return apply_view(images, *arguments)


PLAIN = Accelerator()


class Model(nn.Module):
    """What the optimizer trains and what a method sees.

    The encoder runs in `dtype` (bf16 through autocast, or float32); features, norms of heads and losses are float32. On
    a CPU the heads' products are in `dtype` too. A `teacher`
    is a copy of encoder and projector: it takes the same path as the model, without gradient.
    """

    def __init__(
        self,
        encoder: nn.Module,
        objective: Objective,
        dtype: torch.dtype = torch.float32,
        accelerator: Accelerator = PLAIN,
    ) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self.dtype, self.accelerator = dtype, accelerator
        self.prefix: FrozenPrefix | None = None
        self.sharing: list[Teacher] = []  # teachers with the same prefix
        self.prefix_outputs: tuple[list[Tensor], list[Tensor]] = ([], [])  # the last views, and the prefix's outputs
        self.begins_behind_prefix = False  # views are outputs of the prefix

    def share_prefix(self, teachers: Sequence[Teacher], view: Tensor, keep: bool = False) -> None:
        """Find the frozen prefix, and those of these teachers that compute the same in it: they share its forward.
        `view`: a small batch of the encoder's input. keep: needed without a teacher too."""
        self.prefix, self.sharing, self.prefix_outputs, self.begins_behind_prefix = None, [], ([], []), False
        if not (teachers or keep) or all(p.requires_grad for p in self.encoder.parameters()):
            return
        with unchanged(self.encoder, *teachers):
            prefix = find_prefix(self.encoder.train(), view)
            if prefix is None:
                return
            h = prefix(view)
            bound = 1e-3 * float(h.std())
            alike = [t for t in teachers if not t.moves]
            self.sharing = [t for t in alike if torch.allclose(h, prefix(view, t.encoder), rtol=1e-3, atol=bound)]
        self.prefix = prefix if self.sharing or not teachers else None

    def encode(self, views: Sequence[Tensor], teacher: Teacher | None = None) -> list[Tensor]:
        """Features (B, feature_dim) of each view; every view has its own batch statistics."""
        encoder = self.encoder if teacher is None else teacher.encoder
        with gradient(teacher), self.autocast(views[0].device):
            if self.prefix is not None and (teacher is None or teacher in self.sharing):
                outputs = views if self.begins_behind_prefix else self.through_prefix(views)
                features: Sequence[Tensor] = [self.prefix.rest(encoder, h) for h in outputs]
            elif len(views) > 1 and self.accelerator.takes_views_in_one_pass(encoder):
                with views_in_one_pass(encoder, len(views)):
                    joined = self.accelerator.encode(encoder, torch.cat(list(views)))
                features = joined.chunk(len(views))
            else:
                features = [self.accelerator.encode(encoder, view) for view in views]
        return [f.float() for f in features]

    def through_prefix(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the shared prefix, kept until it is asked for other views."""
        assert self.prefix is not None
        known, outputs = self.prefix_outputs
        if [id(view) for view in known] != [id(view) for view in views]:
            outputs = [self.prefix(view) for view in views]
            self.prefix_outputs = list(views), outputs
        return outputs

    def autocast(self, device: torch.device) -> torch.autocast:
        """The arithmetic of a step."""
        return torch.autocast(device.type, torch.bfloat16, self.dtype is torch.bfloat16)

    def project(self, features: Sequence[Tensor], teacher: Teacher | None = None) -> list[Tensor]:
        """Projections (B, projection_dim) of each view's features."""
        head = self.objective.projector if teacher is None else teacher.projector
        with gradient(teacher):
            return each_view(head, features)

    def compare(self, projected: Sequence[Tensor], batch: Batch) -> Tensor:
        """The objective's loss from projections that are needed elsewhere too; else see `loss`."""
        return self.objective.compare(projected, self.with_targets(batch))

    def loss(self, features: Sequence[Tensor], batch: Batch) -> Tensor:
        """The objective's loss, heads included."""
        return self.objective.loss(features, self.with_targets(batch))

    def with_targets(self, batch: Batch) -> Batch:
        """The batch with the projections of the objective's teacher, if it has one."""
        if (teacher := self.objective.teacher) is not None:
            batch.targets = self.project(self.encode(batch.mixed, teacher), teacher)
        return batch


def gradient(teacher: Teacher | None) -> torch.autograd.grad_mode.set_grad_enabled:
    return torch.set_grad_enabled(torch.is_grad_enabled() and teacher is None)
