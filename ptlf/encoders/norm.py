"""BatchNorm that keeps several views apart when they pass through the encoder in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ViewBatchNorm2d(nn.BatchNorm2d):
    """In training, `views` equal parts of the batch are normalised one after the other, each by its own statistics:
    the same results, and the same running statistics, as one pass per view."""

    views = 1

    def forward(self, input: Tensor) -> Tensor:
        if self.views == 1 or not self.training:
            return super().forward(input)
        return torch.cat([nn.BatchNorm2d.forward(self, part) for part in input.chunk(self.views)])


@contextmanager
def views_in_one_pass(encoder: nn.Module, views: int) -> Iterator[None]:
    norms = [module for module in encoder.modules() if isinstance(module, ViewBatchNorm2d)]
    for norm in norms:
        norm.views = views
    try:
        yield
    finally:
        for norm in norms:
            norm.views = 1


def takes_views_in_one_pass(encoder: nn.Module) -> bool:
    """Whether every norm that looks at the batch keeps views apart."""
    batch_norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return all(isinstance(norm, ViewBatchNorm2d) for norm in batch_norms)
