"""The processes that share a run: this one's number, and what they say to each other. Alone, every call is free.

A batch is the same on all of them: each works on its share, the rows `shard(rows)`. What is said travels over gloo
between hosts' memories and over NCCL between GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ptlf.core.errors import UserError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of one exchange: the others may wait for the first one's pictures and files

_rank, _world_size = 0, 1


def rank() -> int:
    return _rank


def world_size() -> int:
    return _world_size


def is_first() -> bool:
    """Whether this is the process that writes and shows."""
    return _rank == 0


def warn(warning: str) -> None:
    """On stderr, once."""
    if is_first():
        print(warning, file=sys.stderr)


@contextmanager
def process_group() -> Iterator[None]:
    """Inside, a process started by torchrun is one of several; any other is alone, as outside."""
    global _rank, _world_size
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, number, processes = next(dist.rendezvous("env://", timeout=TIMEOUT))
    # A restarted process must not find the addresses of those that were there before it.
    store = dist.PrefixStore(f"start {restarts()}", store)
    dist.init_process_group(backend, store=store, rank=number, world_size=processes, timeout=TIMEOUT)
    _rank, _world_size = number, processes
    in_order = True
    try:
        yield
    except RuntimeError as error:
        in_order = False
        if not lost_contact(error):
            raise
        raise UserError(f"another process of this run has ended, or does not answer: {first_line(error)}") from error
    finally:
        _rank, _world_size = 0, 1
        if in_order or "nccl" not in backend:  # NCCL may wait forever for those that have gone
            dist.destroy_process_group()


def restarts() -> int:
    """How often torchrun has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def lost_contact(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def local_device(device: torch.device) -> torch.device:
    """Each process of a machine has its own GPU."""
    if _world_size == 1 or device.type != "cuda":
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None:
        raise UserError(f"device is {str(device)!r}, but every process has its own GPU; use --device cuda")
    if local >= gpus:
        raise UserError(f"there are {gpus} GPUs here, too few for process {local} (from 0); lower --nproc-per-node")
    return torch.device("cuda", local)


def shard(rows: int) -> slice:
    """This process's rows of `rows`, which must be a multiple of the processes."""
    size = rows // _world_size
    return slice(_rank * size, (_rank + 1) * size)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(_world_size)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Summed over the processes, each of which made its own use of all rows."""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(_world_size)[_rank]


def all_gather_rows(mine: Tensor) -> Tensor:
    """The rows of all processes, in their order, from each one's own.

    A loss of whole rows is the same on every process, so that its gradient comes back as often as there are processes;
    the average that DistributedDataParallel takes of the parameters' gradients puts that right.
    """
    return mine if _world_size == 1 else _AllGatherRows.apply(mine)


def gather_rows(mine: Tensor, rows: Tensor) -> Tensor:
    """Some rows of `all_gather_rows(mine)`, by their numbers (on the host), without sending the others."""
    place = rows - _rank * len(mine)
    here = (place >= 0) & (place < len(mine))
    found = torch.zeros(len(rows), *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    found[here] = mine[place[here]]
    if len(rows):
        dist.all_reduce(found)  # zeros but on one process: the sum is that one's row
    return found


def all_reduce_mean(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means of scalars over the processes."""
    if _world_size == 1:
        return values
    stacked = torch.stack([value.detach() for value in values.values()])
    dist.all_reduce(stacked)
    return dict(zip(values, stacked / _world_size, strict=True))


def all_reduce_mean_(tensors: Iterable[Tensor]) -> None:
    """Means over the processes, in place and in one exchange. All tensors must be of one dtype."""
    tensors = list(tensors)
    if _world_size == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= _world_size
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def all_reduce_max(values: list[int]) -> list[int]:
    """The largest value at each place over the processes."""
    if _world_size == 1:
        return values
    stacked = torch.tensor(values)
    dist.all_reduce(stacked, dist.ReduceOp.MAX)
    return stacked.tolist()


def broadcast_object(value: T) -> T:
    """The first process's value, on all of them."""
    if _world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Make the tensors those of the first process."""
    if _world_size > 1:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def all_equal(tensors: Iterable[Tensor]) -> bool:
    """Whether all processes hold tensors with the same sums. Those of one run must never drift apart."""
    if _world_size == 1:
        return True
    sums = torch.stack([tensor.detach().double().sum() for tensor in tensors])
    ends = torch.stack((sums, -sums)).nan_to_num(0.0)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return bool((ends[0] == -ends[1]).all())
