"""A residual network's training forward with the kernels of `ptlf.training.triton_bn`: what the compiler would
make of it block by block, in fewer passes over memory, and with nothing to compile when a unit freezes or thaws."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.encoders.norm import ViewBatchNorm2d
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, Stem
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, frozen_conv2d

Pair = tuple[Tensor, Tensor]  # one value for two who use it
Block = BasicBlock | Bottleneck
Layers = tuple[nn.Conv2d, ViewBatchNorm2d]


def can_fuse(encoder: nn.Module) -> bool:
    """Whether it is one of our residual networks, in training and in float32, however its units are frozen."""
    if type(encoder) is not ResNet or not all(type(block) in (BasicBlock, Bottleneck) for block in blocks(encoder)):
        return False
    return all(isinstance(norm, ViewBatchNorm2d) and is_usual(layer, norm) for layer, norm in units(encoder))


def is_usual(layer: nn.Conv2d, norm: ViewBatchNorm2d) -> bool:
    replaced = [module.__dict__["forward"] for module in (layer, norm) if "forward" in module.__dict__]
    as_made = norm.affine and norm.running_mean is not None and norm.momentum is not None and layer.bias is None
    known = all(isinstance(override, ForwardPatch) for override in replaced)
    return as_made and known and norm.training and layer.weight.dtype is torch.float32


def blocks(encoder: ResNet) -> list[Block]:
    return encoder.segments()[1:]  # type: ignore[return-value]


def units(encoder: ResNet) -> list[Layers]:
    found: list[Layers] = [(encoder.stem.conv, encoder.stem.bn)]
    for block in blocks(encoder):
        found += [layers for layers, _ in branch(block)]
        if isinstance(block.shortcut, nn.Sequential):
            found.append(tuple(block.shortcut))  # type: ignore[arg-type]
    return found


def branch(block: Block) -> list[tuple[Layers, nn.ReLU]]:
    """The layers of the block's longer way, in order."""
    found = [((block.conv1, block.bn1), block.relu1), ((block.conv2, block.bn2), block.relu2)]
    return [*found, ((block.conv3, block.bn3), block.relu3)] if isinstance(block, Bottleneck) else found


def folded(layer: nn.Module) -> FrozenLayer | None:
    override = layer.__dict__.get("forward")
    return override if isinstance(override, FrozenLayer) and override.weight is not None else None


def forward(encoder: ResNet, images: Tensor) -> Tensor:
    """What `encoder(images)` computes in training mode."""
    dtype = images.dtype
    if torch.is_autocast_enabled(images.device.type):
        dtype = torch.get_autocast_dtype(images.device.type)
    with torch.autocast(images.device.type, enabled=False):
        return Forward(encoder, dtype)(images)


class Forward:
    """One forward, with the weights in the type it computes in."""

    def __init__(self, encoder: ResNet, dtype: torch.dtype) -> None:
        from ptlf.training import triton_bn  # needs Triton

        self.encoder, self.dtype, self.kernels = encoder, dtype, triton_bn
        tensors: dict[nn.Conv2d | FrozenLayer, Tensor] = {}
        for layer, _ in units(encoder):
            tensors[layer] = layer.weight
            if (frozen := folded(layer)) is not None:
                tensors[layer], tensors[frozen] = frozen.tensors()
        self.cast: dict[nn.Conv2d | FrozenLayer, Tensor] = {}  # weights by layer, biases by what froze it
        for trained in (True, False):  # apart, or the copies of frozen weights would ask for a gradient
            some = {owner: tensor for owner, tensor in tensors.items() if tensor.requires_grad is trained}
            self.cast.update(zip(some, triton_bn.cast_all(list(some.values()), dtype), strict=True))

    def __call__(self, images: Tensor) -> Tensor:
        x = self.stem(self.encoder.stem, images)
        for block in blocks(self.encoder):
            x = self.block(block, x)
        return torch.mean(x[0], dim=(2, 3))

    def stem(self, stem: Stem, images: Tensor) -> Pair:
        if stem.conv.kernel_size == (3, 3):
            return self.first(stem, images)
        x, _ = self.unit((stem.conv, stem.bn), stem.relu, images.to(self.dtype, memory_format=torch.channels_last))
        pooled = stem.pool(x)
        return pooled, pooled

    def first(self, stem: Stem, images: Tensor) -> Pair:
        """Three channels are too few for the convolutions' kernels: as a product this takes half the time."""
        n, _, height, width = images.shape
        rows, frozen = self.kernels.patches(images, self.dtype), folded(stem.conv)
        weight = F.pad(self.cast[stem.conv].flatten(1), (0, rows.shape[1] - 27))
        if frozen is None:
            product = F.linear(rows, weight)
        else:
            product = torch._addmm_activation(self.cast[frozen], rows, weight.T)  # with a ReLU
        x = product.view(n, height, width, -1).permute(0, 3, 1, 2)
        return self.norm_relu(x, stem.bn) if frozen is None else (x, x)

    def block(self, block: Block, x: Pair) -> Pair:
        y, skip = x
        *before, (last, relu) = branch(block)
        for layers, inner in before:
            y, _ = self.unit(layers, inner, y)
        extra = None
        if isinstance(block.shortcut, nn.Sequential):
            skip, extra = self.shortcut(block.shortcut, skip)
        return self.unit(last, relu, y, skip, extra)

    def shortcut(self, shortcut: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The shortcut's output, and a bias (C,) that is still to be added to it."""
        layer, norm = shortcut
        y, frozen = self.convolve(layer, x), folded(layer)  # type: ignore[arg-type]
        return (y, frozen.bias) if frozen is not None else (self.norm_relu(y, norm, relu=False)[0], None)  # type: ignore[arg-type]

    def unit(
        self, layers: Layers, relu: nn.ReLU, x: Tensor, residual: Tensor | None = None, extra: Tensor | None = None
    ) -> Pair:
        """relu(norm(layer(x)) + extra + residual)"""
        layer, norm = layers
        frozen, as_bits = folded(layer), isinstance(relu.__dict__.get("forward"), MaskedReLU)
        if frozen is None:
            return self.norm_relu(self.convolve(layer, x), norm, residual, extra, as_bits=as_bits)
        bias = self.cast[frozen]
        if extra is not None:
            assert frozen.bias is not None
            bias = (frozen.bias + extra).to(self.dtype)
        return self.kernels.frozen_conv_relu(x, self.cast[layer], bias, layer, residual, as_bits=as_bits)

    def convolve(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        """Without a bias. A frozen layer keeps its input only where freezing was to save no memory."""
        saving = isinstance(layer.__dict__.get("forward"), FrozenLayer)
        return (frozen_conv2d if saving else F.conv2d)(x, self.cast[layer], None, layer.stride, layer.padding)  # type: ignore[arg-type]

    def norm_relu(
        self,
        x: Tensor,
        norm: ViewBatchNorm2d,
        residual: Tensor | None = None,
        extra: Tensor | None = None,
        *,
        relu: bool = True,
        as_bits: bool = False,
    ) -> Pair:
        if not isinstance(norm.__dict__.get("forward"), EvalMode):
            return self.kernels.norm_relu(x, norm, residual, extra, relu=relu, as_bits=as_bits)
        x = norm(x)  # frozen, and not folded: as PyTorch does it
        for more in (residual, None if extra is None else extra.to(x.dtype).view(-1, 1, 1)):
            x = x if more is None else x + more
        x = x.relu() if relu else x
        return x, x
