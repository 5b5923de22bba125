"""A trained convolution whose weight gradient is computed beside the rest of backward.

Only the optimizer waits for a weight gradient. In a captured step weight gradients form a branch of the graph of their
own: its products keep the arithmetic units busy while the passes of the norms wait for memory. The kernels are the
same, and so are the bits.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Pair = tuple[int, int]
LAG = 2  # weight gradients that may be under way while backward goes on: what they read stays in memory


class Branch:
    """A second stream. What its work reads is held until the first stream has waited for that work."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
            self.under_way.append((self.stream.record_event(), read))
        self.join(LAG)
        return result

    def join(self, left: int = 0) -> None:
        """Wait until at most so many are under way, the oldest first."""
        while len(self.under_way) > left:
            done, _ = self.under_way.popleft()
            torch.cuda.current_stream().wait_event(done)


@functools.cache
def branch(device: torch.device) -> Branch:
    return Branch(device)


def join(device: torch.device) -> None:
    """Before weight gradients are read."""
    if device.type == "cuda":
        branch(device).join()


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.settings

        def gradient(of_input: bool) -> Tensor:
            mask = [of_input, not of_input, False]
            found = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask
            )
            return found[0 if of_input else 1]

        # The input gradient first: backward waits for it.
        of_input = gradient(True) if ctx.needs_input_grad[0] else None
        apart = x.is_cuda and torch.cuda.is_current_stream_capturing()
        of_weight = branch(x.device).run(lambda: gradient(False), grad, x) if apart else gradient(False)
        return of_input, of_weight, None, None


def conv2d(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """`F.conv2d` in training. `join` must be called before its weight gradient is read."""
    return _Conv2d.apply(x, weight, stride, padding)
