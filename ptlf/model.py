"""Encoder and objective together: what the optimizer trains and what a method gets to see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ptlf.objectives import Objective


class Model(nn.Module):
    """The encoder runs in `dtype` (bf16 through autocast, or float32); features, heads and losses are float32."""

    def __init__(self, encoder: nn.Module, objective: Objective, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = objective
        self.dtype = dtype

    def encode(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Features (B, feature_dim) of each view; every view has its own batch statistics."""
        device = views[0].device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            features = [self.encoder(view) for view in views]
        return [f.float() for f in features]
