"""Residual networks with a CIFAR stem (3x3, stride 1, no pooling) or an ImageNet stem (7x7, stride 2, max-pool)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core.settings import key
from ptlf.encoders.encoder import EncoderConfig, EncoderEntry
from ptlf.encoders.norm import ViewBatchNorm2d


@dataclass
class ResNetConfig(EncoderConfig):
    width: int | None = key(None, "channels of the first stage; null = the network's own", ge=1)


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, ViewBatchNorm2d]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, ViewBatchNorm2d(outputs)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or a 1x1 convolution if the shape changes."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_norm(inputs, width, 3, stride)
        self.conv2, self.bn2 = conv_norm(width, width, 3)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last to four times the width; the 3x3 has the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_norm(inputs, width, 1)
        self.conv2, self.bn2 = conv_norm(width, width, 3, stride)
        self.conv3, self.bn3 = conv_norm(width, width * self.expansion, 1)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.shortcut = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        return self.relu3(self.bn3(self.conv3(y)) + self.shortcut(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(*conv_norm(inputs, outputs, 1, stride))


class Stem(nn.Module):
    """A 3x3 convolution ("cifar"), or a 7x7 convolution and max-pool, which divide the size by 4 ("imagenet")."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        large = kind == "imagenet"
        self.conv, self.bn = conv_norm(3, width, 7, stride=2) if large else conv_norm(3, width, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.relu(self.bn(self.conv(images))))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Images (B, 3, H, W) to vectors (B, feature_dim): stem, stages of residual blocks, average pool, no classifier."""

    def __init__(self, block: Block, blocks: Sequence[int], *, width: int = 64, stem: str = "cifar") -> None:
        super().__init__()
        self.shape: dict[str, Any] = {"block": block, "blocks": tuple(blocks), "width": width, "stem": stem}
        self.stem = Stem(width, stem)
        channels, stages = width, []
        for index, count in enumerate(blocks):
            stage = []
            for position in range(count):
                stride = 2 if index > 0 and position == 0 else 1
                stage.append(block(channels, width * 2**index, stride))
                channels = width * 2**index * block.expansion
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.feature_dim = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return torch.mean(self.stages(self.stem(images)), dim=(2, 3))


def resnet(about: str, block: Block, blocks: Sequence[int], *, width: int = 64, stem: str = "cifar") -> EncoderEntry:
    """The entry of ResNets of this shape, `width` channels wide where the settings name no other width."""
    return EncoderEntry(lambda c: ResNet(block, blocks, width=c.width or width, stem=stem), ResNetConfig, about)
