"""What runs that are missing would take on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.timing import steps_in_task
from ptlf.report.live import tell
from ptlf.report.measures import duration
from ptlf.run.build import choose_device, make_stream
from ptlf.run.config import Config
from ptlf.run.recipes import resolve_config
from ptlf.run.sweep import Planned, Tell, describe_runs

PLAN = "train nothing: list the runs that are there and those that are missing, and how long these would take"


def size_of(config: Config) -> tuple[int, int]:
    """Images per epoch of the whole stream, and the side of a view in pixels."""
    stream = make_stream(config)
    return sum(len(task.train) for task in stream.tasks), config.views.size or stream.size


def work(config: Config) -> float:
    """Pixels that go through the network: what runs are ordered by where nothing was measured."""
    images, side = size_of(config)
    return float(config.training.epochs * images * side**2)


@dataclass
class Estimate:
    """Seconds of a run, from one step of LUMP (of Finetune with labels) measured here on noise, for each objective and
    image size. Evaluation, correlations, what other methods add to a step and what freezing takes from it are left out.

    steps: timed steps of each measurement.
    tell: what is timed, before it is.
    """

    steps: int = 3
    tell: Tell = lambda line: None
    seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)  # of an image, by what was measured

    def __call__(self, config: Config) -> float:
        images, side = size_of(config)
        kind = (config.objective.name, side, config.encoder.name, config.training.batch)
        if kind not in self.seconds:
            self.seconds[kind] = self.measure(config, side)
        return config.training.epochs * images * self.seconds[kind]

    def measure(self, config: Config, side: int) -> float:
        """On a CPU with a small batch: a step takes long there, and in proportion to its images."""
        batch = config.training.batch
        if choose_device(config.device).type == "cpu":
            batch = min(batch, max(2, 16 * 32**2 // side**2))
        method = "finetune" if config.objective.name == "supervised" else "lump"
        measured = replace(
            resolve_config(f"{config.stream.name}/{config.objective.name}/{method}", None, []),
            device=config.device,
            encoder=config.encoder,
            objective=config.objective,
            views=config.views,
            memory=config.memory,
            training=replace(config.training, batch=batch),
        )
        self.tell(f"timing a step of {measured.recipe}, {side} px")
        (row,) = steps_in_task([measured], side, self.steps, 2)
        return row["step_ms"] / 1000 / batch


def show_plan(there: Sequence[Path], missing: Sequence[Planned], left_out: str = "") -> None:
    """What is there and what is missing, with its estimated time here. left_out: `cannot_be_made`."""
    for folder in there:
        tell(f"done: {folder}")
    estimate = Estimate(tell=tell)
    seconds = [estimate(run.config) for run in missing]
    for run, some in zip(missing, seconds, strict=True):
        tell(f"pending: {run.name}, {at_least(some)}{', begun' * run.begun}, in {run.folder}")
    words = describe_runs(len(there), missing)
    words += f", {at_least(sum(seconds))}" if missing else ""
    tell(words + left_out)
    if missing:
        tell("from a step of LUMP (with labels: Finetune) timed now on this machine; other work on it makes it longer;")
        tell("left out: testing, correlations, what other methods, such as PNN, add to a step, and what freezing saves")


def at_least(seconds: float) -> str:
    """Of less than ten seconds a run's start and tests are the most."""
    return f"at least {duration(seconds)}" if seconds >= 10 else "some seconds"
