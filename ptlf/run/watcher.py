"""What a run tells while it goes."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from ptlf.core.phases import Advance, silent


class Watcher:
    """This one says nothing; `ptlf.report.live` shows a progress bar."""

    def begin(self, about: Sequence[str], tasks: int, epochs: int, units: int, frozen: int, done: int) -> None:
        """about: sentences on the run and its start. epochs: of each task. units: that can freeze. frozen: how many
        of them are. done: epochs of all tasks that are already trained."""

    def phase(self, name: str, of: int | None = None, unit: str = "images") -> AbstractContextManager[Advance]:
        """Work other than training steps, until the block ends; `begin` need not have been called. The block gets
        `advance(n)`: n more of the `of` units are done. of: None where there is nothing to count."""
        return silent(name, of, unit)

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None: ...
    def step(self, views: int) -> None:
        """views: of the epoch so far; those before the run was stopped do not count."""

    def end_epoch(self, losses: Mapping[str, float]) -> None: ...
    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None: ...
    def end(self) -> None: ...
