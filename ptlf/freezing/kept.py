"""What one step costs: bytes that autograd keeps for backward, and FLOPs of backward."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


class _Saved:
    """A tensor saved for backward; freed with its graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def kept_bytes(function: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd holds for backward once `function` has returned its loss. Every storage counts once, in full.

    exclude: tensors that exist anyway, such as parameters, buffers and a freezer's folded weights.
    """
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        saved.add(item := _Saved(tensor))
        return item

    with saved_tensors_hooks(pack, lambda item: item.tensor):
        result = function()  # holds the graph
    storages = {item.tensor.untyped_storage()._cdata: item.tensor.untyped_storage().nbytes() for item in saved}
    for tensor in exclude:
        storages.pop(tensor.untyped_storage()._cdata, None)
    del result
    return sum(storages.values())


def backward_flops(loss: Tensor) -> int:
    """Run `loss.backward()` and count its FLOPs."""
    return count_flops(loss.backward)


def count_flops(work: Callable[[], Any]) -> int:
    """Run `work` and count the FLOPs (two per multiply-add) of its convolutions, matrix products and attention."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        work()
    return counter.get_total_flops()


def convolution_backward_flops(
    gradient: Sequence[int],
    images: Sequence[int],
    weight: Sequence[int],
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    wanted: Sequence[bool],  # the gradients of input, weight and bias
    **_: object,
) -> int:
    """From shapes. The gradients of input and weight each multiply every weight once per image and output position (of
    a transposed convolution, input position). `weight` has a group's channels only, so groups need no factor."""
    batch, _channels, *positions = images if transposed else gradient
    return 2 * prod(weight) * batch * prod(positions) * sum(wanted[:2])


# What torch.utils.flop_counter (2.13) counts wrongly: it takes the weight gradient of a grouped convolution `groups`
# times, and does not know the attention kernel of a CPU. Its forward runs in backward where blocks are checkpointed.
FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: convolution_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
