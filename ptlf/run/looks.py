"""What a run looks at between its steps: correlation, cost, accuracy, and whether going on makes sense."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.phases import Advance, Phase
from ptlf.evaluation.prober import testing
from ptlf.evaluation.spread import COLLAPSED, effective_rank, feature_spread, spaced, spread
from ptlf.freezing.correlation import TaskCorrelation
from ptlf.freezing.policy import Ratios
from ptlf.freezing.subspace import NotFinite
from ptlf.run.results import write_json
from ptlf.run.state import State
from ptlf.run.watcher import Watcher
from ptlf.training.cost import Stopwatch
from ptlf.training.trainer import MeasuredStep

SAMPLE = 512  # images of a task whose features are measured after it


@dataclass
class Looking:
    """`with looking():` charges the time to correlation, and tells of it, also of numbers that it cannot be made of."""

    clock: Stopwatch
    watcher: Watcher
    place: str

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.clock("correlation"), self.watcher.phase(self.place):
            try:
                yield
            except NotFinite as error:
                advice = "try a lower --training.lr or --training.precision fp32"
                raise UserError(f"{error}, in the {self.place}; {advice}") from error


class Correlated(Ratios):
    """A task's correlation, the same on all processes. What it finds out besides goes into the task's log entry."""

    def __init__(self, of: TaskCorrelation, looking: Looking, entry: dict[str, Any], *, all_units: bool) -> None:
        super().__init__()
        self.of, self.looking, self.entry, self.all_units = of, looking, entry, all_units

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        with self.looking():
            found = processes.broadcast_object(self.of(names))
        # Those of the task's start stay.
        self.entry["directions"] = self.of.directions | self.entry.get("directions", {})
        if self.of.background_seconds:
            self.entry["background_seconds"] = self.of.background_seconds
        return found

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        if self.all_units:
            return {}
        with self.looking():
            found = processes.broadcast_object(self.of.bounds(names))
        if found:
            self.entry["bounds"] = found | self.entry.get("bounds", {})
        return found

    def start(self, names: Sequence[str]) -> bool:
        """In one process only: a checkpoint, which waits for ratios under way, is not written by all."""
        with self.looking():
            return processes.world_size() == 1 and self.of.start(names)


class Looks(State):
    """None of these changes what is trained. Each is charged to its own purpose on the clock."""

    def correlate(self, indices: np.ndarray) -> Ratios:
        """Computes ratios of units not yet frozen: the past is the memory, the gradient the new task's."""
        memory, freezer, settings = self.method.memory, self.freezing.freezer, self.config.freezing
        assert memory is not None
        self.model.train()
        looking = Looking(self.clock, self.watcher, f"correlation of task {self.task + 1} with those before")
        units = [unit for unit in freezer.units if unit.name not in freezer.frozen]
        with looking(), self.trainer.engine.arithmetic(), self.trainer.sampling():
            correlation = TaskCorrelation(
                self.model.encoder,
                self.prepare(memory.past()),
                None,
                settings.threshold,
                units=units,
                gradient_fn=partial(self.sample_gradients, indices),
                batches=settings.batches,
                keep=[self.model],
                combine=processes.all_reduce_mean_,
            )
        return Correlated(correlation, looking, self.freezing.entry, all_units=settings.ratios == "all")

    def sample_gradients(self, indices: np.ndarray, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """On a batch of the new task. The run may be left before it in a task's first epoch: after a later one what was
        learnt may not be saved, and cannot be any more, since the batches before have been drawn."""
        if self.epoch == 0:
            self.heed()
        return self.trainer.sample_gradients(indices, self.random["correlation"], weights)

    def cost_of_step(self, indices: np.ndarray) -> MeasuredStep:
        """Measured after an epoch of such steps: compilation and algorithm search are then paid for."""
        if self.variant not in self.step_costs:
            with self.clock("measuring"):
                self.step_costs[self.variant] = self.trainer.cost_of_step(indices)
        return self.step_costs[self.variant]

    def evaluate(self) -> dict[str, list[float | None]]:
        """After a task: a row of each probe's accuracy matrix."""
        if not self.prober:
            return {}
        with self.clock("evaluation"):
            phase = self.phases(f"testing after task {self.task + 1} of {len(self.stream.tasks)}")
            rows = self.prober.rows(self.model.encoder, self.task, phase)
            future = self.prober.future(self.model.encoder, self.task, phase)
            self.record.end_task(self.task, rows, future, self.prober.used(self.task))
        return rows

    def phases(self, work: str) -> Phase:
        """The phases of a piece of work: its name stands before theirs. It may be left after each part that is done."""

        @contextmanager
        def phase(part: str, *count: Any) -> Iterator[Advance]:
            with self.watcher.phase(f"{work}, {part}", *count) as tell:

                def advance(amount: int) -> None:
                    tell(amount)
                    self.heed()

                yield advance

        return phase

    def heed(self) -> None:
        """Called in the middle of a look: to leave it, raise."""

    def test_reference(self) -> dict[str, list[float | None]]:
        """What the encoder knew before, against a bank of its own; for the record."""
        if not self.reference:
            return {}
        with self.clock("evaluation"):
            return self.reference.rows(self.model.encoder, 0, self.phases("testing what the encoder knew before"))

    def measure_features(self, number: int) -> list[dict[str, Any]]:
        """Spread and effective rank of the features of a sample of this task's images; labels are not needed. Empty
        where nothing is to be tested."""
        if not self.config.evaluation.enabled:
            return []
        task = self.stream.tasks[number]
        with self.clock("evaluation"), testing(self.model.encoder):
            chosen = torch.from_numpy(spaced(task.train, SAMPLE))
            source = self.trainer.sources(task.images)
            parts = [self.prepare(source.gather(part)) for part in chosen.split(128)]
            features = torch.cat([self.model.encoder(part).float().flatten(1) for part in parts])
        found = {"images": len(features), "spread": spread(features), "effective_rank": effective_rank(features)}
        return [{"task": number + 1, **found}]

    def has_past(self) -> bool:
        """Whether the encoder knows something that the next task could make it forget."""
        remembered = self.method.memory is not None and self.method.memory.old_count > 0
        known = remembered or (self.weights is not None and not self.freezing.policy.needs_ratios)
        return self.task > 0 or known

    def look_before(self, known: int = 0) -> None:
        """The untrained encoder. `known`: tasks on which it was looked at before."""
        if self.prober:
            with self.clock("evaluation"):
                new = [split for split in self.stream.eval_splits if split.since >= max(known, 1)]
                phase = self.phases("testing the encoder before training")
                untrained = self.prober.rows(self.model.encoder, len(self.stream.tasks), phase)
                self.record.begin(untrained, self.prober.ahead(self.model.encoder, new, phase))
        else:  # no accuracy to compare with
            for number in range(known, len(self.stream.tasks)):
                self.record.untrained_features += self.measure_features(number)
        self.look("before")

    def look_ahead(self) -> None:
        """The encoder as it is on the next task, if that was not there when the last one ended."""
        if self.prober and 0 < self.task < len(self.stream.tasks):
            with self.clock("evaluation"):
                phase = self.phases(f"testing on task {self.task + 1} before it is learnt")
                self.record.add_to(self.record.future, self.prober.future(self.model.encoder, self.task - 1, phase))

    def look(self, moment: str) -> None:
        """The gallery of the encoder as it is now."""
        if self.gallery:
            with self.clock("evaluation"):
                self.gallery.look(moment, self.model.encoder, self.phases(f"gallery {moment} training"))

    def save_gallery(self) -> None:
        if self.gallery and self.out:
            with self.clock("evaluation"):
                write_json(self.out / "gallery.json", self.gallery.as_dict())

    def check_numbers(self) -> None:
        """Nothing goes on, and nothing is saved, with losses or weights that are not finite, nor with losses that no
        record may hold."""
        bad = self.epoch_state.first_bad() if self.epoch_state else None
        if bad is None and are_finite([self.model, self.method]):
            return
        step = bad[0] + 1 if bad else self.position.step
        what = f"loss became {bad[1]}" if bad else "weights are no longer finite"
        if self.checkpoints:
            self.checkpoints.finish()
        last = self.checkpoints.last if self.checkpoints else None
        raise UserError(
            f"the {what} in task {self.task + 1}, epoch {self.epoch + 1}, step {step}; "
            f"{f'the last good checkpoint is {last}' if last else 'there is no checkpoint yet'}; "
            "try a lower --training.lr or --training.precision fp32"
        )

    def check_processes(self) -> None:
        if not processes.all_equal(self.model.parameters()):
            raise RuntimeError("the processes' weights differ; a parameter's gradient was not averaged over them")

    def check_spread(self, indices: np.ndarray) -> None:
        """Warn once of a collapse. Checked after 1, 2, 4, 8... epochs of a task and after its last: on a GPU an epoch
        may take less than a second."""
        done = self.epoch + 1
        if self.record.warned or (done & (done - 1) and done < self.config.training.epochs):
            return
        with self.clock("evaluation"):
            chosen = torch.from_numpy(spaced(indices, 128))
            images = self.prepare(self.trainer.source.gather(chosen))
            found = feature_spread(self.model.encoder, images)
        self.record.warned = found < COLLAPSED
        if self.record.warned:
            processes.warn(
                f"ptlf: warning: the representation has collapsed in task {self.task + 1}, epoch {done}: "
                f"normalised features of {len(images)} images differ by {found:.1e} (1 = spread evenly, 0 = all the "
                "same); try a lower --training.lr or another objective"
            )


def are_finite(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters and running statistics are finite and other buffers, such as masks with -inf, have no NaN."""
    trained: list[Tensor] = []
    others: list[Tensor] = []
    for module in modules:
        trained += module.parameters()
        for name, buffer in module.named_buffers():
            (trained if "running_" in name else others).append(buffer)
    return bool(norms(trained).isfinite().all()) and not bool(norms(others).isnan().any())


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """L1 norm of each float tensor, in one call: not finite if a value is not."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return torch.stack([value.float() for value in torch._foreach_norm(floats, 1)]) if floats else torch.zeros(1)
