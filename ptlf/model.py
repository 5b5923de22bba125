"""Encoder and objective together: what the optimizer trains and what a method gets to see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ptlf.encoders import encode
from ptlf.objectives import Objective


class Model(nn.Module):
    """The encoder runs in `dtype` (bf16 through autocast, or float32); features, heads and losses are float32."""

    def __init__(self, encoder: nn.Module, objective: Objective, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder = encoder
        self.objective = objective
        self.dtype = objective.dtype = dtype

    def encode(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Features (B, feature_dim) of each view; every view has its own batch statistics."""
        return encode(self.encoder, views, self.dtype)
