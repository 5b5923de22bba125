"""Outputs of the frozen prefix for some views of every image, kept for a task: steps begin behind the prefix."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptlf.core.memory import check_fits
from ptlf.core.phases import Phase, silent

BATCH = 64  # images per forward
DTYPE = torch.bfloat16  # that outputs are kept in


@dataclass
class KeptViews:
    """key: of the task and the prefix that the outputs are of. rows: of the images, by their indices."""

    key: tuple[object, ...]
    outputs: Tensor  # (views, images, ...); view k was made as the (k % kinds)-th of a step's views
    rows: Tensor

    @classmethod
    def make(
        cls, key: tuple[object, ...], indices: np.ndarray, count: int, encode: Callable[[Tensor, int], Tensor],
        phase: Phase = silent,
    ) -> "KeptViews":  # fmt: skip
        """encode: gives the prefix's output (B, ...) for the k-th view of the images with these indices."""
        chosen = torch.from_numpy(indices)
        rows = torch.full((int(chosen.max()) + 1,), -1)
        rows[chosen] = torch.arange(len(chosen))
        outputs: Tensor | None = None
        with phase("views through the frozen prefix", count * len(chosen)) as advance:
            for view in range(count):
                for part in chosen.split(BATCH):
                    h = encode(part, view)
                    if outputs is None:
                        shape = (count, len(chosen), *h.shape[1:])
                        what = f"the prefix's output for {count} views of {len(chosen)} images (training.keep_views)"
                        check_fits(what, DTYPE.itemsize * np.prod(shape, dtype=float), h.device)
                        outputs = h.new_empty(shape, dtype=DTYPE)
                    outputs[view, rows[part]] = h.to(DTYPE)
                    advance(len(part))
        assert outputs is not None
        return cls(key, outputs, rows.to(outputs.device))

    def pick(self, indices: Tensor, uniforms: Tensor) -> list[Tensor]:
        """For each of a step's views one of those kept, in float32. uniforms (views, B): which."""
        kinds, rows = len(uniforms), self.rows[indices]
        each = len(self.outputs) // kinds
        picked = [k + kinds * (u.to(rows.device) * each).long().clamp(max=each - 1) for k, u in enumerate(uniforms)]
        return [self.outputs[views, rows].float() for views in picked]
