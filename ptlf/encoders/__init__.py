"""Encoders by name. To add one: a function that makes an `nn.Module` of its settings, and a line here."""

from __future__ import annotations

from ptlf.core.registry import Registry
from ptlf.encoders.encoder import EncoderConfig, EncoderEntry, encode, feature_dim, from_function
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, ResNetConfig, resnet

ENCODERS: Registry[EncoderEntry] = Registry(
    "encoder",
    "ptlf.encoders",
    EncoderEntry,
    {
        "resnet18": EncoderEntry(resnet(BasicBlock, (2, 2, 2, 2)), ResNetConfig),
        "resnet34": EncoderEntry(resnet(BasicBlock, (3, 4, 6, 3)), ResNetConfig),
        "resnet50": EncoderEntry(resnet(Bottleneck, (3, 4, 6, 3)), ResNetConfig),
        "resnet18-imagenet": EncoderEntry(resnet(BasicBlock, (2, 2, 2, 2), stem="imagenet"), ResNetConfig),
        "resnet34-imagenet": EncoderEntry(resnet(BasicBlock, (3, 4, 6, 3), stem="imagenet"), ResNetConfig),
        "resnet50-imagenet": EncoderEntry(resnet(Bottleneck, (3, 4, 6, 3), stem="imagenet"), ResNetConfig),
        "resnet18-mini": EncoderEntry(resnet(BasicBlock, (1, 1, 1), width=16), ResNetConfig),
    },
    wrap=from_function,
)

__all__ = ["ENCODERS", "EncoderConfig", "EncoderEntry", "ResNet", "encode", "feature_dim"]
