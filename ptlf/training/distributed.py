"""Several processes, one run: gradients averaged by DistributedDataParallel, statistics over the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ptlf.core import processes
from ptlf.core.batch import Batch
from ptlf.core.settings import key
from ptlf.encoders.norm import is_synchronised, synchronise
from ptlf.methods import Method
from ptlf.model import Model


@dataclass
class DistributedConfig:
    sync_batch_norm: bool = key(
        True, "under torchrun, norms see the whole batch (true) or each process's share of it (false)"
    )


class Losses(nn.Module):
    """The step's forward as one module, which is what DistributedDataParallel wraps."""

    def __init__(self, model: Model, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.method.losses(self.model, batch)


class Parallel:
    """`Losses` whose backward leaves every process with the mean gradients of all.

    Only parameters in `used` take part: a frozen unit, or a head that waits for the next task, sends nothing. What is
    used changes when a unit freezes or a task begins; then another one of these is made.
    """

    def __init__(self, model: Model, method: Method, used: Iterable[Tensor]) -> None:
        body, used = Losses(model, method), set(used)
        idle = [name for name, parameter in body.named_parameters() if parameter not in used]
        # Buffers (norms, memory, queue) are kept the same by whoever writes them; weights are so from the start.
        buffers = [name for name, _ in body.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, [*idle, *buffers])
        self.wrapped = DistributedDataParallel(body, init_sync=False)
        self.bytes = sum(parameter.numel() * parameter.element_size() for parameter in used)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        return self.wrapped(batch)


def make_alike(modules: Iterable[nn.Module], config: DistributedConfig, device: torch.device) -> None:
    """Make modules that every process has built fit to be trained by all of them."""
    if processes.world_size() == 1:
        return
    for module in modules:
        if config.sync_batch_norm:
            synchronise(module, device)
        processes.broadcast_([*module.parameters(), *module.buffers()])


def average_statistics(*modules: nn.Module) -> None:
    """Running statistics of norms that saw only their share become the mean over the processes."""
    norms = [part for module in modules for part in module.modules() if is_local(part)]
    processes.all_reduce_mean_(
        buffer for norm in norms for name, buffer in norm.named_buffers() if name.startswith("running_")
    )


def is_local(norm: nn.Module) -> bool:
    """Whether the module is a BatchNorm that has just seen a share of the batch; a frozen one looks at no batch."""
    return (
        isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and not is_synchronised(norm)
        and norm.training
        and norm.track_running_stats
        and "forward" not in norm.__dict__
    )
