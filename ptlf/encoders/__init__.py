"""Encoders by name. To add one: a function that makes an `nn.Module` of its settings, and a line here."""

from __future__ import annotations

from ptlf.core.registry import Registry
from ptlf.encoders.encoder import EncoderConfig, EncoderEntry, feature_dim, from_function
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, ResNetConfig, resnet

SMALL, LARGE = "3x3 stem, for 32 to 64 px", "7x7 stem and max-pool, for 224 px"

ENCODERS: Registry[EncoderEntry] = Registry(
    "encoder",
    "ptlf.encoders",
    EncoderEntry,
    {
        "resnet18": EncoderEntry(resnet(BasicBlock, (2, 2, 2, 2)), ResNetConfig, SMALL),
        "resnet34": EncoderEntry(resnet(BasicBlock, (3, 4, 6, 3)), ResNetConfig, SMALL),
        "resnet50": EncoderEntry(resnet(Bottleneck, (3, 4, 6, 3)), ResNetConfig, SMALL),
        "resnet18-imagenet": EncoderEntry(resnet(BasicBlock, (2, 2, 2, 2), stem="imagenet"), ResNetConfig, LARGE),
        "resnet34-imagenet": EncoderEntry(resnet(BasicBlock, (3, 4, 6, 3), stem="imagenet"), ResNetConfig, LARGE),
        "resnet50-imagenet": EncoderEntry(resnet(Bottleneck, (3, 4, 6, 3), stem="imagenet"), ResNetConfig, LARGE),
        "resnet18-mini": EncoderEntry(
            resnet(BasicBlock, (1, 1, 1), width=16), ResNetConfig, "three blocks, 16 channels, 3x3 stem, for 16 px"
        ),
    },
    wrap=from_function,
)

__all__ = ["ENCODERS", "EncoderConfig", "EncoderEntry", "ResNet", "feature_dim"]
