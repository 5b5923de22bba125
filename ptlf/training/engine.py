"""How the step is run: eagerly, with its heavy parts compiled, or compiled and captured in a CUDA graph.

The body of the step is the same in all three; it reads fixed tensors and draws nothing. After a freeze it is captured
anew (`rebuild`), unless the same units were frozen before. On a GPU our residual networks run through
`ptlf.training.fused_resnet`, where a freeze leaves nothing to compile; other encoders are compiled, once for every set
of frozen units, and what was compiled is reused for the rest of the process, and by the compiler's own cache on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from ptlf.core import processes
from ptlf.core.batch import Batch, Layout
from ptlf.core.errors import UserError
from ptlf.encoders.norm import takes_views_in_one_pass
from ptlf.training.fused_resnet import can_fuse, forward

Body = Callable[[Batch], dict[str, Tensor]]
Places = tuple[int, ...]
BACKEND = "inductor"
ENGINES = ("auto", "eager", "compiled", "captured")
WARM_UP = 3  # steps run uncaptured at first: they compile and pick algorithms
KEPT = 64  # variants whose graphs are kept


def choose_engine(wanted: str, device: torch.device) -> str:
    """`auto` is captured on a GPU that the compiler knows, and eager elsewhere and where processes share the run."""
    if wanted == "captured" and device.type != "cuda":
        raise UserError("training.engine captured needs a GPU; use eager or compiled here")
    if wanted not in ("auto", "eager") and processes.world_size() > 1:
        raise UserError(f"training.engine {wanted} is for one process; under torchrun use eager or auto")
    if wanted != "auto":
        return wanted
    return "captured" if device.type == "cuda" and why_not_captured(wanted, device) is None else "eager"


def why_not_captured(wanted: str, device: torch.device) -> str | None:
    """What keeps `auto` from the fast way on this GPU, if anything does."""
    if wanted != "auto" or device.type != "cuda":
        return None
    if processes.world_size() > 1:
        return f"{processes.world_size()} processes share this run"
    return None if has_triton() else "there is no Triton compiler for this GPU"


class Engine:
    """Moves a batch to the device and runs the body as it is."""

    def __init__(self, body: Body, device: torch.device) -> None:
        self.body, self.device = body, device

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        with self.arithmetic():
            return self.body(batch.to(self.device))

    def rebuild(self, variant: str, places: Places = ()) -> None:
        """What the body does has changed: a unit froze or thawed, or a new task began. Under the same name it does the
        same work, and with the same places, where all lies that it reads or writes beside the batch, on the same
        tensors."""

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Of a step, and of its parts that run outside of one: cuDNN keeps to algorithms that repeat themselves."""
        before = torch.backends.cudnn.deterministic
        torch.backends.cudnn.deterministic = True
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = before


@dataclass
class Captured:
    """One batch size: the tensors the graph reads and writes."""

    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    batch: Batch | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class CapturedEngine(Engine):
    """Runs the body a few times, then records it into a CUDA graph, one per batch size, and replays that.

    Graphs are kept for a set of frozen units that comes again. All use the same memory: what a replay leaves there, but
    for the losses, nobody reads.
    """

    def __init__(self, body: Body, device: torch.device, full: int) -> None:
        """`full` is the size of all batches but an epoch's last."""
        super().__init__(body, device)
        self.full = full
        self.stream = capturing_stream(device)
        self.pool: Any = None
        self.kept: dict[str, tuple[Places, dict[int, Captured]]] = {}  # by variant, the latest last
        self.captured: dict[int, Captured] = {}  # those of the variant at work, by batch size
        self.batches: dict[Layout, Batch] = {}  # what they read

    def rebuild(self, variant: str, places: Places = ()) -> None:
        if is_scarce(self.device):
            self.kept = {}
        before, captured = self.kept.pop(variant, (places, {}))
        self.captured = captured if before == places else {}
        self.kept[variant] = places, self.captured
        if len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]

    def has_graphs(self) -> bool:
        return any(captured.graph for _, sizes in self.kept.values() for captured in sizes.values())

    @contextmanager
    def arithmetic(self, batch: Batch | None = None) -> Iterator[None]:
        """Float32 products (the heads) use TF32. Shapes never change, so the fastest algorithms are looked for, but not
        for an epoch's last, smaller batch."""
        before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
        torch.backends.cudnn.benchmark = batch is None or len(batch) == self.full
        torch.set_float32_matmul_precision("high")
        try:
            with super().arithmetic():
                yield
        finally:
            torch.backends.cudnn.benchmark = before[0]
            torch.set_float32_matmul_precision(before[1])

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        mine = self.captured.setdefault(len(batch), Captured())
        if mine.graph is None and mine.steps < (1 if self.has_graphs() else WARM_UP):
            mine.steps += 1
            return self.uncaptured(batch.to(self.device))
        fixed = self.fixed(batch)
        if mine.graph is None:
            self.capture(mine, fixed)
        elif mine.batch is not fixed:
            raise RuntimeError("a step draws other names, shapes or types than the step that was captured for it")
        assert mine.graph is not None
        mine.graph.replay()
        return mine.losses

    def fixed(self, batch: Batch) -> Batch:
        """What this batch holds, where graphs read it: one place for all batches of a layout."""
        mine = self.batches.get(layout := batch.layout())
        if mine is None:
            mine = self.batches[layout] = batch.to(self.device)
        else:
            mine.fill(batch)
        return mine

    def uncaptured(self, batch: Batch) -> dict[str, Tensor]:
        """On the stream that capturing will use, so that its allocations are ready."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self.arithmetic(batch):
            losses = self.body(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return losses

    def capture(self, mine: Captured, batch: Batch) -> None:
        """Records without running; the replay that follows is this batch's step.

        `torch.cuda.graph` would empty the allocator's cache every time. Here the graphs share their memory, so that is
        needed only for the first.
        """
        torch.cuda.synchronize()
        if not self.has_graphs():
            self.pool = torch.cuda.graph_pool_handle()  # one that lost all its graphs cannot be used again
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream), self.arithmetic(batch):
            graph.capture_begin(self.pool)
            try:
                mine.losses = self.body(replace(batch))  # whose views are let go, for the next graph
            finally:
                graph.capture_end()
        mine.batch, mine.graph = batch, graph


def is_scarce(device: torch.device) -> bool:
    """Whether what is left on the GPU may be too little for a step beside the memory that graphs hold, which is
    reserved, and mostly in no tensor's use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] < held


@functools.cache
def capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


def make_engine(kind: str, body: Body, device: torch.device, full: int) -> Engine:
    return CapturedEngine(body, device, full) if kind == "captured" else Engine(body, device)


def compile_encoder(encoder: nn.Module, views: int, batch: int) -> None:
    """Make training go through the fused forward where the encoder has one; else compile it, part by part if it has
    parts, for full batches. All else (evaluation, replay for the correlation) runs as it is."""
    allow_many_variants()
    one_pass = takes_views_in_one_pass(encoder)
    encoder.__dict__["one_pass"] = one_pass
    rows = batch * views if one_pass else batch
    if next(encoder.parameters()).is_cuda and has_triton():
        encoder._compiled_call_impl = functools.partial(call_encoder, encoder)
    find_segments = getattr(encoder, "segments", None)
    for part in find_segments() if callable(find_segments) else [encoder]:
        part._compiled_call_impl = functools.partial(call_part, part, rows)


def call_encoder(encoder: nn.Module, images: Tensor) -> Tensor:
    if encoder.training and torch.is_grad_enabled() and can_fuse(encoder):
        return forward(encoder, images)  # type: ignore[arg-type]
    return encoder._call_impl(images)


def call_part(part: nn.Module, rows: int, x: Tensor) -> Tensor:
    if not (part.training and torch.is_grad_enabled() and len(x) == rows):
        return part._call_impl(x)
    try:
        return compiled(call_forward)(part, variant(part), x)
    except torch._dynamo.exc.Unsupported as error:
        why = str(error).strip().splitlines()[0]
        raise UserError(f"{type(part).__name__} cannot be compiled ({why}); use --training.engine eager") from error


def variant(part: nn.Module) -> str:
    """Which forwards stand replaced below this module, and which parameters train. An argument of the compiled
    function, it keeps apart what the compiler's own guards may not notice."""
    names = []
    for module in part.modules():
        replaced = type(module.__dict__["forward"]).__name__ if "forward" in module.__dict__ else "-"
        trained = "".join("01"[p.requires_grad] for p in module._parameters.values() if p is not None)
        names.append(replaced + trained)
    return " ".join(names)


def call_forward(part: nn.Module, variant: str, x: Tensor) -> Tensor:
    return part.forward(x)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)


def compile_function(function: Callable[..., Any], *sizes: int) -> Callable[..., Any]:
    """`function` compiled for first arguments of so many rows (or lists of such); anything else runs as it is."""
    allow_many_variants()

    @functools.wraps(function)
    def call(first: Any, *rest: Any) -> Any:
        rows = len(first if isinstance(first, Tensor) else first[0])
        if rows not in sizes:
            return function(first, *rest)
        if isinstance(function, MethodType):  # what is compiled stays for good: not the object with it
            return compiled(function.__func__)(function.__self__, first, *rest)
        return compiled(function)(first, *rest)

    return call


def allow_many_variants() -> None:
    """A part has a variant per frozen set; running out of room for them must be an error, not silently slow."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 1024)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8192)
    config.fail_on_recompile_limit_hit = True
