"""A run as it goes: a progress bar where it can move, else a line per phase, epoch and task."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ptlf.core.phases import Advance, Clock, Watcher, cannot_move
from ptlf.report.measures import duration
from ptlf.report.tables import percent


class Output(Console):
    """Falls silent when whoever read the output has gone, as `head` does. A run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Names come from users and from files: what looks like markup or an emoji in them is text.
console = Output(markup=False, emoji=False)
EVERY = 10.0  # seconds between lines of epochs, where they are shorter


def tell(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


class Live(Watcher):
    """One bar: of the phase that the run is in, or of all steps of the stream. Without a terminal, lines: every phase
    that is new, the first and the last epoch of a task, and otherwise one every ten seconds."""

    def __init__(self, name: str, clock: Callable[[], float] | None = None) -> None:
        self.name, self.clock = name, clock or Clock()
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=cannot_move(console) or not (console.is_terminal or console.is_jupyter),
        )
        self.bar = self.progress.add_task(name, visible=False, figures="")
        self.begun, self.last_line = False, self.clock()
        self.phases: set[str] = set()  # that have a line

    def begin(self, about: Sequence[str], tasks: int, epochs: int, units: int, frozen: int, done: int) -> None:
        self.tasks, self.epochs, self.units, self.frozen = tasks, epochs, units, frozen
        console.print(f"{self.name}: " + "\n  ".join(about), soft_wrap=self.progress.disable)
        self.progress.reset(self.bar, total=tasks * epochs, completed=done, visible=True, figures="")
        self.progress.start()
        self.begun, self.loss, self.task = True, "", -1
        self.started = self.last_line = self.clock()

    @contextmanager
    def phase(self, name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
        counted = f"{of:,} {unit}" if of else ""
        if name not in self.phases:
            self.phases.add(name)
            self.line(f"{name}: {counted}" if counted else name)
        self.progress.update(self.bar, visible=False)
        bar = self.progress.add_task(name, total=of, figures=counted)
        self.progress.start()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            figures = f"{done:,} of {of or done:,} {unit}"
            self.progress.update(bar, advance=amount, figures=figures)
            if self.clock() - self.last_line >= EVERY:
                self.line(f"{name}: {figures}")

        try:
            yield advance
        finally:
            self.progress.remove_task(bar)
            self.progress.update(self.bar, visible=self.begun)
            if not self.begun:
                self.progress.stop()

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None:
        self.steps, self.epoch, self.epoch_started = steps, epoch, self.clock()
        self.frozen, self.speed = frozen, f"{frozen}/{self.units} frozen"
        self.place = f"task {task + 1} of {self.tasks}, epoch {epoch + 1} of {self.epochs}"
        if task != self.task:
            self.task, self.task_started, self.stepped = task, self.epoch_started, 0
        self.progress.update(self.bar, description=self.place)

    def step(self, views: int) -> None:
        self.stepped += 1
        rate = views / max(self.clock() - self.epoch_started, 1e-9)
        self.speed = f"{rate:,.0f} views/s, {self.frozen}/{self.units} frozen"
        self.progress.update(self.bar, advance=1 / self.steps, figures=self.loss + self.speed)

    def end_epoch(self, losses: Mapping[str, float]) -> None:
        self.loss = "".join(f"{name} {value:.4f}, " for name, value in losses.items())
        now, left = self.clock(), (self.epochs - self.epoch - 1) * self.steps
        if self.epoch in (0, self.epochs - 1) or now - self.last_line >= EVERY:
            words = f"{self.place}: {self.loss}{self.speed}, {now - self.started:.0f} s"
            if left and self.stepped:  # by the mean of the task's steps since the run was begun or resumed
                each = (now - self.task_started) / self.stepped
                words += f", about {duration(left * each)} more for this task"
            self.line(words)

    def end_task(self, task: int, rows: Mapping[str, list[float | None]]) -> None:
        seen = {probe: [value for value in row if value is not None] for probe, row in rows.items()}
        means = [f"{probe} {percent(sum(values) / len(values))}" for probe, values in seen.items() if values]
        learned = f"{self.loss}{', '.join(means) or 'not evaluated'}, {self.frozen}/{self.units} frozen"
        elapsed = self.clock() - self.started
        console.print(f"  task {task + 1} of {self.tasks} learnt: {learned}, {elapsed:.0f} s", soft_wrap=True)

    def line(self, text: str) -> None:
        """Where there is no bar."""
        self.last_line = self.clock()
        if self.progress.disable:
            console.print(f"  {text}", soft_wrap=True, highlight=False)

    def end(self) -> None:
        self.progress.stop()
        self.begun = False
