"""What would make going on senseless, looked for after every epoch: numbers that are not finite, processes that have
drifted apart, an encoder that gives every image the same vector."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.evaluation.spread import COLLAPSED, feature_spread
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochState


def check_numbers(
    modules: Iterable[nn.Module], progress: EpochState | None, position: Position, last: Path | None
) -> None:
    """Losses and weights are finite. `last` is the checkpoint to go back to."""
    bad = progress.first_bad() if progress else None
    if bad is None and are_numbers(modules):
        return
    what, step = (f"loss became {bad[1]}", bad[0] + 1) if bad else ("weights are no longer finite", position.step)
    raise UserError(
        f"the {what} in task {position.task + 1}, epoch {position.epoch + 1}, step {step}; "
        f"{f'the last good checkpoint is {last}' if last else 'there is no checkpoint yet'}; "
        "try a lower --training.lr or --training.precision fp32"
    )


def are_numbers(modules: Iterable[nn.Module]) -> bool:
    """Whether weights and statistics are finite, and other buffers, which may be masks with infinities, have no NaN."""
    moving: list[Tensor] = []
    others: list[Tensor] = []
    for module in modules:
        moving += module.parameters()
        for name, buffer in module.named_buffers():
            (moving if "running_" in name else others).append(buffer)
    return bool(magnitudes(moving).isfinite().all()) and not bool(magnitudes(others).isnan().any())


def magnitudes(tensors: Iterable[Tensor]) -> Tensor:
    """Sums that have every NaN and infinity in them, asked of the device in one go."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return torch.stack([value.float() for value in torch._foreach_norm(floats, 1)]) if floats else torch.zeros(1)


def check_processes(model: nn.Module) -> None:
    if not processes.all_equal(model.parameters()):
        raise RuntimeError("the processes' weights differ; a parameter's gradient was not averaged over them")


def warn_of_collapse(encoder: nn.Module, images: Tensor, position: Position) -> bool:
    """Say so if the encoder gives all these images the same vector; whether it does."""
    spread = feature_spread(encoder, images)
    if spread < COLLAPSED:
        processes.warn(
            f"ptlf: warning: the representation has collapsed in task {position.task + 1}, epoch {position.epoch + 1}: "
            f"normalised features of {len(images)} images differ by {spread:.1e} (1 = spread evenly, 0 = all the "
            "same); try a lower --training.lr or another objective"
        )
    return spread < COLLAPSED
