"""Checks after every epoch that stop a run or warn: values that are not finite, processes whose weights differ, a
collapsed representation."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.evaluation.spread import COLLAPSED, feature_spread
from ptlf.training.checkpoint import Position


def are_finite(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters and running statistics are finite and other buffers, such as masks with -inf, have no NaN."""
    trained: list[Tensor] = []
    others: list[Tensor] = []
    for module in modules:
        trained += module.parameters()
        for name, buffer in module.named_buffers():
            (trained if "running_" in name else others).append(buffer)
    return bool(norms(trained).isfinite().all()) and not bool(norms(others).isnan().any())


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """L1 norm of each float tensor, in one call: not finite if a value is not."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return torch.stack([value.float() for value in torch._foreach_norm(floats, 1)]) if floats else torch.zeros(1)


def check_processes(model: nn.Module) -> None:
    if not processes.all_equal(model.parameters()):
        raise RuntimeError("the processes' weights differ; a parameter's gradient was not averaged over them")


def warn_of_collapse(encoder: nn.Module, images: Tensor, position: Position) -> bool:
    """Whether the encoder maps all images to (nearly) the same vector; prints a warning if so."""
    spread = feature_spread(encoder, images)
    if spread < COLLAPSED:
        processes.warn(
            f"ptlf: warning: the representation has collapsed in task {position.task + 1}, epoch {position.epoch + 1}: "
            f"normalised features of {len(images)} images differ by {spread:.1e} (1 = spread evenly, 0 = all the "
            "same); try a lower --training.lr or another objective"
        )
    return spread < COLLAPSED
