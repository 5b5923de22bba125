"""Distributed runs: rank, world size and collective operations. In a single process every call is a no-op.

All processes draw the same global batch; each computes on its rows, `shard(rows)`. CPU tensors are exchanged with gloo,
CUDA tensors with NCCL.
"""

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
TIMEOUT = timedelta(minutes=30)  # of one collective: the other ranks wait while rank 0 writes files

_rank, _world_size = 0, 1


def world_size() -> int:
    return _world_size


def is_first() -> bool:
    """Whether this is rank 0, which writes files and prints."""
    return _rank == 0


def warn(warning: str) -> None:
    """Print to stderr, on rank 0 only."""
    if is_first():
        print(warning, file=sys.stderr)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group that torchrun set up. Does nothing in a process that torchrun did not start."""
    global _rank, _world_size
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, number, processes = next(dist.rendezvous("env://", timeout=TIMEOUT))
    # After a restart the store still holds the addresses of the previous processes: use other keys.
    store = dist.PrefixStore(f"start {restarts()}", store)
    dist.init_process_group(backend, store=store, rank=number, world_size=processes, timeout=TIMEOUT)
    _rank, _world_size = number, processes
    succeeded = True
    try:
        yield
    except RuntimeError as error:
        succeeded = False
        if not isinstance(error, dist.DistError) and "gloo" not in str(error) and "NCCL" not in str(error):
            raise
        why = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"another process of this run has ended, or does not answer: {why}") from error
    finally:
        _rank, _world_size = 0, 1
        if succeeded or "nccl" not in backend:  # NCCL may wait forever for processes that have ended
            dist.destroy_process_group()


def restarts() -> int:
    """How often torchrun has restarted this process."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_device(device: torch.device) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK if there are several processes."""
    if _world_size == 1 or device.type != "cuda":
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None:
        raise UserError(f"device is {str(device)!r}, but every process has its own GPU; use --device cuda")
    if local >= gpus:
        raise UserError(f"there are {gpus} GPUs here, too few for process {local} (from 0); lower --nproc-per-node")
    return torch.device("cuda", local)


def shard(rows: int) -> slice:
    """The rows of this process. `rows` must be a multiple of the number of processes."""
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
        """Sum over the processes: each of them used all rows."""
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(_world_size)[_rank]


def all_gather_rows(mine: Tensor) -> Tensor:
    """The rows of all processes, in order of rank; `mine` are those of this one. Differentiable.

    A loss of the gathered rows is the same on every process, so backward sums it `world_size` times.
    DistributedDataParallel averages the gradients, which divides by `world_size` again.
    """
    return mine if _world_size == 1 else _AllGatherRows.apply(mine)


def gather_rows(mine: Tensor, rows: Tensor) -> Tensor:
    """The rows of `all_gather_rows(mine)` with these indices (a CPU tensor); the other rows are not sent."""
    local = rows - _rank * len(mine)
    here = (local >= 0) & (local < len(mine))
    found = torch.zeros(len(rows), *mine.shape[1:], dtype=mine.dtype, device=mine.device)
    found[here] = mine[local[here]]
    if len(rows):
        dist.all_reduce(found)  # each row is zero on all processes but one
    return found


def all_reduce_mean(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means of scalars over the processes."""
    if _world_size == 1:
        return values
    means = {name: value.detach().clone() for name, value in values.items()}
    all_reduce_mean_(means.values())
    return means


def all_reduce_mean_(tensors: Iterable[Tensor]) -> None:
    """Means over the processes, in place, with one all-reduce. All tensors must have the same dtype."""
    tensors = list(tensors)
    if _world_size == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= _world_size
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def all_reduce_max(values: list[int]) -> list[int]:
    """Elementwise maximum over the processes."""
    if _world_size == 1:
        return values
    stacked = torch.tensor(values)
    dist.all_reduce(stacked, dist.ReduceOp.MAX)
    return stacked.tolist()


def broadcast_object(value: T) -> T:
    """The value of rank 0, on all processes."""
    if _world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors with those of rank 0."""
    if _world_size > 1:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def all_equal(tensors: Iterable[Tensor]) -> bool:
    """Whether the sum of each tensor is the same on all processes."""
    if _world_size == 1:
        return True
    sums = torch.stack([tensor.detach().double().sum() for tensor in tensors])
    bounds = torch.stack((sums, -sums)).nan_to_num(0.0)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)  # max and -min
    return bool((bounds[0] == -bounds[1]).all())
