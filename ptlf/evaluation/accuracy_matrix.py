"""Pure functions of an accuracy matrix: a row per task trained, a column per split, None where nothing was tested.

All accuracies in per cent. A column counts from its first tested row, so the same definitions serve a class-incremental
stream (lower triangle), one fixed split (a single full column) and joint training (a single row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = Sequence[float | None]
Matrix = Sequence[Row]


def accuracy(matrix: Matrix) -> float | None:
    """Mean of the last row."""
    return _mean(value for value in matrix[-1] if value is not None)


def forgetting(matrix: Matrix) -> float | None:
    """Mean over the eval_splits tested before the last task of (best accuracy before it) - (accuracy after it)."""
    return _mean(max(column[:-1]) - column[-1] for column in _columns(matrix) if len(column) > 1)


def forgetting_just_learned(matrix: Matrix) -> float | None:
    """The same against the accuracy right after the split's own task, as LUMP's public code counts it."""
    return _mean(column[0] - column[-1] for column in _columns(matrix) if len(column) > 1)


def backward_transfer(matrix: Matrix) -> float | None:
    """Mean of (accuracy at the end) - (accuracy when just learned): what later tasks gave to earlier ones."""
    lost = forgetting_just_learned(matrix)
    return None if lost is None else -lost


def forward_transfer(future: Row, untrained: Row) -> float | None:
    """Mean over eval_splits of (accuracy just before the split's own task) - (accuracy of the untrained encoder)."""
    return _mean(a - b for a, b in zip(future, untrained, strict=True) if a is not None and b is not None)


def summary(matrix: Matrix) -> dict[str, Any]:
    """Everything above, for the record; by task: as it stood after each."""
    if not matrix:
        return {"matrix": [], "accuracy": None, "forgetting": None}
    return {
        "matrix": matrix,
        "accuracy": accuracy(matrix),
        "forgetting": forgetting(matrix),
        "forgetting_just_learned": forgetting_just_learned(matrix),
        "backward_transfer": backward_transfer(matrix),
        "accuracy_by_task": [accuracy(matrix[:rows]) for rows in range(1, len(matrix) + 1)],
        "forgetting_by_task": [forgetting(matrix[:rows]) for rows in range(1, len(matrix) + 1)],
    }


def _columns(matrix: Matrix) -> list[list[float]]:
    """Each split's accuracies from its first tested row to the last."""
    columns = []
    for index in range(len(matrix[0])):
        column = [value for row in matrix if (value := row[index]) is not None]
        if column and matrix[-1][index] is not None:
            columns.append(column)
    return columns


def _mean(values) -> float | None:  # type: ignore[no-untyped-def]
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
