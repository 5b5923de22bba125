"""Heads on the encoder's vectors, and what losses of several objectives share. All of it is plain PyTorch.

`ptlf.kernels` replaces `MLP` by a module of the same state that runs on a GPU's own kernels.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ptlf.core.memory import check_fits


class MLP(nn.Sequential):
    """Layers of which each norm sees one view at a time."""

    def each_view(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The output for every view."""
        return [self(view) for view in views]


def mlp(*widths: int, norm: bool = True, last_norm: bool = False) -> MLP:
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
    return MLP(*layers[: -1 if last_norm or not norm else -2])


def each_view(head: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """The head's output for every view, each with its own batch statistics."""
    return head.each_view(views) if isinstance(head, MLP) else [head(view) for view in views]


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """The mean of -cos(prediction, target) over the rows."""
    return -torch.cosine_similarity(prediction, target, dim=1).mean()
