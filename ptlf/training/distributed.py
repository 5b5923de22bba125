"""Data-parallel training: the same weights on all processes, averaged gradients, batch norm over the global batch."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.settings import key
from ptlf.encoders.norm import is_synchronised, synchronise
from ptlf.freezing import replaced_forward


@dataclass
class DistributedConfig:
    sync_batch_norm: bool = key(True, "under torchrun, batch norms use the global batch, not each process's share")


def broadcast_and_sync_bn(modules: Iterable[nn.Module], config: DistributedConfig) -> None:
    """Prepare modules, built on every process, for data-parallel training: same weights, synchronised batch norms."""
    if not processes.joined():
        return
    for module in modules:
        if config.sync_batch_norm:
            synchronise(module)
        processes.broadcast_([*module.parameters(), *module.buffers()])


def average_gradients(parameters: Iterable[Tensor]) -> int:
    """Average the gradients that there are, with one all-reduce. Returns how many bytes that exchanges."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    processes.all_reduce_mean_(gradients)
    return sum(gradient.nbytes for gradient in gradients)


def average_statistics(*modules: nn.Module) -> None:
    """Average the running statistics of batch norms that each process updates from its own share of the batch."""
    parts = (part for module in modules for part in module.modules())
    norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm) and not is_synchronised(part)]
    local = [n for n in norms if n.training and n.track_running_stats and replaced_forward(n) is None]
    running = (buffer for norm in local for name, buffer in norm.named_buffers() if name.startswith("running_"))
    processes.all_reduce_mean_(running)
