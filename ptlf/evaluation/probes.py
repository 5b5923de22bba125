"""The probes on a stream: features of the splits' images, and an accuracy for every split that counts by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.settings import as_dict, key, section
from ptlf.evaluation.knn import KnnClassConfig, KnnTaskConfig, knn_accuracy
from ptlf.evaluation.linear import LinearConfig, RidgeConfig, linear_fit, ridge_fit
from ptlf.stream import Stream
from ptlf.stream.loading import ImageSource


@dataclass
class EvaluationConfig:
    enabled: bool = key(True, "test the encoder after every task")
    batch: int = key(512, "images per forward", least=1)
    gallery: bool = key(True, "keep nearest images and a map of the features, before and after, for the report")
    knn_task: KnnTaskConfig = section(KnnTaskConfig)
    knn_class: KnnClassConfig = section(KnnClassConfig)
    linear: LinearConfig = section(LinearConfig)
    ridge: RidgeConfig = section(RidgeConfig)


Labelled = tuple[Tensor, Tensor]  # features (N, D) and labels (N,)
OWN, ALL = "training images of the split's own task", "training images of all classes seen"


@dataclass(frozen=True)
class Probe:
    """Accuracies of eval_splits against one bank, after task number `task`: test(bank, eval_splits, task)."""

    family: str
    bank: str  # OWN or ALL
    test: Callable[[Labelled, list[Labelled], int], list[float]]
    settings: dict[str, Any]


class Prober:
    """Tests an encoder on a stream's eval_splits. `prepare` turns stored images into the encoder's input.

    An encoder whose vector has a part for each task says where: `encoder.feature_slice(task)`. A split against its
    own task's images is tested with its own part, one against all classes with the whole vector.
    """

    def __init__(
        self,
        stream: Stream,
        config: EvaluationConfig,
        prepare: Callable[[Tensor], Tensor],
        device: torch.device,
        source: ImageSource | None = None,
    ) -> None:
        """`source` already holds the stream's training images, which mostly are those of the splits' banks too."""
        self.stream, self.config, self.prepare, self.device = stream, config, prepare, device
        data = stream.eval_data
        if data is None or data.test is None:
            raise UserError(f"stream {stream.name} has no labelled test images to evaluate on")
        self.classes = len(data.names)
        self.bank = source if source and data is stream.data else ImageSource(data.train, device)
        self.test = ImageSource(data.test, device)
        enabled = {"knn": True, "linear": config.linear.enabled, "ridge": config.ridge.enabled}
        self.chosen = [family for family, wanted in enabled.items() if wanted]
        self._check_k()

    def choose(self, family: str) -> None:
        """Only this kind of probe, enabled or not: knn, linear or ridge."""
        self.chosen = [family]

    @property
    def probes(self) -> dict[str, Probe]:
        return {name: probe for name, probe in self.all_probes().items() if probe.family in self.chosen}

    def all_probes(self) -> dict[str, Probe]:
        config = self.config
        own, joint = as_dict(config.knn_task), as_dict(config.knn_class)
        own["k"] = own["k"] or "min(200, tasks seen)"
        cosine = {"similarity": "cosine"}
        linear, ridge = as_dict(config.linear), as_dict(config.ridge)
        return {
            "knn_task": Probe("knn", OWN, self.knn_task, {**own, **cosine}),
            "knn_class": Probe("knn", ALL, self.knn_class, {**joint, **cosine}),
            "linear_task": Probe("linear", OWN, self.linear, linear),
            "linear": Probe("linear", ALL, self.linear, linear),
            "ridge_task": Probe("ridge", OWN, self.ridge, ridge),
            "ridge": Probe("ridge", ALL, self.ridge, ridge),
        }

    def rows(self, encoder: nn.Module, task: int) -> dict[str, list[float | None]]:
        """A row of each probe's accuracy matrix after task number `task` (from 0)."""
        eval_splits = self.stream.eval_splits
        seen = [split for split in eval_splits if split.since <= task]
        with testing(encoder):
            banks = [self.features(encoder, self.bank, split.bank) for split in seen]
            tests = [self.features(encoder, self.test, split.test) for split in seen]
        everything = torch.cat([features for features, _ in banks]), torch.cat([labels for _, labels in banks])
        blank: list[float | None] = [None] * (len(eval_splits) - len(seen))
        rows: dict[str, list[float | None]] = {}
        for name, probe in self.probes.items():
            if probe.bank == OWN:
                parts = zip(seen, banks, tests, strict=True)
                pairs = [
                    (own_part(encoder, split.since, bank), own_part(encoder, split.since, test))
                    for split, bank, test in parts
                ]
                row = [probe.test(bank, [test], task)[0] for bank, test in pairs]
            else:
                row = probe.test(everything, tests, task)
            rows[name] = [*row, *blank]
        return rows

    def knn_task(self, bank: Labelled, eval_splits: list[Labelled], task: int) -> list[float]:
        k, temperature = self.k_task(task), self.config.knn_task.temperature
        return [
            knn_accuracy(*bank, *split, k=k, temperature=temperature, classes=self.classes) for split in eval_splits
        ]

    def knn_class(self, bank: Labelled, eval_splits: list[Labelled], task: int) -> list[float]:
        k, temperature = self.config.knn_class.k, self.config.knn_class.temperature
        return [
            knn_accuracy(*bank, *split, k=k, temperature=temperature, classes=self.classes) for split in eval_splits
        ]

    def linear(self, bank: Labelled, eval_splits: list[Labelled], task: int) -> list[float]:
        # The same order of images at every call: the accuracy is a function of the features alone.
        classifier = linear_fit(*bank, self.config.linear, torch.Generator().manual_seed(0))
        return [classifier.accuracy(*split) for split in eval_splits]

    def ridge(self, bank: Labelled, eval_splits: list[Labelled], task: int) -> list[float]:
        classifier = ridge_fit(*bank, self.config.ridge)
        return [classifier.accuracy(*split) for split in eval_splits]

    def future(self, encoder: nn.Module, task: int) -> list[float | None]:
        """knn_task on the split whose task comes next, for forward transfer; k as after the last task."""
        accuracies: list[float | None] = []
        for split in self.stream.eval_splits:
            if split.since == task + 1:
                with testing(encoder):
                    sources = (self.bank, split.bank), (self.test, split.test)
                    bank, test = (own_part(encoder, split.since, self.features(encoder, *source)) for source in sources)
                accuracies += self.knn_task(bank, [test], len(self.stream.tasks))
        return accuracies

    def k_task(self, task: int) -> int:
        """LUMP's code takes as many neighbours as tasks were seen. One bank of all eval_splits counts as one task."""
        return self.config.knn_task.k or min(200, sum(split.since <= task for split in self.stream.eval_splits))

    def features(self, encoder: nn.Module, source: ImageSource, indices) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        """Features (N, D) in float32 and labels (N,) of the images with these indices."""
        chosen = torch.from_numpy(indices)
        # Every process looks at its share; the last image fills up what cannot be shared equally.
        filled = torch.cat((chosen, chosen[-1:].expand(-len(chosen) % processes.world_size())))
        mine = filled[processes.shard(len(filled))]
        with source.batches(mine.split(self.config.batch)) as batches:
            parts = [encoder(self.prepare(images)).float() for images in batches]
        return processes.all_gather_rows(torch.cat(parts))[: len(chosen)], source.labels[chosen].to(self.device)

    def settings(self) -> dict[str, dict[str, Any]]:
        """What each probe's figures were measured with."""
        return {name: {**probe.settings, "bank": probe.bank} for name, probe in self.probes.items()}

    def _check_k(self) -> None:
        """Before training, not hours into it: every bank must hold k images."""
        smallest = min(len(split.bank) for split in self.stream.eval_splits)
        own, joint = self.config.knn_task.k, self.config.knn_class.k
        if own is not None and own > smallest:
            raise UserError(f"evaluation.knn_task.k is {own}, but a task's kNN bank holds {smallest} images")
        first = sum(len(split.bank) for split in self.stream.eval_splits if split.since == 0)
        if joint > first:
            raise UserError(
                f"evaluation.knn_class.k is {joint}, but after the first task the bank holds {first} images; "
                f"choose --evaluation.knn_class.k {min(20, first)} or another of at most {first}"
            )


def own_part(encoder: nn.Module, task: int, labelled: Labelled) -> Labelled:
    part = getattr(encoder, "feature_slice", None)
    features, labels = labelled
    return (features[:, part(task)] if callable(part) else features), labels


@contextmanager
def testing(encoder: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the mode it was in again afterwards."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        encoder.train(was_training)
