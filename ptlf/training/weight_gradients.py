"""A trained convolution whose weight gradient is computed beside the rest of backward.

Only the optimizer waits for a weight gradient. In a captured step weight gradients form a branch of the graph of their
own: its products keep the arithmetic units busy while the passes of the norms wait for memory. The kernels are the
same, and so are the bits.
"""

import contextlib
import functools
import threading
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


def gradient(grad: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, *, of_input: bool) -> Tensor:
    """Of a convolution's input or weight, from that of its output."""
    mask = [of_input, not of_input, False]
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask)
    return found[0 if of_input else 1]


_searched: set[tuple[Any, ...]] = set()  # convolutions whose algorithms were looked for
_searches: list[threading.Thread] = []
Like = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and type of a tensor


def search_ahead(out: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, *, of_input: bool) -> None:
    """Look for the fastest algorithms of this convolution's gradients in a thread, once for each kind of convolution.
    Forward goes on meanwhile: in the first step it waits for Triton's compiler. of_input: whether the input gets a
    gradient.

    cuDNN remembers its choice by thread, and autograd computes all gradients of a device in one thread. So the search
    is a backward itself. The step's own backward does not wait for it: it looks for what is not found by then.
    """
    like: list[Like] = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (out, x, weight)]
    which = (*like, stride, padding, of_input)
    if not (x.is_cuda and torch.backends.cudnn.benchmark) or which in _searched:
        return
    if not torch.cuda.is_current_stream_capturing():
        _searched.add(which)
        _searches.append(
            threading.Thread(target=_search, args=(x.device, like, stride, padding, of_input), daemon=True)
        )
        _searches[-1].start()


def end_searches() -> None:
    """Wait for them: no other thread may allocate GPU memory while a graph is captured."""
    while _searches:
        _searches.pop().join()


def _search(device: torch.device, *given: Any) -> None:
    with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):  # no memory: no search
        _Search.apply(torch.zeros((), device=device, requires_grad=True), *given).backward()


class _Search(torch.autograd.Function):
    """Computes the gradients of zeros in its backward, and throws them away."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *given: Any) -> Tensor:
        ctx.given = given
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        like, stride, padding, of_input = ctx.given
        zeros = (torch.empty_strided(*size, dtype=dtype, device=grad.device).zero_() for *size, dtype in like)
        out, x, weight = zeros
        for which in (True, False) if of_input else (False,):
            gradient(out, x, weight, stride, padding, of_input=which)
        return grad, *[None] * len(ctx.given)


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding
        out = F.conv2d(x, weight, None, stride, padding)
        search_ahead(out, x, weight, stride, padding, of_input=ctx.needs_input_grad[0])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding = ctx.settings
        given = (grad, x, weight, stride, padding)
        # The input gradient first: backward waits for it.
        of_input = gradient(*given, of_input=True) if ctx.needs_input_grad[0] else None
        apart = x.is_cuda and torch.cuda.is_current_stream_capturing()
        work = functools.partial(gradient, *given, of_input=False)
        return of_input, branch(x.device).run(work, grad, x) if apart else work(), None, None


def conv2d(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """`F.conv2d` in training. `join` must be called before its weight gradient is read."""
    return _Conv2d.apply(x, weight, stride, padding)
