"""Data-parallel training: gradients averaged by DistributedDataParallel, batch norm over the global batch."""

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
    sync_batch_norm: bool = key(True, "under torchrun, batch norms use the global batch, not each process's share")


class Losses(nn.Module):
    """The forward of a step as a module, for DistributedDataParallel to wrap."""

    def __init__(self, model: Model, method: Method) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.method.losses(self.model, batch)


class Parallel(DistributedDataParallel):
    """`Losses` whose backward averages the gradients over the processes.

    Only the parameters in `used` are exchanged: not frozen units, nor heads of a later task. When a unit freezes or a
    task begins, a new Parallel is built.
    """

    def __init__(self, model: Model, method: Method, used: Iterable[Tensor]) -> None:
        losses, used = Losses(model, method), set(used)
        unused = [name for name, parameter in losses.named_parameters() if parameter not in used]
        # Buffers (norms, memory, queue) need no exchange: the code that writes them keeps them equal on all processes.
        buffers = [name for name, _ in losses.named_buffers()]
        self._set_params_and_buffers_to_ignore_for_model(losses, [*unused, *buffers])
        super().__init__(losses, init_sync=False)  # `make_alike` has synchronised the weights
        self.bytes = sum(parameter.nbytes for parameter in used)


def make_alike(modules: Iterable[nn.Module], config: DistributedConfig, device: torch.device) -> None:
    """Prepare modules, built on every process, for data-parallel training: same weights, synchronised batch norms."""
    if processes.world_size() == 1:
        return
    for module in modules:
        if config.sync_batch_norm:
            synchronise(module, device)
        processes.broadcast_([*module.parameters(), *module.buffers()])


def average_statistics(*modules: nn.Module) -> None:
    """Average the running statistics of batch norms that each process updates from its own share of the batch."""
    parts = (part for module in modules for part in module.modules())
    norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm) and not is_synchronised(part)]
    local = [n for n in norms if n.training and n.track_running_stats and "forward" not in n.__dict__]
    running = (buffer for norm in local for name, buffer in norm.named_buffers() if name.startswith("running_"))
    processes.all_reduce_mean_(running)
