"""What a run tells while it goes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """A run that begins or goes on."""

    tasks: int
    epochs: int  # of each task
    images: int  # of all tasks
    size: int  # of the images, in pixels
    encoder: str
    units: int  # that can freeze
    frozen: int
    device: str
    compiles: bool
    epochs_done: int
    resumed_at: str  # "task 2, epoch 1, step 1", or empty


class Watcher:
    """This one says nothing; `ptlf.report.live` shows a progress bar."""

    def begin(self, start: Start) -> None: ...
    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None: ...
    def step(self, views: int) -> None: ...
    def end_epoch(self, losses: Mapping[str, float]) -> None: ...
    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None: ...
    def end(self) -> None: ...
