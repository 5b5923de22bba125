"""Heads whose norms run in Triton kernels, with all views in one pass and nothing to compile."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ptlf.encoders.norm import SharedBatchNorm1d, is_usual
from ptlf.freezing import replaced_forward
from ptlf.kernels.norm import norm_relu
from ptlf.objectives import MLP


def fuse_heads(module: nn.Module) -> None:
    """Replace every MLP below the module by one that runs on the kernels, with the same layers."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is MLP:
                setattr(parent, name, FusedMLP(*child))


class FusedMLP(MLP):
    def each_view(self, views: Sequence[Tensor]) -> list[Tensor]:
        """All views in one pass."""
        layers = list(self)
        known = is_as_built(self) and all(is_known(layer) for layer in layers)
        if not known or len({len(view) for view in views}) > 1:
            return [self(view) for view in views]
        x = torch.cat(list(views))
        while layers:
            layer = layers.pop(0)
            if isinstance(layer, nn.BatchNorm1d) and layer.training:
                relu = bool(layers) and isinstance(layers[0], nn.ReLU)
                layers = layers[relu:]
                x = norm_relu(x[:, :, None, None], layer, relu=relu, views=len(views))[0].flatten(1)
            else:
                x = layer(x)
        return list(x.chunk(len(views)))


def is_known(layer: nn.Module) -> bool:
    """Whether the layer takes rows one by one, or is a norm that the kernels know."""
    if isinstance(layer, nn.BatchNorm1d):
        plain = type(layer) in (nn.BatchNorm1d, SharedBatchNorm1d) and is_as_built(layer)
        return plain and (is_usual(layer) or not layer.training)
    return type(layer) in (nn.Linear, nn.ReLU, nn.Identity) and is_as_built(layer)


def is_as_built(module: nn.Module) -> bool:
    """Whether its forward is its class's own, and no hooks are registered."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return replaced_forward(module) is None and not any(hooks)
