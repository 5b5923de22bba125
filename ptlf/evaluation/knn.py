"""Weighted k-nearest-neighbour probes on frozen features."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.settings import key
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig, Score, per_cent_equal

CHUNK = 1024  # queries at once; bounds the memory for their similarities to the bank


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
        how = {**self.used(labels, seen_tasks), "temperature": self.config.temperature}
        return lambda queries, truth: per_cent_equal(knn_predict(features, labels, queries, **how), truth)

    def settings(self) -> dict[str, Any]:
        own = {name: value for name, value in super().settings().items() if name != "enabled"}
        return {**own, "k": self.config.k or "min(200, tasks seen)", "similarity": "cosine"}


class KnnClass(KnnTask):
    """Class-incremental: each split against one bank of the training images of all classes seen."""

    Config = KnnClassConfig
    rows: ClassVar[Mapping[str, str]] = {"knn_class": SEEN}
    forward = False


def knn_predict(bank: Tensor, bank_labels: Tensor, queries: Tensor, *, k: int, temperature: float) -> Tensor:
    """Labels (Q,) predicted for queries (Q, D) from the k vectors of the bank (N, D) with the largest cosine."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    classes, predicted = int(bank_labels.max()) + 1, []
    for part in queries.split(CHUNK):
        similarity, nearest = (part @ bank.T).topk(k, dim=1)  # (CHUNK, k)
        votes = torch.zeros(len(part), classes, dtype=similarity.dtype, device=similarity.device)
        weights = ((similarity - similarity[:, :1]) / temperature).exp()  # relative to the nearest: exp overflows
        votes.scatter_add_(1, bank_labels[nearest], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)
