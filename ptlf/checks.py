"""What would make going on senseless, looked for after every epoch: numbers that are not finite, processes that have
drifted apart, an encoder that gives every image the same vector."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ptlf import ranks
from ptlf.errors import UserError
from ptlf.evaluation.spread import COLLAPSED, feature_spread
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import Progress


def check_numbers(model: nn.Module, progress: Progress | None, position: Position, last: Path | None) -> None:
    """Losses and weights are finite. `last` is the checkpoint to go back to."""
    bad = progress.first_bad() if progress else None
    if bad is None and all_finite([*model.parameters(), *model.buffers()]):
        return
    what, step = (f"loss became {bad[1]}", bad[0] + 1) if bad else ("weights are no longer finite", position.step)
    raise UserError(
        f"the {what} in task {position.task + 1}, epoch {position.epoch + 1}, step {step}; "
        f"{f'the last good checkpoint is {last}' if last else 'there is no checkpoint yet'}; "
        "try a lower --training.lr or --training.precision fp32"
    )


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Asked of the device in one go; a sum of magnitudes has every NaN and infinity in it."""
    sums = torch._foreach_norm([tensor for tensor in tensors if tensor.is_floating_point()], 1)
    return bool(torch.stack([value.float() for value in sums]).isfinite().all())


def check_processes(model: nn.Module) -> None:
    if not ranks.are_same(model.parameters()):
        raise RuntimeError("the processes' weights differ; a parameter's gradient was not averaged over them")


def warn_of_collapse(encoder: nn.Module, images: Tensor, position: Position) -> bool:
    """Say so if the encoder gives all these images the same vector; whether it does."""
    spread = feature_spread(encoder, images)
    if spread < COLLAPSED:
        ranks.tell(
            f"ptlf: warning: the representation has collapsed in task {position.task + 1}, epoch {position.epoch + 1}: "
            f"normalised features of {len(images)} images differ by {spread:.1e} (1 = spread evenly, 0 = all the "
            "same); try a lower --training.lr or another objective"
        )
    return spread < COLLAPSED
