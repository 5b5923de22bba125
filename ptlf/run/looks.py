"""What a run looks at between its steps: correlation, cost, accuracy, and whether going on makes sense."""

from collections.abc import Sequence

import numpy as np
import torch

from ptlf.core import processes
from ptlf.freezing.correlation import TaskCorrelation
from ptlf.freezing.policy import Ratios
from ptlf.run.results import write_json
from ptlf.run.sanity import check_numbers, warn_of_collapse
from ptlf.run.state import State
from ptlf.training.trainer import StepCost


class Looks(State):
    """None of these changes what is trained. Each is charged to its own purpose on the clock."""

    def correlate(self, indices: np.ndarray) -> Ratios:
        """Computes ratios of units not yet frozen: the past is the memory, the gradient the new task's."""
        memory, freezer, settings = self.method.memory, self.freezing.freezer, self.config.freezing
        assert memory is not None
        self.model.train()
        with self.clock("correlation"), self.trainer.engine.arithmetic():
            correlation = TaskCorrelation(
                self.model.encoder,
                self.prepare(memory.past()),
                lambda: self.trainer.sample_loss(indices, self.random["correlation"]),
                settings.threshold,
                units=[unit for unit in freezer.units if unit.name not in freezer.frozen],
                batches=settings.batches,
                keep=[self.model],
                combine=processes.all_reduce_mean_,
            )

        def ratios(names: Sequence[str]) -> dict[str, float]:
            with self.clock("correlation"):
                found = processes.broadcast_object(correlation(names))
            entry = self.freezing.log[-1]
            entry["directions"] = correlation.directions | entry.get("directions", {})  # those of the task's start stay
            return found

        return ratios

    def cost_of_step(self, indices: np.ndarray) -> StepCost:
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
            rows = self.prober.rows(self.model.encoder, self.task)
            self.record.end_task(rows, self.prober.future(self.model.encoder, self.task))
        return rows

    def look_before(self) -> None:
        if self.prober:
            with self.clock("evaluation"):
                self.record.untrained = self.prober.rows(self.model.encoder, len(self.stream.tasks))
        self.look("before")

    def look(self, moment: str) -> None:
        """The gallery of the encoder as it is now, into gallery.json."""
        if self.gallery and self.out:
            with self.clock("evaluation"):
                self.gallery.look(moment, self.model.encoder)
                write_json(self.out / "gallery.json", self.gallery.as_dict())

    def check_numbers(self) -> None:
        """Nothing goes on, and nothing is saved, with losses or weights that are not finite."""
        last = self.checkpoints.last if self.checkpoints else None
        check_numbers([self.model, self.method], self.epoch_state, self.position, last)

    def check_spread(self, indices: np.ndarray) -> None:
        """Warn once of a collapse. Checked after 1, 2, 4, 8... epochs of a task and after its last: on a GPU an epoch
        may take less than a second."""
        done = self.epoch + 1
        if self.record.warned or (done & (done - 1) and done < self.config.training.epochs):
            return
        with self.clock("evaluation"):
            chosen = torch.from_numpy(indices[:: max(1, len(indices) // 128)][:128])
            images = self.prepare(self.trainer.source.gather(chosen))
            self.record.warned = warn_of_collapse(self.model.encoder, images, self.position)
