from __future__ import annotations

import numpy as np
import pytest

from ptlf.evaluation import accuracy_matrix as e

HAND = [[90, None, None], [85, 80, None], [88, 70, 95]]


def test_hand_computed() -> None:
    assert e.accuracy(HAND) == pytest.approx((88 + 70 + 95) / 3)
    assert e.forgetting(HAND) == pytest.approx(((90 - 88) + (80 - 70)) / 2)
    assert e.forgetting_just_learned(HAND) == pytest.approx(((90 - 88) + (80 - 70)) / 2)
    assert e.backward_transfer(HAND) == pytest.approx(-6)
    rising = [[50, None, None], [60, 70, None], [55, 75, 80]]  # the best of split 1 came after its own task
    assert e.forgetting(rising) == pytest.approx(((60 - 55) + (70 - 75)) / 2)
    assert e.forgetting_just_learned(rising) == pytest.approx(((50 - 55) + (70 - 75)) / 2)


def test_forward_transfer_compares_with_the_untrained_encoder() -> None:
    assert e.forward_transfer([60, 70], [50, 65]) == pytest.approx(7.5)
    assert e.forward_transfer([], []) is None


def test_one_split_and_one_row() -> None:
    assert e.forgetting([[50], [60], [58]]) == pytest.approx(2)
    assert e.accuracy([[50], [60], [58]]) == 58
    assert e.accuracy([[50, 70]]) == 60
    assert e.forgetting([[50, 70]]) is None


def test_against_an_independent_implementation() -> None:
    rng = np.random.default_rng(0)
    for tasks in (2, 3, 7):
        full = rng.uniform(0, 100, (tasks, tasks))
        matrix = [[float(full[t, i]) if i <= t else None for i in range(tasks)] for t in range(tasks)]
        lost = [max(full[t, i] for t in range(i, tasks - 1)) - full[tasks - 1, i] for i in range(tasks - 1)]
        just = [full[i, i] - full[tasks - 1, i] for i in range(tasks - 1)]
        assert e.forgetting(matrix) == pytest.approx(np.mean(lost), abs=1e-6)
        assert e.forgetting_just_learned(matrix) == pytest.approx(np.mean(just), abs=1e-6)
        assert e.accuracy(matrix) == pytest.approx(full[-1].mean(), abs=1e-6)
        first, *later = e.forgetting_by_task(matrix)
        assert first is None
        assert later == pytest.approx([e.forgetting(matrix[:count]) for count in range(2, tasks + 1)], abs=1e-6)
