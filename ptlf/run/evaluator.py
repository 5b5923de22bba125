"""What a run looks at between its steps: correlation, cost, accuracy, features."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.phases import Advance, Phase, silent
from ptlf.evaluation.metrics import effective_rank, spaced, spread
from ptlf.evaluation.prober import eval_mode
from ptlf.freezing.correlation import TaskCorrelation
from ptlf.freezing.subspace import NotFinite
from ptlf.run.build import Components
from ptlf.run.record import Row
from ptlf.stream import Images
from ptlf.training.checkpoint import Position
from ptlf.training.cost import Stopwatch
from ptlf.training.trainer import MeasuredStep

SAMPLE = 512  # images of a task whose features are measured after it
Rows = dict[str, Row]  # accuracies by probe


class Evaluator:
    """None of its methods changes what is trained. Each is charged to its own purpose on the clock.

    phase: entered for each piece of work. stop_if_requested: called after each part of one; may raise to leave it.
    """

    def __init__(
        self,
        components: Components,
        clock: Stopwatch,
        phase: Phase = silent,
        stop_if_requested: Callable[[], None] = lambda: None,
    ) -> None:
        self.components, self.clock = components, clock
        self.phase, self.stop_if_requested = phase, stop_if_requested
        self.encoder, self.stream = components.model.encoder, components.stream
        self.step_costs: dict[str, MeasuredStep] = {}  # by the trainer's variant

    def correlate(
        self, at: Position, indices: np.ndarray
    ) -> tuple[Callable[[Sequence[str]], dict[str, float]], TaskCorrelation]:
        """A function that computes the ratios of units not yet frozen, by name, the same on all processes; and what it
        has computed. The past is the memory, the gradient the new task's."""
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
        """On a batch of the new task. The run may be left before it in a task's first epoch: after a later one what was
        learnt may not be saved, and cannot be any more, since the batches before have been drawn."""
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
        """The encoder after task number `task` (from 0): a row of each probe's accuracy matrix, accuracies on tasks yet
        to come, and the settings of each row that depend on the images seen by now."""
        if not (prober := self.components.prober):
            return {}, {}, {}
        with self.testing(f"testing after task {task + 1} of {len(self.stream.tasks)}") as phase:
            rows = prober.rows(self.encoder, task, phase)
            return rows, prober.ahead(self.encoder, [task + 1], phase), prober.used(task)

    def test_next(self, task: int) -> Rows:
        """The encoder as it is on task number `task`, before that is learnt."""
        if not (prober := self.components.prober):
            return {}
        with self.testing(f"testing on task {task + 1} before it is learnt") as phase:
            return prober.ahead(self.encoder, [task], phase)

    def test_untrained(self, known: int = 0) -> tuple[Rows, Rows]:
        """Rows of the untrained encoder on all splits, and its accuracies on tasks yet to come. known: tasks that it
        was tested on before."""
        if not (prober := self.components.prober):
            return {}, {}
        with self.testing("testing the encoder before training") as phase:
            untrained = prober.rows(self.encoder, len(self.stream.tasks), phase)
            return untrained, prober.ahead(self.encoder, range(max(known, 1), len(self.stream.tasks)), phase)

    def test_reference(self) -> Rows:
        """What the encoder knew before, against a bank of its own."""
        if not self.components.reference:
            return {}
        with self.testing("testing what the encoder knew before") as phase:
            return self.components.reference.rows(self.encoder, 0, phase)

    def measure_features(self, task: int) -> list[dict[str, Any]]:
        """Spread and effective rank of the features of a sample of this task's images; labels are not needed. Empty
        where nothing is to be tested."""
        if not self.components.config.evaluation.enabled:
            return []
        features = self.features(self.stream.tasks[task].images, self.stream.tasks[task].train, SAMPLE)
        measured = {"spread": spread(features), "effective_rank": effective_rank(features)}
        return [{"task": task + 1, "images": len(features), **measured}]

    def features(self, images: Images, indices: np.ndarray, most: int) -> Tensor:
        """Of a sample of these images."""
        with self.clock("evaluation"), eval_mode(self.encoder):
            source, chosen = self.components.trainer.sources(images), torch.from_numpy(spaced(indices, most))
            batches = [self.components.prepare(source.gather(part)) for part in chosen.split(128)]
            return torch.cat([self.encoder(batch).float().flatten(1) for batch in batches])

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
