"""Training forward of our ResNets with the Triton kernels of `ptlf.training.triton_bn`.

Compared with torch.compile it makes fewer passes over memory, and compiles nothing when a unit freezes or thaws.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.encoders.norm import ViewBatchNorm2d
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, Stem
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, frozen_conv2d

Twice = tuple[Tensor, Tensor]  # the same activations twice: for the next layer and for the shortcut
Block = BasicBlock | Bottleneck
Layers = tuple[nn.Conv2d, ViewBatchNorm2d]


def can_fuse(encoder: nn.Module) -> bool:
    """Whether the encoder is one of our ResNets, in train mode, with float32 weights; any units may be frozen."""
    if type(encoder) is not ResNet or not all(type(block) in (BasicBlock, Bottleneck) for block in blocks(encoder)):
        return False
    return all(isinstance(norm, ViewBatchNorm2d) and is_standard(layer, norm) for layer, norm in units(encoder))


def is_standard(layer: nn.Conv2d, norm: ViewBatchNorm2d) -> bool:
    patches = [module.__dict__["forward"] for module in (layer, norm) if "forward" in module.__dict__]
    as_built = norm.affine and norm.running_mean is not None and norm.momentum is not None and layer.bias is None
    known = all(isinstance(patch, ForwardPatch) for patch in patches)
    return as_built and known and norm.training and layer.weight.dtype is torch.float32


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
    """The (convolution, norm) pairs and ReLUs of the block's residual branch, in order."""
    found = [((block.conv1, block.bn1), block.relu1), ((block.conv2, block.bn2), block.relu2)]
    return [*found, ((block.conv3, block.bn3), block.relu3)] if isinstance(block, Bottleneck) else found


def folded(layer: nn.Module) -> FrozenLayer | None:
    """The frozen layer's patch, if its norm is folded in."""
    patch = layer.__dict__.get("forward")
    return patch if isinstance(patch, FrozenLayer) and patch.weight is not None else None


def forward(encoder: ResNet, images: Tensor) -> Tensor:
    """`encoder(images)` in train mode."""
    dtype = images.dtype
    if torch.is_autocast_enabled(images.device.type):
        dtype = torch.get_autocast_dtype(images.device.type)
    with torch.autocast(images.device.type, enabled=False):
        return Forward(encoder, dtype)(images)


class Forward:
    """One forward pass, with the weights cast to `dtype`."""

    def __init__(self, encoder: ResNet, dtype: torch.dtype) -> None:
        from ptlf.training import triton_bn  # needs Triton

        self.encoder, self.dtype, self.kernels = encoder, dtype, triton_bn
        tensors: dict[nn.Conv2d | FrozenLayer, Tensor] = {}
        for layer, _ in units(encoder):
            tensors[layer] = layer.weight
            if (frozen := folded(layer)) is not None:
                tensors[layer], tensors[frozen] = frozen.tensors()
        self.cast: dict[nn.Conv2d | FrozenLayer, Tensor] = {}  # weights by layer, folded biases by patch
        for trained in (True, False):  # two calls: in one, the casts of frozen weights would require a gradient too
            group = {owner: tensor for owner, tensor in tensors.items() if tensor.requires_grad is trained}
            self.cast.update(zip(group, triton_bn.cast_all(list(group.values()), dtype), strict=True))

    def __call__(self, images: Tensor) -> Tensor:
        x = self.stem(self.encoder.stem, images)
        for block in blocks(self.encoder):
            x = self.block(block, x)
        return torch.mean(x[0], dim=(2, 3))

    def stem(self, stem: Stem, images: Tensor) -> Twice:
        if stem.conv.kernel_size == (3, 3):
            return self.small_stem(stem, images)
        x, _ = self.unit((stem.conv, stem.bn), stem.relu, images.to(self.dtype, memory_format=torch.channels_last))
        pooled = stem.pool(x)
        return pooled, pooled

    def small_stem(self, stem: Stem, images: Tensor) -> Twice:
        """The 3x3 convolution as a matrix product: with three input channels it takes half the time of cuDNN."""
        n, _, height, width = images.shape
        rows, frozen = self.kernels.patches(images, self.dtype), folded(stem.conv)
        weight = F.pad(self.cast[stem.conv].flatten(1), (0, rows.shape[1] - 27))
        if frozen is None:
            product = F.linear(rows, weight)
        else:
            product = torch._addmm_activation(self.cast[frozen], rows, weight.T)  # addmm and ReLU
        x = product.view(n, height, width, -1).permute(0, 3, 1, 2)
        return self.norm_relu(x, stem.bn) if frozen is None else (x, x)

    def block(self, block: Block, x: Twice) -> Twice:
        y, skip = x
        *first, (last, last_relu) = branch(block)
        for layers, relu in first:
            y, _ = self.unit(layers, relu, y)
        extra = None
        if isinstance(block.shortcut, nn.Sequential):
            skip, extra = self.shortcut(block.shortcut, skip)
        return self.unit(last, last_relu, y, skip, extra)

    def shortcut(self, shortcut: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output of the shortcut without its folded bias, and that bias (C,), if there is one."""
        layer, norm = shortcut
        y, frozen = self.convolve(layer, x), folded(layer)  # type: ignore[arg-type]
        return (y, frozen.bias) if frozen is not None else (self.norm_relu(y, norm, relu=False)[0], None)  # type: ignore[arg-type]

    def unit(
        self, layers: Layers, relu: nn.ReLU, x: Tensor, residual: Tensor | None = None, extra: Tensor | None = None
    ) -> Twice:
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
        """Without the bias. A FrozenLayer saves only its weight for backward."""
        saves_memory = isinstance(layer.__dict__.get("forward"), FrozenLayer)
        return (frozen_conv2d if saves_memory else F.conv2d)(x, self.cast[layer], None, layer.stride, layer.padding)  # type: ignore[arg-type]

    def norm_relu(
        self,
        x: Tensor,
        norm: ViewBatchNorm2d,
        residual: Tensor | None = None,
        extra: Tensor | None = None,
        *,
        relu: bool = True,
        as_bits: bool = False,
    ) -> Twice:
        if not isinstance(norm.__dict__.get("forward"), EvalMode):
            return self.kernels.norm_relu(x, norm, residual, extra, relu=relu, as_bits=as_bits)
        x = norm(x)  # frozen but not folded: plain PyTorch
        for term in (residual, None if extra is None else extra.to(x.dtype).view(-1, 1, 1)):
            x = x if term is None else x + term
        x = x.relu() if relu else x
        return x, x
