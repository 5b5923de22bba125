"""Weighted k-nearest-neighbour probes on frozen features."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.errors import UserError
from ptlf.core.settings import key
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig, Score


@dataclass
class KnnTaskConfig(ProbeConfig):
    enabled: bool = key(True, "test the encoder with this probe after every task")
    k: int | None = key(None, "neighbours, capped as in knn_class; null = min(200, tasks seen), as in LUMP", ge=1)
    temperature: float = key(0.1, "a neighbour's vote weighs exp(similarity / temperature)", ge=1e-3)


@dataclass
class KnnClassConfig(KnnTaskConfig):
    k: int = key(200, "neighbours; at most as many as the smallest class has images", ge=1)


class KnnTask(Probe[KnnTaskConfig]):
    """LUMP's protocol: each split against its own task's training images."""

    Config: ClassVar[type[ProbeConfig]] = KnnTaskConfig
    rows: ClassVar[Mapping[str, str]] = {"knn_task": OWN}
    forward = True

    def used(self, labels: Tensor, seen_tasks: int) -> dict[str, Any]:
        """More neighbours than the smallest class has images would be outvoted by other classes whatever they show."""
        smallest = int(labels.unique(return_counts=True)[1].min())
        return {"k": min(self.config.k or min(200, seen_tasks), smallest)}

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int) -> Score:
        k, classes = self.used(labels, seen_tasks)["k"], int(labels.max()) + 1
        return partial(knn_accuracy, features, labels, k=k, temperature=self.config.temperature, classes=classes)

    def settings(self) -> dict[str, Any]:
        own = {name: value for name, value in super().settings().items() if name != "enabled"}
        return {**own, "k": self.config.k or "min(200, tasks seen)", "similarity": "cosine"}


class KnnClass(KnnTask):
    """Class-incremental: each split against one bank of the training images of all classes seen."""

    Config = KnnClassConfig
    rows: ClassVar[Mapping[str, str]] = {"knn_class": SEEN}
    forward = False


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


def knn_accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor, *, k: int, temperature: float, classes: int,
    chunk: int = 1024,
) -> float:  # fmt: skip
    """Per cent of the queries whose predicted label is right."""
    predicted = knn_predict(bank, bank_labels, queries, k=k, temperature=temperature, classes=classes, chunk=chunk)
    return 100 * float((predicted == labels).double().mean())
