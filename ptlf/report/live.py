"""A run as it goes: a progress bar in a terminal, a line per task everywhere else."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ptlf.report.tables import percent
from ptlf.run.watcher import Watcher

# Names come from users and from files: what looks like markup or an emoji in them is text.
console = Console(markup=False, emoji=False)


def tell(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


class Live(Watcher):
    """Progress over all steps of the stream: task, epoch, loss, views per second, units frozen, time left."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal or console.is_jupyter),
        )

    def begin(self, about: Sequence[str], tasks: int, epochs: int, units: int, frozen: int, done: int) -> None:
        self.tasks, self.epochs, self.units, self.frozen = tasks, epochs, units, frozen
        console.print(f"{self.name}: " + "\n  ".join(about))
        self.bar = self.progress.add_task(self.name, total=tasks * epochs, completed=done, figures="")
        self.progress.start()
        self.loss, self.started = "", time.perf_counter()

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None:
        self.frozen, self.steps, self.epoch_started = frozen, steps, time.perf_counter()
        place = f"task {task + 1}/{self.tasks}, epoch {epoch + 1}/{self.epochs}"
        self.progress.update(self.bar, description=place)

    def step(self, views: int) -> None:
        rate = views / (time.perf_counter() - self.epoch_started)
        figures = f"{self.loss}{rate:,.0f} views/s, {self.frozen}/{self.units} frozen"
        self.progress.update(self.bar, advance=1 / self.steps, figures=figures)

    def end_epoch(self, losses: Mapping[str, float]) -> None:
        self.loss = "".join(f"{name} {value:.4f}, " for name, value in losses.items())

    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None:
        seen = {probe: [value for value in row if value is not None] for probe, row in rows.items()}
        means = [f"{probe} {percent(sum(values) / len(values))}" for probe, values in seen.items() if values]
        learned = f"{self.loss}{', '.join(means) or 'not evaluated'}, {self.frozen}/{self.units} frozen"
        elapsed = time.perf_counter() - self.started
        console.print(f"  task {task + 1}/{self.tasks}: {learned}, {elapsed:.0f} s", soft_wrap=True)

    def end(self) -> None:
        self.progress.stop()
