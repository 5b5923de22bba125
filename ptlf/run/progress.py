"""How far a run has come."""

from dataclasses import dataclass

from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochState


@dataclass
class Progress:
    task: int = 0  # finished tasks
    epoch: int = 0  # finished epochs of the next task
    epoch_state: EpochState | None = None  # of the epoch under way
    ended: bool = False  # the task under way is learnt, and not tested yet
    status: str = "new"  # then running, and finished, stopped or failed

    @property
    def position(self) -> Position:
        return Position(self.task, self.epoch, self.epoch_state.steps if self.epoch_state else 0)
