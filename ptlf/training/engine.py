"""How the step is run: eagerly, with faster code for its parts, or with that and captured in a CUDA graph."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._triton import has_triton

from ptlf.core import processes
from ptlf.core.batch import Batch, Layout
from ptlf.core.errors import UserError
from ptlf.kernels import FastParts
from ptlf.model import Accelerator

Body = Callable[[Batch], dict[str, Tensor]]
Addresses = tuple[int, ...]  # of every tensor that a step reads or writes besides its batch
ENGINES = ("auto", "eager", "compiled", "captured")
WARM_UP = 3  # steps run uncaptured at first: they compile and pick algorithms
KEPT = 64  # variants whose graphs are kept


def choose_engine(wanted: str, device: torch.device) -> str:
    """`auto` means captured where that is possible, eager elsewhere."""
    why = why_not_captured(device)
    if wanted == "captured" and why:
        raise UserError(f"training.engine is captured, but {why}; use eager or auto")
    return wanted if wanted != "auto" else "eager" if why else "captured"


def why_not_captured(device: torch.device) -> str | None:
    """Why steps cannot be captured on this device, or None."""
    if device.type != "cuda":
        return "that needs a GPU"
    if processes.joined() and not dist.is_nccl_available():
        return "this PyTorch has no NCCL, which captured steps of several processes need"
    return None if has_triton() else "there is no Triton compiler for this GPU"


def make_accelerator(kind: str, batch: int, device: torch.device, dtype: torch.dtype) -> Accelerator:
    plain = Accelerator(bf16_heads=dtype is torch.bfloat16 and device.type == "cpu")
    return plain if kind == "eager" else FastParts(batch, device)


class Engine:
    """Moves a batch to the device and runs the body as it is."""

    def __init__(self, body: Body, device: torch.device) -> None:
        self.body, self.device = body, device

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        with self.arithmetic():
            return self.body(batch.to(self.device))

    def rebuild(self, variant: str, addresses: Addresses = ()) -> None:
        """The body's operations have changed. A graph is reused only if variant and tensor addresses match."""

    def close(self) -> None:
        """Free all graphs: no step follows."""

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Backend flags for a step and for its parts: deterministic cuDNN algorithms."""
        before = torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = True
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = before


@dataclass
class Captured:
    """The graph of one batch size, its input batch and its output losses."""

    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    batch: Batch | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class CapturedEngine(Engine):
    """Runs the body a few times, then replays a CUDA graph of it, one per batch size and frozen set. All of them
    use the same memory: of what a replay leaves there, only the losses are read."""

    def __init__(self, body: Body, device: torch.device, full: int) -> None:
        """full: the batch size; the last batch of an epoch may be smaller."""
        super().__init__(body, device)
        self.full = full
        self.stream = capturing_stream(device)
        self.pool: Any = None
        self.kept: dict[str, tuple[Addresses, dict[int, Captured]]] = {}  # by variant, the latest last
        self.captured: dict[int, Captured] = {}  # those of the variant at work, by batch size
        self.batches: dict[Layout, Batch] = {}  # the static tensors that all graphs of a layout read

    def rebuild(self, variant: str, addresses: Addresses = ()) -> None:
        before, captured = self.kept.get(variant, (addresses, {}))
        # All processes capture at the same step.
        scarce, moved = processes.all_reduce_max([int(is_scarce(self.device)), int(before != addresses)])
        self.kept = {} if scarce else {name: kept for name, kept in self.kept.items() if name != variant}
        self.captured = {} if scarce or moved else captured
        self.kept[variant] = addresses, self.captured
        if len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]

    def close(self) -> None:
        """NCCL leaves a process group only when no graph holds its collectives."""
        for graph in self.graphs():
            graph.reset()
        self.kept, self.captured = {}, {}

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        return [captured.graph for _, sizes in self.kept.values() for captured in sizes.values() if captured.graph]

    @contextmanager
    def arithmetic(self, batch: Batch | None = None) -> Iterator[None]:
        """Float32 products (the heads) use TF32. The fastest algorithms are looked for, but not for a smaller batch."""
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, torch.get_float32_matmul_precision()
        cudnn.benchmark = batch is None or len(batch) == self.full
        torch.set_float32_matmul_precision("high")
        try:
            with super().arithmetic():
                yield
        finally:
            cudnn.benchmark = before[0]
            torch.set_float32_matmul_precision(before[1])

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        mine = self.captured.setdefault(len(batch), Captured())
        # Compiles kernels and chooses algorithms, of which other graphs have used most.
        if mine.graph is None and mine.steps < (1 if self.graphs() else WARM_UP):
            mine.steps += 1
            return self.uncaptured(batch.to(self.device))
        if (layout := batch.layout()) in self.batches:
            self.batches[layout].fill(batch)
        else:
            self.batches[layout] = batch.to(self.device)
        fixed = self.batches[layout]
        if mine.graph is None:
            self.capture(mine, fixed)
        elif mine.batch is not fixed:
            raise RuntimeError("a step draws other names, shapes or types than the step that was captured for it")
        assert mine.graph is not None
        mine.graph.replay()
        return mine.losses

    def uncaptured(self, batch: Batch) -> dict[str, Tensor]:
        """Warm-up on the capture stream, so that the allocator has blocks for it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self.arithmetic(batch):
            losses = self.body(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return losses

    def capture(self, mine: Captured, batch: Batch) -> None:
        """Records without running; the replay that follows is this batch's step. Unlike `torch.cuda.graph` it empties
        the allocator's cache for the first graph only: all share their memory."""
        torch.cuda.synchronize()
        if not self.graphs():
            self.pool = torch.cuda.graph_pool_handle()  # one that lost all its graphs cannot be used again
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), self.arithmetic(batch):
            # NCCL's own thread may look at its events meanwhile, which "global" would forbid.
            graph.capture_begin(self.pool, "thread_local" if processes.joined() else "global")
            try:
                mine.losses = self.body(replace(batch))  # a copy, whose views are freed for the next graph
            finally:
                graph.capture_end()
        mine.batch, mine.graph = batch, graph


def is_scarce(device: torch.device) -> bool:
    """Whether free GPU memory is less than what graphs hold: an uncaptured step may then run out of it."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] < held


@functools.cache
def capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Shared by all engines: cuBLAS and cuDNN keep a workspace per stream."""
    return torch.cuda.Stream(device)
