"""Ratios computed by threads of the host, while the module is trained."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ptlf.freezing.subspace import Inputs, host_copy, ratio_of

WORKERS = 4  # threads that decompose Gram matrices on the host


class HostRatios:
    """The ratios that were started and not yet asked for, by unit name.

    seconds: those of the threads together, of the ratios asked for.
    """

    def __init__(self) -> None:
        self.started: dict[str, Future[tuple[Tensor, int, float]]] = {}
        # What the threads read: held here, so that pinned memory is freed by the training thread.
        self.lent: dict[str, Any] = {}
        self.seconds = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self.started

    def start(
        self, gradients: Mapping[str, Sequence[Tensor]], inputs: Mapping[str, Sequence[Inputs]], threshold: float
    ) -> None:
        """Compute the ratios of the units in `inputs`, in its order, from copies on the host."""
        work = {name: [some.on_host() for some in inputs[name]] for name in inputs}
        copies = {name: [host_copy(gradient) for gradient in gradients[name]] for name in work}
        for device in {gradient.device for name in work for gradient in gradients[name] if gradient.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the copies are done
        # From here on the threads use no GPU: meanwhile the training thread may be capturing a graph.
        pool = ThreadPoolExecutor(WORKERS, "correlation", torch.set_num_threads, (host_threads(),))
        for name, some in work.items():
            self.lent[name] = copies[name], some
            self.started[name] = pool.submit(timed_ratio, copies[name], some, threshold)
        pool.shutdown(wait=False)

    def result(self, name: str) -> tuple[Tensor, int]:
        """Wait for the ratio, on the host, and the number of singular vectors kept."""
        ratio, directions, seconds = self.started.pop(name).result()
        self.seconds += seconds
        del self.lent[name]
        torch.set_num_threads(torch.get_num_threads())  # for threads to come: those that computed this changed it
        return ratio, directions


@torch.no_grad()
def timed_ratio(gradients: Sequence[Tensor], inputs: Sequence[Inputs], threshold: float) -> tuple[Tensor, int, float]:
    """In a thread; and the seconds it took."""
    began = time.perf_counter()
    return *ratio_of(gradients, inputs, threshold), time.perf_counter() - began


def host_threads() -> int:
    """Of each worker: together with the training thread and a spare one they take all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - 2) // WORKERS)
