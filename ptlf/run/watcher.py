"""What a run tells while it goes."""

from collections.abc import Mapping, Sequence


class Watcher:
    """This one says nothing; `ptlf.report.live` shows a progress bar."""

    def begin(self, about: Sequence[str], tasks: int, epochs: int, units: int, frozen: int, done: int) -> None:
        """about: sentences on the run and its start. epochs: of each task. units: that can freeze. frozen: how many
        of them are. done: epochs of all tasks that are already trained."""

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None: ...
    def step(self, views: int) -> None: ...
    def end_epoch(self, losses: Mapping[str, float]) -> None: ...
    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None: ...
    def end(self) -> None: ...
