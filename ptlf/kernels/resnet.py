"""Training forward of our ResNets with the kernels of `norm`. It compiles nothing when a unit freezes or thaws."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.encoders.norm import ViewBatchNorm2d, is_usual
from ptlf.encoders.resnet import BasicBlock, Bottleneck, ResNet, Stem
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, fold, frozen_conv2d, replaced_forward
from ptlf.methods.pnn import Columns

Pair = tuple[int, int]
Twice = tuple[Tensor, Tensor]  # the same activations twice: for the next layer and for the shortcut
Term = Tensor | None  # (N, C, H, W) or (C,), added before the ReLU
Block = BasicBlock | Bottleneck
Layers = tuple[nn.Conv2d, ViewBatchNorm2d]


def can_fuse(encoder: nn.Module) -> bool:
    """Whether it is our ResNet, in train mode, in float32, or PNN's columns of such, of which the last one trains."""
    *older, last = encoder.columns[: encoder.current + 1] if type(encoder) is Columns else [encoder]
    return is_plain(last, training=True) and all(is_plain(column, training=False) for column in older)


def is_plain(network: nn.Module, *, training: bool) -> bool:
    known = type(network) is ResNet and all(type(b) in (BasicBlock, Bottleneck) for b in residual_blocks(network))
    return known and all(is_standard(layer, norm, training) for layer, norm in conv_norm_pairs(network))  # type: ignore[arg-type]


def is_standard(layer: nn.Conv2d, norm: nn.Module, training: bool) -> bool:
    if not isinstance(norm, ViewBatchNorm2d) or norm.training is not training or layer.bias is not None:
        return False
    if (layer.weight.dtype, layer.dilation, layer.groups, layer.padding_mode) != (torch.float32, (1, 1), 1, "zeros"):
        return False
    patches = [replaced_forward(layer), replaced_forward(norm)]
    return is_usual(norm) and all(patch is None or isinstance(patch, ForwardPatch) for patch in patches)


def residual_blocks(encoder: ResNet) -> list[Block]:
    return [block for stage in encoder.stages.children() for block in stage.children()]  # type: ignore[misc]


def conv_norm_pairs(encoder: ResNet) -> list[Layers]:
    found: list[Layers] = [(encoder.stem.conv, encoder.stem.bn)]
    for block in residual_blocks(encoder):
        found += [layers for layers, _ in residual_branch(block)]
        if isinstance(block.shortcut, nn.Sequential):
            found.append(tuple(block.shortcut))  # type: ignore[arg-type]
    return found


def residual_branch(block: Block) -> list[tuple[Layers, nn.ReLU]]:
    """The (convolution, norm) pairs and ReLUs of the block's residual branch, in order."""
    found = [((block.conv1, block.bn1), block.relu1), ((block.conv2, block.bn2), block.relu2)]
    return [*found, ((block.conv3, block.bn3), block.relu3)] if isinstance(block, Bottleneck) else found


def folded(layer: nn.Module) -> FrozenLayer | None:
    """The frozen layer's patch, if its norm is folded in."""
    patch = replaced_forward(layer)
    return patch if isinstance(patch, FrozenLayer) and patch.weight is not None else None


def folded_tensors(model: nn.Module) -> list[Tensor]:
    """Weights and biases of all frozen layers that a norm is folded into: a captured step reads them."""
    return [tensor for module in model.modules() if (patch := folded(module)) for tensor in patch.tensors()]


def fused_forward(encoder: nn.Module, images: Tensor) -> Tensor:
    """`encoder(images)` in train mode."""
    dtype = images.dtype
    if torch.is_autocast_enabled(images.device.type):
        dtype = torch.get_autocast_dtype(images.device.type)
    with torch.autocast(images.device.type, enabled=False):
        if not isinstance(encoder, Columns):
            return Forward(encoder, dtype).stages(images)[-1].mean((2, 3))  # type: ignore[arg-type]
        maps: list[list[Tensor]] = []  # by column, by stage
        for index, column in enumerate(encoder.columns[: encoder.current + 1]):
            with torch.set_grad_enabled(torch.is_grad_enabled() and index == encoder.current):
                maps.append(Forward(column, dtype).stages(images, encoder.laterals[index], maps))  # type: ignore[arg-type]
        return maps[-1][-1].mean((2, 3))


class Forward:
    """One forward pass of a ResNet, with the weights cast to `dtype`. The norm of a frozen unit, and every norm of a
    network in eval mode, is folded: `weights` has the folded weight, and `biases` the bias."""

    def __init__(self, encoder: ResNet, dtype: torch.dtype) -> None:
        from ptlf.kernels import norm  # needs Triton

        self.encoder, self.dtype, self.kernels = encoder, dtype, norm
        weights: dict[nn.Conv2d, Tensor] = {}
        self.biases: dict[nn.Conv2d, Tensor] = {}  # float32
        for layer, bn in conv_norm_pairs(encoder):
            if (frozen := folded(layer)) is not None:
                weights[layer], self.biases[layer] = frozen.tensors()
            elif bn.training:
                weights[layer] = layer.weight
            else:
                weights[layer], self.biases[layer] = fold(layer, bn)
        self.weights = self.cast(weights)
        self.cast_biases = self.cast(self.biases)

    def cast(self, tensors: dict[nn.Conv2d, Tensor]) -> dict[nn.Conv2d, Tensor]:
        made: dict[nn.Conv2d, Tensor] = {}
        for trained in (True, False):  # separately: a joint cast would give frozen weights a gradient
            some = {layer: tensor for layer, tensor in tensors.items() if tensor.requires_grad is trained}
            made.update(zip(some, self.kernels.cast_all(list(some.values()), self.dtype), strict=True))
        return made

    def stages(
        self, images: Tensor, laterals: Sequence[nn.Module] = (), older: Sequence[list[Tensor]] = ()
    ) -> list[Tensor]:
        """Feature maps after each stage; from the second on, lateral connections add what older columns gave."""
        maps: list[Tensor] = []
        x = self.stem(self.encoder.stem, images)
        for number, stage in enumerate(self.encoder.stages.children()):
            if number > 0 and older:
                with torch.autocast(images.device.type, self.dtype, self.dtype is not torch.float32):
                    y = x[0] + laterals[number - 1]([column[number - 1] for column in older])
                x = y, y
            for block in stage.children():
                x = self.block(block, x)  # type: ignore[arg-type]
            maps.append(x[0])
        return maps

    def stem(self, stem: Stem, images: Tensor) -> Twice:
        if stem.conv.kernel_size == (3, 3):
            return self.small_stem(stem, images)
        images = images.to(self.dtype, memory_format=torch.channels_last)
        x, _ = self.unit((stem.conv, stem.bn), stem.relu, images)
        pooled = stem.pool(x)
        return pooled, pooled

    def small_stem(self, stem: Stem, images: Tensor) -> Twice:
        n, _, height, width = images.shape
        rows, bias = self.kernels.patches(images, self.dtype), self.cast_biases.get(stem.conv)
        weight = F.pad(self.weights[stem.conv].flatten(1), (0, rows.shape[1] - 27))
        # _addmm_activation is rows @ weight.T + bias with a ReLU in one kernel.
        x = F.linear(rows, weight) if bias is None else torch._addmm_activation(bias, rows, weight.T)
        x = x.view(n, height, width, -1).permute(0, 3, 1, 2)
        return self.norm_relu(x, stem.bn) if bias is None else (x, x)

    def block(self, block: Block, x: Twice) -> Twice:
        y, skip = x
        *first, (last, last_relu) = residual_branch(block)
        for layers, relu in first:
            y, _ = self.unit(layers, relu, y)
        extra = None
        if isinstance(block.shortcut, nn.Sequential):
            layer, norm = block.shortcut
            skip, extra = self.convolve(layer, skip), self.biases.get(layer)  # type: ignore[arg-type, call-overload]
            if extra is None:  # else its norm is folded, and the bias (C,) is added with the sum
                skip, _ = self.norm_relu(skip, norm, relu=False)  # type: ignore[arg-type]
        return self.unit(last, last_relu, y, skip, extra)

    def unit(self, layers: Layers, relu: nn.ReLU, x: Tensor, residual: Term = None, extra: Term = None) -> Twice:
        """relu(norm(layer(x)) + extra + residual)"""
        layer, norm = layers
        as_bits = isinstance(replaced_forward(relu), MaskedReLU)
        if layer not in self.biases:
            return self.norm_relu(self.convolve(layer, x), norm, residual, extra, as_bits=as_bits)
        bias = self.cast_biases[layer] if extra is None else (self.biases[layer] + extra).to(self.dtype)
        settings = (layer.stride, layer.padding, as_bits)
        return self.kernels.FrozenConvReLU.apply(x, self.weights[layer], bias, residual, *settings)

    def convolve(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        """Without the bias. A FrozenLayer saves only its weight for backward."""
        weight = self.weights[layer]
        settings: tuple[Pair, Pair] = layer.stride, layer.padding  # type: ignore[assignment]
        if isinstance(replaced_forward(layer), FrozenLayer):
            return frozen_conv2d(x, weight, None, *settings, (1, 1), 1)
        return F.conv2d(x, weight, None, *settings)

    def norm_relu(
        self, x: Tensor, norm: ViewBatchNorm2d, residual: Term = None, extra: Term = None,
        *, relu: bool = True, as_bits: bool = False,
    ) -> Twice:  # fmt: skip
        if not isinstance(replaced_forward(norm), EvalMode):
            return self.kernels.norm_relu(x, norm, residual, extra, relu=relu, as_bits=as_bits)
        x = norm(x)  # frozen but not folded: plain PyTorch
        for term in (residual, None if extra is None else extra.to(x.dtype).view(-1, 1, 1)):
            x = x if term is None else x + term
        x = x.relu() if relu else x
        return x, x
