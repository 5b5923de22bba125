"""Cost of training: bytes saved for backward, backward FLOPs, seconds by purpose, peak memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ptlf.core.phases import Clock


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak bytes of tensors on a CUDA device since `reset_peak_memory`; None on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Stopwatch:
    """Seconds by purpose: `with watch("training"): ...`. An inner block pauses the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self.now, self._since = Clock(), 0.0

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        self._charge()
        self._running.append(purpose)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def add(self, seconds: Mapping[str, float]) -> None:
        for purpose, value in seconds.items():
            self.seconds[purpose] += value

    def _charge(self) -> None:
        """Add the time since the last call to the innermost running purpose."""
        wait_for(self.device)
        now = self.now()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
