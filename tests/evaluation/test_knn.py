import math

import numpy as np
import pytest
import torch

from ptlf.evaluation import probes
from ptlf.evaluation.probes import KnnTask, KnnTaskConfig, knn_predict


def naive(bank, labels, queries, k, temperature, classes):
    """One query at a time, in Python floats."""
    found = []
    for query in queries:
        similar = []
        for vector, label in zip(bank, labels, strict=True):
            cosine = float(np.dot(query, vector) / (np.linalg.norm(query) * np.linalg.norm(vector)))
            similar.append((cosine, int(label)))
        votes = [0.0] * classes
        for cosine, label in sorted(similar, reverse=True)[:k]:
            votes[label] += math.exp(cosine / temperature)
        found.append(votes)
    return np.array(found)


@pytest.mark.parametrize(("k", "temperature", "chunk"), [(1, 0.1, 7), (5, 0.1, 1000), (20, 0.5, 3), (60, 0.07, 8)])
def test_agrees_with_a_naive_loop(k: int, temperature: float, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(probes, "CHUNK", chunk)
    rng = np.random.default_rng(k)
    bank, queries = rng.normal(size=(180, 9)), rng.normal(size=(31, 9))
    labels, truth = rng.permutation(np.arange(180) % 3), rng.integers(0, 4, 31)
    votes = naive(bank, labels, queries, k, temperature, 4)
    tensors = [torch.from_numpy(array) for array in (bank, labels, queries, truth)]
    assert knn_predict(*tensors[:3], k=k, temperature=temperature).tolist() == votes.argmax(1).tolist()
    score = KnnTask(KnnTaskConfig(k=k, temperature=temperature)).fit(*tensors[:2], 1)
    assert score(*tensors[2:]) == pytest.approx(100 * float((votes.argmax(1) == truth).mean()), abs=1e-6)


def test_a_small_temperature_is_that_of_the_nearest_and_does_not_overflow() -> None:
    torch.manual_seed(0)
    centres = torch.randn(3, 16)
    labels = torch.arange(3).repeat(40)
    bank, queries = (centres[labels] + 0.7 * torch.randn(120, 16) for _ in range(2))
    small, exact = (
        knn_predict(bank.to(kind), labels, queries.to(kind), k=30, temperature=0.005)
        for kind in (torch.float32, torch.float64)
    )
    assert small.tolist() == exact.tolist()
