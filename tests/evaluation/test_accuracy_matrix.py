from __future__ import annotations

import numpy as np
import pytest

from ptlf.evaluation.accuracy_matrix import forgetting_by_task, forward_transfer, summary


def test_by_hand() -> None:
    for matrix, accuracy, forgetting, just_learned in (
        ([[90, None, None], [85, 80, None], [88, 70, 95]], (88 + 70 + 95) / 3, 6, 6),
        ([[50, None, None], [60, 70, None], [55, 75, 80]], 70, 0, -5),  # the best of split 1 is not of its own task
        ([[50], [60], [58]], 58, 2, -8),
        ([[50, 70]], 60, None, None),
    ):
        found = summary(matrix)
        names = ("accuracy", "forgetting", "forgetting_just_learned")
        assert [found[name] for name in names] == pytest.approx([accuracy, forgetting, just_learned]), matrix
        assert found["backward_transfer"] == (None if just_learned is None else -just_learned), matrix
    assert forward_transfer([60, 70], [50, 65]) == pytest.approx(7.5)
    assert forward_transfer([], []) is None


def test_against_an_independent_implementation() -> None:
    rng = np.random.default_rng(0)
    for tasks in (2, 3, 7):
        full = rng.uniform(0, 100, (tasks, tasks))
        matrix = [[float(full[t, i]) if i <= t else None for i in range(tasks)] for t in range(tasks)]
        lost = [max(full[t, i] for t in range(i, tasks - 1)) - full[tasks - 1, i] for i in range(tasks - 1)]
        just = [full[i, i] - full[tasks - 1, i] for i in range(tasks - 1)]
        found = summary(matrix)
        assert found["forgetting"] == pytest.approx(np.mean(lost), abs=1e-6)
        assert found["forgetting_just_learned"] == pytest.approx(np.mean(just), abs=1e-6)
        assert found["accuracy"] == pytest.approx(full[-1].mean(), abs=1e-6)
        first, *later = forgetting_by_task(matrix)
        assert first is None
        assert later == [summary(matrix[:count])["forgetting"] for count in range(2, tasks + 1)]
