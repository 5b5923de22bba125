"""Distributed runs: rank, world size and collective operations. Without a process group every call is a no-op.

All processes draw the same global batch; each computes on its rows, `shard(rows)`. Collectives of a training step have
fixed shapes and never wait for the host, so that a CUDA graph can record them. A group of one process does them too.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from ptlf.core.errors import UserError, info

T = TypeVar("T")
LOOK = 0.3  # seconds in which the idle cores are counted
TIMEOUT = timedelta(minutes=30)  # of one collective: the other ranks wait while rank 0 writes files

_rank, _world_size, _joined = 0, 1, False


def world_size() -> int:
    return _world_size


def joined() -> bool:
    """Whether this process is in a process group, if only its own."""
    return _joined


def is_first() -> bool:
    """Whether this is rank 0, which writes files and prints."""
    return _rank == 0


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group that torchrun set up. Does nothing in a process that torchrun did not start."""
    global _rank, _world_size, _joined
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    store, number, processes = next(dist.rendezvous("env://", timeout=TIMEOUT))
    # After a restart the store still holds the addresses of the previous processes: use other keys.
    store = dist.PrefixStore(f"start {restarts()}", store)
    dist.init_process_group(backend, store=store, rank=number, world_size=processes, timeout=TIMEOUT)
    _rank, _world_size, _joined = number, processes, True
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
        _rank, _world_size, _joined = 0, 1, False
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


def use_idle_cores() -> None:
    """No more threads than cores that other programs leave idle: on a busy core a step waits for its slowest thread.
    The number that OMP_NUM_THREADS asks for stays, and where the system does not say what is idle."""
    before, cores, ticks = torch.get_num_threads(), os.cpu_count() or 1, Path("/proc/stat")
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available() and ticks.exists():
        first = [int(word) for word in ticks.read_text().split()[1:9]]  # of all cores; idle are the fourth and fifth
        time.sleep(LOOK)
        spent = [int(word) - then for word, then in zip(ticks.read_text().split()[1:9], first, strict=True)]
        idle = max(1, round(cores * sum(spent[3:5]) / max(sum(spent), 1)))
        if idle < before:
            torch.set_num_threads(idle)
            info(f"other programs use the CPU: {idle} of {before} threads are used (OMP_NUM_THREADS sets the number)")


def share(rows: int) -> int:
    """How many rows of a batch are this process's. `rows` must be a multiple of the number of processes."""
    return rows // _world_size


def shard(rows: int) -> slice:
    """The rows of a batch that are this process's."""
    return slice(_rank * share(rows), (_rank + 1) * share(rows))


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name first


# Operators of their own, because compiled code calls an operator as it is: neither traces nor reorders what is inside.
@torch.library.custom_op("ptlf::all_gather_rows", mutates_args=())
def _all_gather_rows(mine: Tensor) -> Tensor:
    rows = mine.new_empty(_world_size * len(mine), *mine.shape[1:])
    _gather(rows, mine.contiguous())
    return rows


@torch.library.custom_op("ptlf::own_rows_of_sum", mutates_args=())
def _own_rows_of_sum(rows: Tensor) -> Tensor:
    """This process's rows of the sum over all processes."""
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.chunk(_world_size)[_rank].clone()


@torch.library.custom_op("ptlf::all_reduce_", mutates_args=("tensor",))
def _all_reduce_(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


@_all_gather_rows.register_fake
def _(mine: Tensor) -> Tensor:
    return mine.new_empty(_world_size * len(mine), *mine.shape[1:])


@_own_rows_of_sum.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(len(rows) // _world_size, *rows.shape[1:])


# Every process used all rows: the gradient of its own is the sum over the processes.
_all_gather_rows.register_autograd(lambda ctx, grad: _own_rows_of_sum(grad))


def all_gather_rows(mine: Tensor) -> Tensor:
    """The rows of all processes, in order of rank; `mine` are those of this one. Differentiable: backward sums the
    loss of every process, which is the same; averaging the gradients divides by their number again."""
    return _all_gather_rows(mine) if _joined else mine


def all_reduce_(tensor: Tensor) -> None:
    """The sum over the processes, in place. The tensor must be contiguous."""
    if _joined:
        _all_reduce_(tensor)


@torch.no_grad()
def all_reduce_mean_(tensors: Iterable[Tensor]) -> None:
    """Means over the processes, in place, with one all-reduce for all tensors of a dtype."""
    tensors = list(tensors) if _joined else []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        some = [tensor for tensor in tensors if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        all_reduce_(flat)
        flat /= _world_size
        parts = flat.split([tensor.numel() for tensor in some])
        torch._foreach_copy_(some, [part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True)])


def all_reduce_max(values: list[int]) -> list[int]:
    """Elementwise maximum over the processes."""
    stacked = torch.tensor(values)
    if _joined:
        dist.all_reduce(stacked, dist.ReduceOp.MAX)
    return stacked.tolist()


def broadcast_object(value: T) -> T:
    """The value of rank 0, on all processes."""
    box = [value]
    if _joined:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors with those of rank 0."""
    if _joined:
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def all_equal(tensors: Iterable[Tensor]) -> bool:
    """Whether the sum of each tensor is the same on all processes."""
    if not _joined:
        return True
    sums = torch.stack([tensor.detach().double().sum() for tensor in tensors])
    bounds = torch.stack((sums, -sums)).nan_to_num(0.0)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)  # max and -min
    return bool((bounds[0] == -bounds[1]).all())
