"""Data-parallel training: gradients averaged by DistributedDataParallel, batch norm over the global batch."""

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
        True, "under torchrun, batch norms use the global batch (true) or each process's share of it (false)"
    )


class Losses(nn.Module):
    """The forward of a step as a module, for DistributedDataParallel to wrap."""

    def __init__(self, model: Model, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.method.losses(self.model, batch)


class Parallel:
    """`Losses` whose backward averages the gradients over the processes.

    Only the parameters in `used` are exchanged: not frozen units, nor heads of a later task. When a unit freezes or a
    task begins, a new Parallel is built.
    """

    def __init__(self, model: Model, method: Method, used: Iterable[Tensor]) -> None:
        losses, used = Losses(model, method), set(used)
        unused = [name for name, parameter in losses.named_parameters() if parameter not in used]
        # Buffers (norms, memory, queue) need no exchange: the code that writes them keeps them equal on all processes.
        buffers = [name for name, _ in losses.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(losses, [*unused, *buffers])
        self.wrapped = DistributedDataParallel(losses, init_sync=False)  # `make_alike` has synchronised the weights
        self.bytes = sum(parameter.numel() * parameter.element_size() for parameter in used)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        return self.wrapped(batch)


def make_alike(modules: Iterable[nn.Module], config: DistributedConfig, device: torch.device) -> None:
    """Prepare modules, built on every process, for data-parallel training: same weights, synchronised batch norms."""
    if processes.world_size() == 1:
        return
    for module in modules:
        if config.sync_batch_norm:
            synchronise(module, device)
        processes.broadcast_([*module.parameters(), *module.buffers()])


def average_statistics(*modules: nn.Module) -> None:
    """Average the running statistics of batch norms that are not synchronised over the processes."""
    norms = [part for module in modules for part in module.modules() if is_local(part)]
    processes.all_reduce_mean_(
        buffer for norm in norms for name, buffer in norm.named_buffers() if name.startswith("running_")
    )


def is_local(norm: nn.Module) -> bool:
    """Whether the module is a BatchNorm that updates its running statistics from this process's share of the batch."""
    return (
        isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and not is_synchronised(norm)
        and norm.training
        and norm.track_running_stats
        and "forward" not in norm.__dict__
    )
