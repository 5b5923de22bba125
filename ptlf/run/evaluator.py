"""What a run looks at between its steps: correlation, cost, accuracy, features."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.phases import Advance, Phase
from ptlf.evaluation import Prober
from ptlf.evaluation.metrics import effective_rank, spaced, spread
from ptlf.evaluation.prober import eval_mode
from ptlf.freezing.correlation import TaskCorrelation
from ptlf.freezing.subspace import NotFinite
from ptlf.run.build import Components
from ptlf.run.record import Row
from ptlf.run.results import half_difference
from ptlf.stream import Images
from ptlf.training.checkpoint import Position
from ptlf.training.cost import Stopwatch
from ptlf.training.trainer import MeasuredStep

SAMPLE = 512  # images of a task whose features are measured after it
PAIRED, EARLIER = 1000, 10  # images whose features are taken before and after a task; tasks that they come from
Rows = dict[str, Row]  # accuracies by probe


class Evaluator:
    """Changes nothing that is trained, and charges its time to a purpose of its own.

    phase: entered for each piece of work. stop_if_requested: called after each part of one; may raise to leave it.
    """

    def __init__(
        self, components: Components, clock: Stopwatch, phase: Phase, stop_if_requested: Callable[[], None]
    ) -> None:
        self.components, self.clock = components, clock
        self.phase, self.stop_if_requested = phase, stop_if_requested
        self.encoder, self.stream = components.model.encoder, components.stream
        self.step_costs: dict[str, MeasuredStep] = {}  # by the trainer's variant

    def correlate(
        self, at: Position, indices: np.ndarray
    ) -> tuple[Callable[[Sequence[str]], dict[str, float]], TaskCorrelation]:
        """A function that computes the ratios of units, the same on all processes, and what it has computed. The past
        is the memory, the gradient the new task's."""
        parts = self.components
        memory, freezer, settings = parts.method.memory, parts.freezing.freezer, parts.config.freezing
        assert memory is not None
        parts.model.train()
        measuring = partial(self.correlating, f"correlation of task {at.task + 1} with those before")
        with measuring(), parts.trainer.engine.arithmetic(), parts.trainer.sampling():
            correlation = TaskCorrelation(
                self.encoder,
                parts.prepare(memory.past()),
                None,
                settings.threshold,
                reach=settings.reach,
                units=[unit for unit in freezer.units if unit.name not in freezer.frozen],
                gradient_fn=partial(self.sample_gradients, at, indices),
                batches=settings.batches,
                keep=[parts.model],
                combine=processes.all_reduce_mean_,
            )

        def ratios(names: Sequence[str]) -> dict[str, float]:
            with measuring():
                return processes.broadcast_object(correlation(names))

        return ratios, correlation

    @contextmanager
    def correlating(self, place: str) -> Iterator[None]:
        """Charges the time to correlation, and names it in the error about numbers that are not finite."""
        with self.clock("correlation"), self.phase(place):
            try:
                yield
            except NotFinite as error:
                hint = "try a lower --training.lr or --training.precision fp32"
                raise UserError(f"{error}, in the {place}; {hint}") from error

    def sample_gradients(self, at: Position, indices: np.ndarray, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """On a batch of the new task. The run may be left here in a task's first epoch only: what was learnt in others
        may not be saved, and cannot be, since the batches before have been drawn."""
        if at.epoch == 0:
            self.stop_if_requested()
        return self.components.trainer.sample_gradients(indices, self.components.random["correlation"], weights)

    def step_cost(self, variant: str, indices: np.ndarray) -> MeasuredStep:
        """Measured after an epoch of such steps: compilation and algorithm search are then paid for."""
        if variant not in self.step_costs:
            with self.clock("measuring"):
                self.step_costs[variant] = self.components.trainer.cost_of_step(indices)
        return self.step_costs[variant]

    def test_task(self, task: int) -> tuple[Rows, Rows, dict[str, dict[str, Any]]]:
        """After task number `task` (from 0): rows, accuracies on the next task, settings that depend on banks."""
        if not (prober := self.components.prober):
            return {}, {}, {}
        work = f"testing after task {task + 1} of {len(self.stream.tasks)}"
        return *self.test(prober, work, task, [task + 1]), prober.used(task)

    def test_next(self, task: int) -> Rows:
        """Accuracies on task number `task`, before that is learnt."""
        return self.test(self.components.prober, f"testing on task {task + 1} before it is learnt", None, [task])[1]

    def test_untrained(self, known: int = 0) -> tuple[Rows, Rows]:
        """Rows of the untrained encoder on all splits, and its accuracies on tasks but the first `known`."""
        count = len(self.stream.tasks)
        ahead = range(max(known, 1), count)
        return self.test(self.components.prober, "testing the encoder before training", count, ahead)

    def test_reference(self) -> Rows:
        """What the encoder knew before, against a bank of its own."""
        return self.test(self.components.reference, "testing what the encoder knew before", 0)[0]

    def test(
        self, prober: Prober | None, work: str, task: int | None, ahead: Collection[int] = ()
    ) -> tuple[Rows, Rows]:
        """Rows after task number `task`, and accuracies on the tasks `ahead`."""
        if prober is None:
            return {}, {}
        with self.testing(work) as phase:
            rows = {} if task is None else prober.rows(self.encoder, task, phase)
            return rows, prober.ahead(self.encoder, ahead, phase)

    def recheck_reference(self, record: Mapping[str, Sequence[float]]) -> list[tuple[str, float, float, int]]:
        """Probes by which the encoder is worse than before the first task by more than chance (95 %), with accuracies
        then and now and the number of test images. In the middle of a task, so the run cannot be left here."""
        if not (prober := self.components.reference):
            return []
        with self.clock("evaluation"), self.phase("testing what the encoder knew before"):
            rows = prober.rows(self.encoder, 0)
        images = sum(len(split.test) for split in prober.stream.eval_splits)
        worse = []
        for probe, (now, *_) in rows.items():
            before = record[probe][0]
            if now is not None and before - now > half_difference(before, now, images):
                worse.append((probe, before, now, images))
        return worse

    def measure_features(self, task: int) -> list[dict[str, Any]]:
        """Spread and effective rank of the features of a sample of this task's images, where there are tests."""
        if not self.components.config.evaluation.enabled:
            return []
        features = self.features(self.stream.tasks[task].images, self.stream.tasks[task].train, SAMPLE)
        measured = {"spread": spread(features), "effective_rank": effective_rank(features)}
        return [{"task": task + 1, "images": len(features), **measured}]

    def features(self, images: Images, indices: np.ndarray, most: int) -> Tensor:
        with self.clock("evaluation"), eval_mode(self.encoder):
            source, chosen = self.components.trainer.sources(images), torch.from_numpy(spaced(indices, most))
            batches = [self.components.prepare(source.gather(part)) for part in chosen.split(128)]
            return torch.cat([self.encoder(batch).float().flatten(1) for batch in batches])

    def paired_features(self, task: int) -> Tensor:
        """Of the same images at a task's begin and end, (N, dim): half of them the memory's of before the task or, if
        it has none, those of earlier tasks that are still there; the others the task's own."""
        memory, numbers, parts = self.components.method.memory, spaced(np.arange(task), EARLIER), list[Tensor]()
        if memory is not None and memory.old_count:
            images = memory.past().cpu().numpy()
            parts.append(self.features(Images(images, np.zeros(0)), np.arange(len(images)), PAIRED // 2))
        else:
            for earlier in (self.stream.tasks[number] for number in numbers):
                with suppress(UserError):  # its images are gone
                    parts.append(self.features(earlier.images, earlier.train, PAIRED // 2 // len(numbers)))
        own = self.stream.tasks[task]
        return torch.cat([*parts, self.features(own.images, own.train, PAIRED - sum(map(len, parts)))])

    def measure_untrained(self, known: int = 0) -> list[dict[str, Any]]:
        """Features of the untrained encoder on all tasks but the first `known`, where no accuracy says more."""
        numbers = () if self.components.prober else range(known, len(self.stream.tasks))
        return [entry for number in numbers for entry in self.measure_features(number)]

    def spread(self, indices: np.ndarray) -> tuple[float, int]:
        """Of the features of some images of the task that is trained, and how many they are."""
        features = self.features(self.components.trainer.images, indices, 128)
        return spread(features), len(features)

    def look(self, moment: str) -> None:
        """The gallery of the encoder as it is now: "before" or "after" training."""
        if self.components.gallery:
            with self.testing(f"gallery {moment} training") as phase:
                self.components.gallery.look(moment, self.encoder, phase)

    @contextmanager
    def testing(self, work: str) -> Iterator[Phase]:
        """Phases of a piece of work, whose name stands before theirs. It may be left after each part that is done."""

        @contextmanager
        def phase(part: str, *count: Any) -> Iterator[Advance]:
            with self.phase(f"{work}, {part}", *count) as report:

                def advance(amount: int) -> None:
                    report(amount)
                    self.stop_if_requested()

                yield advance

        with self.clock("evaluation"):
            yield phase
