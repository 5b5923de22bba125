"""Metrics of an accuracy matrix, and what features are like without labels.

A matrix is in per cent: one row per trained task, one column per split, None where not evaluated. A column counts from
its first evaluated row, so the same definitions serve a class-incremental stream (lower triangle), one fixed split (a
single full column) and joint training (a single row).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

COLLAPSED = 1e-3  # spread; encoders that learn have 0.1 to 0.5, or 0.01 while running statistics of norms lag behind
Row = Sequence[float | None]
Matrix = Sequence[Row]


def summary(matrix: Matrix) -> dict[str, Any]:
    """All metrics, for the record; `*_by_task` are those after each task."""
    if not matrix:
        return {"matrix": [], "accuracy": None, "forgetting": None}
    tested = [index for index, value in enumerate(matrix[-1]) if value is not None]
    columns = [[value for row in matrix if (value := row[index]) is not None] for index in tested]
    below_best = _mean(max(column) - column[-1] for column in columns)
    lost = _mean(column[0] - column[-1] for column in columns if len(column) > 1)
    by_task = forgetting_by_task(matrix)
    return {
        "matrix": matrix,
        "accuracy": accuracy(matrix),
        "forgetting": by_task[-1],
        "forgetting_just_learned": lost,  # since right after the split's own task, as in LUMP's code since October 2022
        # As in the code published with LUMP's paper, but for accuracies before the split's own task.
        "forgetting_all_checkpoints": below_best if len(matrix) > 1 else None,
        "backward_transfer": None if lost is None else -lost,
        "accuracy_by_task": [accuracy([row]) for row in matrix],
        "forgetting_by_task": by_task,
    }


def accuracy(matrix: Matrix) -> float | None:
    """Mean of the last row."""
    return _mean(value for value in matrix[-1] if value is not None)


def forgetting_by_task(matrix: Matrix) -> list[float | None]:
    """After each task, the mean of (best accuracy before) - (accuracy after it), over the splits evaluated before."""
    best: dict[int, float] = {}  # accuracy by split, so far
    found = []
    for row in matrix:
        tested = [(index, value) for index, value in enumerate(row) if value is not None]
        found.append(_mean(best[index] - value for index, value in tested if index in best))
        best |= {index: max(value, best.get(index, value)) for index, value in tested}
    return found


def forward_transfer(future: Row, untrained: Row) -> float | None:
    """Mean over the splits of (accuracy just before the split's own task) - (accuracy of the untrained encoder)."""
    return _mean(a - b for a, b in zip(future, untrained, strict=True) if a is not None and b is not None)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def spaced(indices: np.ndarray, most: int) -> np.ndarray:
    """At most `most` indices, evenly spaced from the first: images sorted by class are all represented."""
    count = min(most, len(indices))
    return indices[np.arange(count) * len(indices) // max(1, count)]


def spread(features: Tensor) -> float:
    """Standard deviation over the images of their L2-normalised features (N, D), averaged over D, times sqrt(D): 1 if
    directions are spread evenly, 0 if features have collapsed to one direction."""
    normalised = F.normalize(features, dim=1)
    return float(normalised.std(0, correction=0).mean() * features.shape[1] ** 0.5)


def effective_rank(features: Tensor) -> float:
    """How many directions features (N, D) use, between 1 and min(N, D): RankMe (Garrido et al., 2023), the exp of the
    entropy of the singular values' shares."""
    values = torch.linalg.svdvals(features.double())
    shares = values / values.sum().clamp_min(1e-300)
    return float(torch.special.entr(shares).sum().exp())
