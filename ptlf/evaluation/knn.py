"""Weighted k-nearest-neighbour probes on frozen features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.errors import UserError
from ptlf.core.settings import key


@dataclass
class KnnTaskConfig:
    """LUMP's protocol: each split against its own task's training images."""

    k: int | None = key(None, "neighbours; null = min(200, tasks seen so far), as LUMP's code has it", least=1)
    temperature: float = key(0.1, "a neighbour's vote weighs exp(similarity / temperature)", above=0)


@dataclass
class KnnClassConfig:
    """Class-incremental: each split against one bank of the training images of all classes seen."""

    k: int = key(200, "neighbours", least=1)
    temperature: float = key(0.1, "a neighbour's vote weighs exp(similarity / temperature)", above=0)


def knn_predict(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, *, k: int, temperature: float, classes: int, chunk: int = 1024
) -> Tensor:
    """Labels (Q,) predicted for queries (Q, D) from the k most similar vectors of the bank (N, D).

    Similarity is the cosine; memory is bounded by `chunk` x N similarities.
    """
    if k > len(bank):
        raise UserError(f"k is {k}, but the kNN bank holds {len(bank)} images; choose a k of at most {len(bank)}")
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    predicted = []
    for part in queries.split(chunk):
        similarity, nearest = (part @ bank.T).topk(k, dim=1)  # (chunk, k)
        votes = torch.zeros(len(part), classes, dtype=similarity.dtype, device=similarity.device)
        weights = ((similarity - similarity[:, :1]) / temperature).exp()  # relative to the nearest: exp overflows
        votes.scatter_add_(1, bank_labels[nearest], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def knn_accuracy(bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor, **settings) -> float:  # type: ignore[no-untyped-def]
    """Per cent of the queries whose predicted label is right."""
    return 100 * float((knn_predict(bank, bank_labels, queries, **settings) == labels).double().mean())
