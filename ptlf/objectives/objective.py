"""The objective's contract: heads on top of the encoder's vectors, and the loss. It knows no backbone.

An objective sees float32 features, one tensor (B, feature_dim) per view, and the batch they were made from. Its
parameters train with the encoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.batch import Batch
from ptlf.settings import key


@dataclass
class ObjectiveConfig:
    name: str = key("simsiam", "which objective; `ptlf list objectives` names them")


class Objective(nn.Module):
    Config: type[ObjectiveConfig] = ObjectiveConfig
    needs_labels = False

    def __init__(self, config: ObjectiveConfig, encoder: nn.Module, feature_dim: int, classes: int) -> None:
        """`encoder` is there for objectives that keep a copy of it; `classes` for those that use labels."""
        super().__init__()

    def loss(self, features: Sequence[Tensor], batch: Batch) -> Tensor:
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after the optimizer's step, for what moves without a gradient."""


def projector(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Linear-BN-ReLU-Linear-BN, the projection head of SimSiam and Barlow Twins in the LUMP protocol."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
        nn.BatchNorm1d(outputs),
    )


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    return -torch.cosine_similarity(prediction, target, dim=1).mean()
