"""The method's contract: how forgetting is fought. It returns losses; the trainer owns the optimizer.

The moments, in order: `begin_task`, then per step `draw` (host randomness), `mix` (what the loss sees), `losses`,
`remember` (after the optimizer's step), and `end_task`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptlf.batch import Batch
from ptlf.methods.memory import Memory
from ptlf.model import Model
from ptlf.settings import key


@dataclass
class MethodConfig:
    name: str = key("finetune", "which method; `ptlf list methods` names them")


class Method(nn.Module):
    Config: type[MethodConfig] = MethodConfig
    joint = False  # trains on all tasks at once
    needs_memory = False

    def __init__(self, config: MethodConfig, memory: Memory | None, generator: torch.Generator) -> None:
        """`memory` is there when the method or the freezing needs one; `generator` is the method's own randomness."""
        super().__init__()
        self.memory = memory
        self.generator = generator

    def begin_task(self, index: int, model: Model) -> None:
        """Called before the first step of task `index` (from 0)."""

    def draw(self, batch: int) -> dict[str, Tensor]:
        """The randomness of one step as host tensors; they reach the step as `batch.draws`."""
        return {} if self.memory is None else {"slots": self.memory.slots(batch, self.generator)}

    def mix(self, batch: Batch) -> list[Tensor]:
        """The views the loss sees."""
        return batch.views

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        return {"ssl": model.objective.loss(model.encode(batch.mixed), batch)}

    def remember(self, batch: Batch) -> None:
        if self.memory is not None:
            self.memory.add(batch, batch.draws["slots"])

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What is drawn inside is forgotten: generator and memory go on as if it had not happened."""
        state = self.generator.get_state()
        count = self.memory.count if self.memory is not None else 0
        try:
            yield
        finally:
            self.generator.set_state(state)
            if self.memory is not None:
                self.memory.count = count

    def end_task(self, index: int, model: Model) -> None:
        """Called after the last step of task `index`."""
