"""What one step costs: bytes that autograd keeps for backward, and FLOPs of backward."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode


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
    """Run `loss.backward()` and count the FLOPs (two per multiply-add) of its convolutions and matrix products."""
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()
