"""Metrics of an accuracy matrix in per cent: one row per trained task, one column per split, None where not evaluated.

A column counts from its first evaluated row, so the same definitions serve a class-incremental stream (lower triangle),
one fixed split (a single full column) and joint training (a single row).
"""

from collections.abc import Iterable, Sequence
from typing import Any

Row = Sequence[float | None]
Matrix = Sequence[Row]


def summary(matrix: Matrix) -> dict[str, Any]:
    """All metrics, for the record; `*_by_task` are those after each task."""
    if not matrix:
        return {"matrix": [], "accuracy": None, "forgetting": None}
    tested = [index for index, value in enumerate(matrix[-1]) if value is not None]
    columns = [[value for row in matrix if (value := row[index]) is not None] for index in tested]
    lost = _mean(column[0] - column[-1] for column in columns if len(column) > 1)
    by_task = forgetting_by_task(matrix)
    return {
        "matrix": matrix,
        "accuracy": accuracy(matrix),
        "forgetting": by_task[-1],
        "forgetting_just_learned": lost,  # since right after the split's own task, as in LUMP's public code
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
