"""Compiles the Triton kernels of the first step in processes of their own, while the rest of the run is built.

A rehearsal of the step with tensors that have shapes but no values (torch's "meta" device) finds which kernels it
launches. The processes share them, and leave what they compile in Triton's cache on disk. The first step looks there.
It does not wait for the processes: what is missing it compiles itself.
"""

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.encoders.norm import views_in_one_pass
from ptlf.encoders.resnet import ResNet
from ptlf.objectives import objective
from ptlf.training import fused_resnet
from ptlf.training.trainer import Trainer
from ptlf.views import UNIFORMS_PER_VIEW, View, make_views

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import KernelInterface

PROCESSES = 8  # at most; a step has about 30 kernels, and as many for an epoch's last batch
LONGEST = 120  # seconds a child may live: it takes a few, unless it waits for a lock that a thread held at the fork

_begun: set[Hashable] = set()  # steps whose kernels this process has begun to compile


def compile_ahead(trainer: Trainer, images: int) -> None:
    """Begin to compile the kernels of the steps that an epoch of so many images has. Not where processes share the run:
    a rehearsal would take part in their collectives."""
    fast = trainer.engine_kind == "captured" and type(trainer.model.encoder) is ResNet
    ours = type(trainer.model.objective).__module__.startswith("ptlf.")  # code of others is not run in children
    alone = not processes.joined() and not multiprocessing.current_process().daemon  # a daemon has no children
    if not (fast and ours and alone and hasattr(os, "fork")):
        return
    sizes = trainer.batch_sizes(images)
    step = (repr(trainer.model), trainer.model.dtype, trainer.view_specs, trainer.view_size, *sizes)
    if step in _begun:
        return
    _begun.add(step)
    major, minor = torch.cuda.get_device_capability(trainer.device)
    count = min(PROCESSES, len(os.sched_getaffinity(0)) - 1)
    for mine in range(count):
        given = (partial(rehearse, trainer, sizes), 10 * major + minor, mine, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: see LONGEST
            try:
                multiprocessing.get_context("fork").Process(target=_work, args=given, daemon=True).start()
            except OSError:  # no process or no memory left
                return


def _work(*given: Any) -> None:
    """In the child. A forked process cannot use the GPU, nor run a backward pass if its parent ran one before. An error
    is not reported: the step compiles the same kernels, and reports it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler may do something else
    signal.alarm(LONGEST)
    os.closerange(3, 65536)  # files, locks and sockets of the parent
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    with contextlib.suppress(Exception):
        compile_share(*given)


def compile_share(rehearsal: Callable[[], object], capability: int, mine: int, count: int) -> None:
    """Compile, for GPUs of this capability, every `count`-th of the kernels that the rehearsal launches. Kernels of
    this process cannot be launched afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import KernelInterface

    found: set[Hashable] = set()

    def launcher(kernel: "KernelInterface[Any]", grid: Any) -> Callable[..., None]:
        def compiled(*arguments: Any, **named: Any) -> None:
            variant = (kernel, *map(specialised, arguments), *named.items())
            if variant not in found:
                found.add(variant)
                if len(found) % count == mine:
                    build_launcher(kernel.run(*arguments, grid=grid, warmup=True, **named))

        return compiled

    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))  # type: ignore[arg-type]
    KernelInterface.__getitem__ = launcher  # type: ignore[method-assign]
    rehearsal()


class _NoDevice:
    """What Triton's compiler asks of a driver."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def specialised(argument: Any) -> Hashable:
    """What of an argument decides the code that Triton makes."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if type(argument) is int:
        return argument % 16 == 0, argument == 1
    return str(type(argument))


def build_launcher(kernel: "CompiledKernel") -> None:
    """The C code that calls the kernel, which some versions of Triton compile as well."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def rehearse(trainer: Trainer, sizes: list[int]) -> None:
    """Views, forward and backward of a step with each of these batch sizes. The model's tensors lose their values."""
    from ptlf.training import fused_heads, triton_views  # need Triton

    model, specs = trainer.model.train(), trainer.view_specs
    encoder = model.encoder
    if not isinstance(encoder, ResNet) or not fused_resnet.can_fuse(encoder):
        return
    held = without_values(model)

    def augment(images: Tensor, u: Tensor, view: View, size: int) -> Tensor:
        if triton_views.can_apply(images, view, size):
            return triton_views.apply_view(images, u, view, size, channels_last=trainer.channels_last)
        return images.new_empty(len(images), 3, size, size, dtype=torch.float32)

    side = trainer.images.size
    for size in sizes:
        images = torch.empty(size, side, side, 3, dtype=torch.uint8, device="meta")
        uniforms = torch.empty(len(specs), size, UNIFORMS_PER_VIEW, device="meta")
        batch = Batch(images, torch.empty(size, dtype=torch.long, device="meta"), uniforms)
        if trainer.method.memory is not None:
            augment(images, uniforms[0], trainer.method.memory.view, trainer.view_size)
        batch.views = batch.mixed = make_views(images, uniforms, specs, trainer.view_size, augment, at_once=True)
        with views_in_one_pass(encoder, len(specs)):
            vectors = fused_resnet.features(encoder, torch.cat(batch.views), model.dtype)
        features = [each.float() for each in vectors.chunk(len(specs))]
        with objective.through(fused_heads):
            if (teacher := model.objective.teacher) is not None:
                with torch.no_grad():
                    batch.targets = objective.each_view(teacher.projector, features)
            model.objective.loss(features, batch).backward()
    del held  # not earlier


def without_values(module: nn.Module) -> list[Tensor]:
    """Move it to torch's "meta" device. Returns the tensors it had, to be held while kernels are compiled: they are the
    parent's, on the GPU."""
    held = [*module.parameters(), *module.buffers()]
    module._apply(lambda tensor: torch.empty_like(tensor, device="meta"))
    return held
