"""Cost of training: bytes saved for backward, backward FLOPs, seconds by purpose, peak memory."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ptlf.freezing.savings import wait_for


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


def peak_memory_bytes(device: torch.device | str) -> int | None:
    """Peak bytes of tensors on a CUDA device since `reset_peak_memory`; None on other devices."""
    device = torch.device(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device | str) -> None:
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Stopwatch:
    """Seconds by purpose: `with watch("training"): ...`. An inner block pauses the outer one."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        self._charge()
        self._running.append(purpose)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def state_dict(self) -> dict[str, float]:
        return dict(self.seconds)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.seconds = dict(state)

    def add(self, seconds: Mapping[str, float]) -> None:
        for purpose, value in seconds.items():
            self.seconds[purpose] = self.seconds.get(purpose, 0.0) + value

    def _charge(self) -> None:
        """Add the time since the last call to the innermost running purpose."""
        wait_for(self.device)
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now
