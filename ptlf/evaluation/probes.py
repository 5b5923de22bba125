"""Probes: fitted on features of training images, they score features of test images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ptlf.core.settings import as_dict, key

CHUNK = 1024  # queries at once; bounds the memory for their similarities to the bank
Score = Callable[[Tensor, Tensor], float]  # features (N, D) and labels (N,) -> accuracy in per cent
Augmented = Callable[[int], Tensor]  # number of an epoch -> features (N, D) of new random crops of a bank's images

# The banks: the training images that a split is tested against.
OWN, SEEN = "training images of the split's own task", "training images of all classes seen"


@dataclass
class ProbeConfig:
    enabled: bool = key(False, "test the encoder with this probe after every task")


C = TypeVar("C", bound=ProbeConfig)


class Probe(Generic[C]):
    """Every row of `rows` becomes an accuracy matrix of the record."""

    Config: ClassVar[type[ProbeConfig]] = ProbeConfig
    rows: ClassVar[Mapping[str, str]]  # name of the row -> OWN or SEEN
    forward: ClassVar[bool] = False  # its OWN rows are also taken on the next task, for forward transfer

    def __init__(self, config: C) -> None:
        self.config = config

    def variants(self) -> Sequence["Probe[Any]"]:
        """Further probes that are recorded whenever this one is enabled."""
        return ()

    def used(self, labels: Tensor, seen_tasks: int) -> dict[str, Any]:
        """Settings that depend on the bank, as `fit` uses them with these labels (N,); for the record."""
        return {}

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int) -> Score:
        """From a bank's features (N, D) and labels (N,). The same bank must give the same score every time."""
        raise NotImplementedError

    def fit_augmented(self, features: Tensor, labels: Tensor, seen_tasks: int, augmented: Augmented) -> Score:
        """`fit` on the bank of all classes seen. Each call of `augmented` encodes all its images."""
        return self.fit(features, labels, seen_tasks)

    def settings(self) -> dict[str, Any]:
        """What the accuracies were measured with, for the record."""
        return as_dict(self.config)


def per_cent_equal(predicted: Tensor, labels: Tensor) -> float:
    return 100 * float((predicted == labels).double().mean())


@dataclass
class KnnTaskConfig(ProbeConfig):
    enabled: bool = key(True, "test the encoder with this probe after every task")
    k: int | None = key(None, "neighbours, capped as in knn_class; null = both min(200, tasks seen) and 200", ge=1)
    temperature: float = key(0.1, "a neighbour's vote weighs exp(similarity / temperature)", ge=1e-3)


@dataclass
class KnnClassConfig(KnnTaskConfig):
    k: int = key(200, "neighbours; at most as many as the smallest class has images", ge=1)


class KnnTask(Probe[KnnTaskConfig]):
    """LUMP's protocol: each split against its own task's training images.

    The code published with LUMP's paper has k = 200; since October 2022 it has k = tasks seen. Both are recorded."""

    Config: ClassVar[type[ProbeConfig]] = KnnTaskConfig
    rows: ClassVar[Mapping[str, str]] = {"knn_task": OWN}
    forward = True

    def variants(self) -> Sequence[Probe[Any]]:
        return () if self.config.k else (KnnTask200(replace(self.config, k=200)),)

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


class KnnTask200(KnnTask):
    rows: ClassVar[Mapping[str, str]] = {"knn_task_k200": OWN}
    forward = False


class KnnClass(KnnTask):
    """Class-incremental: each split against one bank of the training images of all classes seen."""

    Config = KnnClassConfig
    rows: ClassVar[Mapping[str, str]] = {"knn_class": SEEN}
    forward = False


def knn_predict(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, *, k: int, temperature: float, groups: Tensor | None = None
) -> Tensor:
    """Labels (Q,) predicted for queries (Q, D) from the k vectors of the bank (N, D) with the largest cosine.
    groups (N,): the queries are the bank, and each is predicted from the vectors of other groups."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    classes, predicted = int(bank_labels.max()) + 1, []
    for start, part in zip(range(0, len(queries), CHUNK), queries.split(CHUNK), strict=True):
        similarity = part @ bank.T
        if groups is not None:
            similarity[groups[start : start + CHUNK, None] == groups] = -torch.inf
        similarity, nearest = similarity.topk(k, dim=1)  # (CHUNK, k)
        votes = torch.zeros(len(part), classes, dtype=similarity.dtype, device=similarity.device)
        weights = ((similarity - similarity[:, :1]) / temperature).exp()  # relative to the nearest: exp overflows
        votes.scatter_add_(1, bank_labels[nearest], weights)
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


@dataclass
class LinearConfig(ProbeConfig):
    """CaSSLe's protocol: SGD with momentum 0.9, the rate divided by 10 at 60 % and 80 % of the epochs. There the rate
    depends on the objective, images are augmented, and features stay as they are, which takes many steps: those of a
    random encoder are small, and would be underrated."""

    epochs: int = key(100, "passes over the training images", ge=1, le=10_000)
    batch: int = key(256, "features per step", ge=1)
    lr: float = key(0.1, "learning rate; recipes of CaSSLe's protocol have one for each objective", gt=0)
    momentum: float = key(0.9, "momentum", ge=0, le=0.9999)
    weight_decay: float = key(0.0, "weight decay", ge=0)
    standardise: bool = key(True, "scale features by mean and deviation of the bank; off in CaSSLe's protocol")
    augment: bool = key(False, "fit the row `linear` on crops and flips that are encoded anew in every epoch (CaSSLe)")


class Linear(Probe[LinearConfig]):
    """Softmax regression by SGD, within tasks and among all classes."""

    Config = LinearConfig
    rows: ClassVar[Mapping[str, str]] = {"linear_task": OWN, "linear": SEEN}

    def fit_augmented(self, features: Tensor, labels: Tensor, seen_tasks: int, augmented: Augmented) -> Score:
        return self.fit(features, labels, seen_tasks, augmented if self.config.augment else None)

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int, augmented: Augmented | None = None) -> Score:
        weight, bias, classes = linear_fit(features, labels, self.config, augmented)
        return lambda inputs, truth: per_cent_equal(classes[F.linear(inputs, weight, bias).argmax(1)], truth)


def linear_fit(
    features: Tensor, labels: Tensor, config: LinearConfig, augmented: Augmented | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax regression over the labels (N,) that occur, on features (N, D) or those of an epoch, from zero weights.

    Returns the weight (C, D), the bias (C,) and the label (C,) that each output stands for.
    """
    generator = torch.Generator().manual_seed(0)  # so that the accuracy is a function of the features alone
    classes, targets = labels.unique(return_inverse=True)
    mean, deviation = features.double().mean(0), features.double().std(0, correction=0).clamp_min(1e-6)

    def scaled(features: Tensor) -> Tensor:
        return ((features - mean) / deviation).to(features.dtype) if config.standardise else features

    inputs = scaled(features)
    weight = torch.zeros(len(classes), features.shape[1], device=features.device, requires_grad=True)
    bias = torch.zeros(len(classes), device=features.device, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], config.lr, config.momentum, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(p * config.epochs) for p in (0.6, 0.8)])
    with torch.enable_grad():
        for epoch in range(config.epochs):
            inputs = inputs if augmented is None else scaled(augmented(epoch))
            order = torch.randperm(len(features), generator=generator).to(features.device)
            for part in order.split(config.batch):
                loss = F.cross_entropy(F.linear(inputs[part], weight, bias), targets[part])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
            schedule.step()
    weight, bias = weight.detach(), bias.detach()
    if config.standardise:  # for features as they were before
        unscaled = weight.double() / deviation
        weight, bias = unscaled.float(), (bias - unscaled @ mean).float()
    return weight, bias, classes
