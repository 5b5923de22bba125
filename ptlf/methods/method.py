"""The method's contract: how forgetting is fought. It returns losses; the trainer owns the optimizer.

The moments, in order: `begin_task`, per step `draw`, `mix`, `losses`, `after_backward`, `remember`, then `end_task`.
Its parameters train with the model's. Its `state_dict` has all that a resumed task needs, without `begin_task`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ptlf.core.batch import Batch
from ptlf.core.settings import Presets, key
from ptlf.methods.memory import Memory
from ptlf.model import Model
from ptlf.objectives.objective import Teacher


@dataclass
class MethodConfig:
    name: str = key("finetune", "which method; `ptlf list methods` names them")


C = TypeVar("C", bound=MethodConfig)


class Method(nn.Module, Generic[C]):
    Config: type[MethodConfig] = MethodConfig
    joint = False  # the stream becomes one task of all images
    grows = False  # a checkpoint of a stream with fewer tasks may lack parts of the encoder
    needs_memory = False  # `memory` is there even if the freezing needs none
    needs_outputs = False  # the memory stores the encoder's vectors too
    freezable = True  # may be combined with a freezing policy
    # Before which tasks a captured step (a CUDA graph) is recorded again, because its operations differ.
    recapture: Literal["every_task", "second_task", "never"] = "every_task"
    mixes_images = False  # a label per image says nothing: refuses objectives that need labels
    distills = False  # compares projections with an earlier model's: refuses objectives without `distill`
    starts_from_given = False  # needs an encoder that has learnt something: the first task has a past too
    baseline = False  # costs in reports are relative to a run of it without freezing
    presets: ClassVar[Presets] = {}

    def __init__(self, config: C, model: Model, memory: Memory | None, generator: torch.Generator) -> None:
        """`memory` is there when the method or the freezing needs one; `generator` is the method's own randomness."""
        super().__init__()
        self.config = config
        self.memory, self.generator = memory, generator
        self.task = 0

    @staticmethod
    def adapt_encoder(config: Any, encoder: nn.Module, tasks: int) -> nn.Module:
        """The encoder this method trains on a stream of this many tasks, made from the configured one."""
        return encoder

    def begin_task(self, index: int, model: Model, steps: int) -> None:
        """Called before the first of the `steps` steps of task `index` (from 0)."""
        self.task = index

    def teacher(self) -> Teacher | None:
        """An earlier model that the step runs too. It may share the forward of a frozen prefix, unless it `moves`."""
        return None

    def graph_key(self) -> str:
        """What a step's operations depend on, besides frozen units: a captured graph is replayed if it is equal."""
        recorded_in = {"every_task": self.task, "second_task": min(self.task, 1), "never": 0}
        return f"task {recorded_in[self.recapture]}"

    def draw(self, batch: int) -> dict[str, Tensor]:
        """The randomness of one step as host tensors; they reach the step as `batch.draws`."""
        return {} if self.memory is None else {"slots": self.memory.slots(batch, self.generator)}

    def mix(self, batch: Batch) -> list[Tensor]:
        """The views the loss sees."""
        return batch.views

    def losses(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        return {"ssl": model.loss(model.encode(batch.mixed), batch)}

    def after_backward(self, model: Model, lr: float | Tensor) -> None:
        """Called after backward and before the optimizer's step with this learning rate."""

    def remember(self, model: Model, batch: Batch) -> None:
        """Called after the optimizer's step: what the memory takes, or a `MomentumTeacher` that follows."""
        if self.memory is not None:
            self.memory.add(batch, batch.draws["slots"])

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Restores the generator and the memory's counter on exit: what was drawn inside has no effect."""
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

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.task)

    def set_extra_state(self, state: Tensor) -> None:
        self.task = int(state)


class Finetune(Method[MethodConfig]):
    """Only the objective, task after task."""

    recapture = "never"


class Multitask(Finetune):
    """Only the objective, on all tasks at once: an upper bound without forgetting."""

    joint = True
