"""The probes on a stream: features of the exams' images, and an accuracy for every exam that counts by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.errors import UserError
from ptlf.evaluation.knn import KnnClassConfig, KnnTaskConfig, knn_accuracy
from ptlf.settings import as_dict, key, section
from ptlf.stream import Stream
from ptlf.stream.loading import ImageSource


@dataclass
class EvaluationConfig:
    enabled: bool = key(True, "test the encoder after every task")
    batch: int = key(512, "images per forward", least=1)
    gallery: bool = key(True, "keep nearest images and a map of the features, before and after, for the report")
    knn_task: KnnTaskConfig = section(KnnTaskConfig)
    knn_class: KnnClassConfig = section(KnnClassConfig)


class Prober:
    """Tests an encoder on a stream's exams. `prepare` turns stored images into the encoder's input."""

    def __init__(
        self, stream: Stream, config: EvaluationConfig, prepare: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self.stream, self.config, self.prepare, self.device = stream, config, prepare, device
        data = stream.graded
        if data is None or data.test is None:
            raise UserError(f"stream {stream.name} has no labelled test images to evaluate on")
        self.classes = len(data.names)
        self.bank, self.test = ImageSource(data.train, device), ImageSource(data.test, device)
        self._check_k()

    def rows(self, encoder: nn.Module, task: int) -> dict[str, list[float | None]]:
        """A row of each probe's accuracy matrix after task number `task` (from 0)."""
        exams = self.stream.exams
        seen = [exam for exam in exams if exam.since <= task]
        own, joint = self.config.knn_task, self.config.knn_class
        with testing(encoder):
            banks = [self.features(encoder, self.bank, exam.bank) for exam in seen]
            tests = [self.features(encoder, self.test, exam.test) for exam in seen]
        by_task = [
            knn_accuracy(*bank, *test, k=self.k_task(task), temperature=own.temperature, classes=self.classes)
            for bank, test in zip(banks, tests, strict=True)
        ]
        everything = torch.cat([features for features, _ in banks]), torch.cat([labels for _, labels in banks])
        by_class = [
            knn_accuracy(*everything, *test, k=joint.k, temperature=joint.temperature, classes=self.classes)
            for test in tests
        ]
        blank: list[float | None] = [None] * (len(exams) - len(seen))
        return {"knn_task": by_task + blank, "knn_class": by_class + blank}

    def future(self, encoder: nn.Module, task: int) -> list[float | None]:
        """knn_task on the exam whose task comes next, for forward transfer; k as after the last task."""
        accuracies: list[float | None] = []
        for exam in self.stream.exams:
            if exam.since == task + 1:
                with testing(encoder):
                    bank = self.features(encoder, self.bank, exam.bank)
                    test = self.features(encoder, self.test, exam.test)
                k, temperature = self.k_task(len(self.stream.tasks)), self.config.knn_task.temperature
                accuracies.append(knn_accuracy(*bank, *test, k=k, temperature=temperature, classes=self.classes))
        return accuracies

    def k_task(self, task: int) -> int:
        """LUMP's code takes as many neighbours as tasks were seen. One bank of all exams counts as one task."""
        return self.config.knn_task.k or min(200, sum(exam.since <= task for exam in self.stream.exams))

    def features(self, encoder: nn.Module, source: ImageSource, indices) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        """Features (N, D) in float32 and labels (N,) of the images with these indices."""
        chosen = torch.from_numpy(indices)
        parts = [encoder(self.prepare(source.gather(part))).float() for part in chosen.split(self.config.batch)]
        return torch.cat(parts), source.labels[chosen].to(self.device)

    def settings(self) -> dict[str, dict[str, Any]]:
        """What each probe's figures were measured with."""
        own = as_dict(self.config.knn_task)
        own["k"] = own["k"] or "min(200, tasks seen)"
        joint = as_dict(self.config.knn_class)
        return {
            "knn_task": {**own, "similarity": "cosine", "bank": "training images of the exam's own task"},
            "knn_class": {**joint, "similarity": "cosine", "bank": "training images of all classes seen"},
        }

    def _check_k(self) -> None:
        """Before training, not hours into it: every bank must hold k images."""
        smallest = min(len(exam.bank) for exam in self.stream.exams)
        own, joint = self.config.knn_task.k, self.config.knn_class.k
        if own is not None and own > smallest:
            raise UserError(f"evaluation.knn_task.k is {own}, but a task's kNN bank holds {smallest} images")
        first = sum(len(exam.bank) for exam in self.stream.exams if exam.since == 0)
        if joint > first:
            raise UserError(
                f"evaluation.knn_class.k is {joint}, but after the first task the bank holds {first} images"
            )


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
