"""Progress bars on stderr while data is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(text: str, total: float | None, show: bool, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`, which moves the bar on by n images or bytes."""
    counter = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = [TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount: bar.advance(task, amount)
