"""Encoders by name. To add one: a function that returns an `nn.Module`, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ptlf.encoders.encoder import EncoderConfig, feature_dim
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet

ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(BasicBlock, (2, 2, 2, 2)),
    "resnet34": lambda: ResNet(BasicBlock, (3, 4, 6, 3)),
    "resnet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
    "resnet18-imagenet": lambda: ResNet(BasicBlock, (2, 2, 2, 2), stem="imagenet"),
    "resnet34-imagenet": lambda: ResNet(BasicBlock, (3, 4, 6, 3), stem="imagenet"),
    "resnet50-imagenet": lambda: ResNet(Bottleneck, (3, 4, 6, 3), stem="imagenet"),
    "resnet18-mini": lambda: ResNet(BasicBlock, (1, 1, 1), width=16),
}

__all__ = ["ENCODERS", "EncoderConfig", "ResNet", "feature_dim"]
