"""A trained convolution whose weight gradient is computed in parallel to the rest of backward.

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
MAX_PENDING = 2  # weight gradients that may be pending while backward continues: what they read stays in memory


class SideStream:
    """A second stream. What its work reads is held until the first stream has waited for that work."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
            self.pending.append((self.stream.record_event(), read))
        self.wait(MAX_PENDING)
        return result

    def wait(self, left: int = 0) -> None:
        """Until at most `left` are pending, the oldest first."""
        while len(self.pending) > left:
            done, _ = self.pending.popleft()
            torch.cuda.current_stream().wait_event(done)


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def wait_for_weight_gradients(device: torch.device) -> None:
    if device.type == "cuda":
        side_stream(device).wait()


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

        def gradient(of_input: bool) -> Tensor:
            mask = [of_input, not of_input, False]
            settings = (*ctx.settings, (1, 1), False, (0, 0), 1)
            both = torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, mask)
            return both[0 if of_input else 1]

        # The input gradient first: backward waits for it.
        of_input = gradient(True) if ctx.needs_input_grad[0] else None
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        work = functools.partial(gradient, False)
        return of_input, side_stream(x.device).run(work, grad, x) if capturing else work(), None, None


def conv2d(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """`F.conv2d` in training. `wait_for_weight_gradients` must be called before its weight gradient is read."""
    return _Conv2d.apply(x, weight, stride, padding)
