"""The matrix products of a unit's layer, and the input of each in a forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.freezing.recording import Convolution, Layer
from ptlf.freezing.units import Unit

TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True, eq=False)
class Projection:
    """Rows of a weight with an input of their own: one of the products of an attention."""

    weight: Tensor
    first: int
    rows: int


Part = Convolution | nn.Linear | Projection


def parts(layer: Layer) -> list[Part]:
    """The products of a layer: one, or those of query, key, value and output of an attention."""
    if not isinstance(layer, nn.MultiheadAttention):
        return [layer]
    width, inner = layer.embed_dim, layer.in_proj_weight
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    pairs = [(weight, 0) for weight in separate] if inner is None else [(inner, i * width) for i in range(3)]
    return [Projection(weight, first, width) for weight, first in [*pairs, (layer.out_proj.weight, 0)]]


def groups(part: Part) -> int:
    return part.groups if isinstance(part, Convolution) else 1


def fan_in(part: Part) -> int:
    """m, the length of a column of R."""
    return part.in_channels // part.groups if isinstance(part, TRANSPOSED) else part.weight.shape[1:].numel()


def as_matrix(part: Part, gradient: Tensor) -> Tensor:
    """The weight's gradient as (groups, C_out / groups, m)."""
    if isinstance(part, TRANSPOSED):
        return gradient.reshape(groups(part), fan_in(part), -1).mT
    if isinstance(part, Projection):
        gradient = gradient[part.first : part.first + part.rows]
    return gradient.reshape(groups(part), -1, fan_in(part))


@contextmanager
def watched(
    module: nn.Module, units: Sequence[Unit], see: Callable[[Unit, list[Tensor], Tensor], object]
) -> Iterator[None]:
    """Puts the module in eval mode. Inside, `see(unit, inputs, output)` is called after every call of a unit's layer,
    with the input of each of its products."""
    attention = [unit.layer for unit in units if isinstance(unit.layer, nn.MultiheadAttention)]
    projected: dict[Tensor, Tensor] = {}  # by weight, the latest input of each attention's output projection
    linear = F.linear

    def watched_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """No hook sees an output projection: it is not called as a module."""
        if any(weight is layer.out_proj.weight for layer in attention):
            projected[weight] = input
        return linear(input, weight, bias)

    def hook(unit: Unit, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
            see(unit, [*given, projected.pop(layer.out_proj.weight)], output[0])
        else:
            see(unit, [args[0] if args else kwargs["input"]], output)

    with ExitStack() as stack:
        for part in module.modules():
            part.training = False
        for unit in units:
            stack.callback(unit.layer.register_forward_hook(partial(hook, unit), with_kwargs=True).remove)
        # A compiled module may have been traced without the hooks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if attention:
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # it runs in one kernel, without the hooks' layers
            stack.enter_context(patch.object(F, "linear", watched_linear))
        yield
