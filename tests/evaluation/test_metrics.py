"""Metrics against values known by construction and an independent computation."""

import numpy as np
import pytest
import torch

from ptlf.evaluation.metrics import effective_rank, forgetting_by_task, forward_transfer, spaced, spread, summary


def test_by_hand_and_against_an_independent_implementation() -> None:
    for matrix, accuracy, forgetting, just_learned, all_checkpoints in (
        ([[90, None, None], [85, 80, None], [88, 70, 95]], (88 + 70 + 95) / 3, 6, 6, 4),
        ([[50, None, None], [60, 70, None], [55, 75, 80]], 70, 0, -5, 5 / 3),  # the best of split 1: after task 2
        ([[50], [60], [58]], 58, 2, -8, 2),
        ([[50, 70]], 60, None, None, None),
    ):
        found = summary(matrix)
        names = ("accuracy", "forgetting", "forgetting_just_learned", "forgetting_all_checkpoints")
        expected = [accuracy, forgetting, just_learned, all_checkpoints]
        assert [found[name] for name in names] == pytest.approx(expected), matrix
        assert found["backward_transfer"] == (None if just_learned is None else -just_learned), matrix
    assert forward_transfer([60, 70], [50, 65]) == pytest.approx(7.5)
    assert forward_transfer([], []) is None
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


def test_effective_rank_and_spread() -> None:
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    assert effective_rank(3 * torch.eye(7)[:4]) == pytest.approx(4)
    assert effective_rank(torch.ones(9, 5)) == pytest.approx(1)
    # Singular values 3 and 1: shares 3/4 and 1/4.
    expected = np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0, 0.0]))) == pytest.approx(expected)
    assert effective_rank(torch.zeros(4, 3)) == pytest.approx(1)
    features = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) @ torch.randn(12, 30)
    values = np.sqrt(np.clip(np.linalg.eigvalsh((features.double() @ features.double().T).numpy()), 0, None))
    shares = values[values > 1e-6] / values.sum()
    assert effective_rank(features) == pytest.approx(float(np.exp(-(shares * np.log(shares)).sum())), rel=1e-4)
    assert spread(torch.ones(5, 3) * torch.arange(1, 6)[:, None]) == pytest.approx(0, abs=1e-6)
    directions = torch.randn(20000, 8, generator=torch.Generator().manual_seed(1))
    assert spread(directions) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1023, 60_000])
def test_a_sample_is_spaced_over_all_images(count: int) -> None:
    """Of ten classes of about the same size, one after the other, it has about as many images each."""
    indices = np.arange(count) * 3
    chosen = spaced(indices, 512)
    assert len(chosen) == len(set(chosen)) == min(512, count) and set(chosen) <= set(indices)
    if count >= 512:
        classes = np.bincount(chosen // 3 * 10 // count, minlength=10)
        assert classes.max() - classes.min() <= 2
