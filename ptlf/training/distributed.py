"""What several processes share before and after a step: weights, batch norms and their statistics."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ptlf.core import processes
from ptlf.core.settings import key
from ptlf.encoders.norm import is_synchronised, synchronise
from ptlf.freezing.kernels import replaced_forward


@dataclass
class DistributedConfig:
    sync_batch_norm: bool = key(True, "under torchrun, batch norms use the global batch, not each process's share")


def broadcast_and_sync_bn(modules: Iterable[nn.Module], config: DistributedConfig) -> None:
    """Prepare modules, built on every process, for data-parallel training: same weights, synchronised batch norms."""
    for module in modules if processes.joined() else ():
        if config.sync_batch_norm:
            synchronise(module)
        processes.broadcast_([*module.parameters(), *module.buffers()])


def average_statistics(*modules: nn.Module) -> None:
    """Average the running statistics of batch norms that each process updates from its own share of the batch."""
    parts = (part for module in modules for part in module.modules())
    norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm) and not is_synchronised(part)]
    local = [n for n in norms if n.training and n.track_running_stats and replaced_forward(n) is None]
    processes.all_reduce_mean_(b for n in local for name, b in n.named_buffers() if name.startswith("running_"))
