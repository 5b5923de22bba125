"""How work tells how far it is: a run tells a watcher of its phases, epochs and tasks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

Advance = Callable[[int], None]  # called with how many more are done
Phase = Callable[..., AbstractContextManager[Advance]]  # called as `silent` is


class Clock:
    """Seconds that only grow, also where the machine's clocks jump back, as some virtual machines' do."""

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        self.seconds, self._last = self.seconds + max(now - self._last, 1e-9), now
        return self.seconds


@contextmanager
def silent(name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
    """A phase of which nobody is told. of: how many there are to do; None where there is nothing to count."""
    yield lambda amount: None


def cannot_move(console: Any) -> bool:
    """Whether a bar of rich would not move there: in a notebook it needs ipywidgets."""
    return bool(console.is_jupyter and find_spec("ipywidgets") is None)


class Watcher:
    """This one says nothing; `ptlf.report.live` shows a progress bar."""

    def begin(self, about: Sequence[str], tasks: int, epochs: int, units: int, frozen: int, done: int) -> None:
        """about: sentences on the run. epochs: of a task. units, frozen: how many can freeze, and are. done: epochs."""

    def phase(self, name: str, of: int | None = None, unit: str = "images") -> AbstractContextManager[Advance]:
        """Work other than training steps, until the block ends; `begin` need not have been called."""
        return silent(name, of, unit)

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None: ...
    def step(self, views: int) -> None:
        """views: of the epoch so far; those before the run was stopped do not count."""

    def end_epoch(self, losses: Mapping[str, float]) -> None: ...
    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None: ...
    def end(self) -> None: ...
