"""Several runs, one after the other: every recipe with every seed, in a folder each; what is finished is kept."""

import gc
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError
from ptlf.core.settings import as_dict
from ptlf.run.build import make_stream
from ptlf.run.compat import check_comparable
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config
from ptlf.run.watcher import Watcher
from ptlf.training.process import Stopped

AGAIN = "the same command continues"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    name: str
    config: Config
    folder: Path

    @property
    def begun(self) -> bool:
        return (self.folder / "config.yaml").exists()


def plan(
    recipes: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str], tell: Tell = lambda line: None
) -> list[Planned]:
    """A run for every recipe and seed; one that is named twice is one. Runs that could not be compared are refused.
    tell: as for `resolve_config`."""
    runs = []
    for recipe, seed in itertools.product(dict.fromkeys(recipes), dict.fromkeys(seeds)):
        name = recipe if len(set(seeds)) == 1 else f"{recipe} seed {seed}"
        config = resolve_config(recipe, None, [*overrides, f"--seed={seed}"], tell=tell)
        runs.append(Planned(name, config, out / f"{recipe.replace('/', '-')}-seed{seed}"))
    check_comparable([as_dict(run.config) for run in runs])
    return runs


def describe_runs(done: int, missing: Sequence[Planned]) -> str:
    """Such as "8 runs: 3 done, 1 to resume, 4 pending"."""
    begun, total = sum(run.begun for run in missing), done + len(missing)
    numbers = {"done": done, "to resume": begun, "pending": len(missing) - begun}
    parts = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return f"{total} run{'s' * (total != 1)}{': ' * bool(parts)}{parts}"


def train_all(
    runs: Sequence[Planned], watch: Callable[[str], Watcher], tell: Tell, done: int = 0, keep_going: bool = False
) -> Iterator[tuple[Planned, Any]]:
    """Each run with its results, as soon as it is trained.

    watch: makes a watcher from a run's name. tell: gets a line before each run, with its number after the `done` ones.
    keep_going: a run that fails is given with its error, and the others follow.
    """
    for run in () if keep_going else runs:
        make_stream(run.config)  # fail now if data is missing, not after hours
    for number, run in enumerate(runs, start=done + 1):
        name = run.name.removesuffix(f" seed {run.config.seed}")
        tell(f"run {number} of {done + len(runs)}: {name}, seed {run.config.seed}")
        results: Any
        try:
            results = train_one_of_many(Run(run.config, run.folder), watch(run.name), resume=True)
        except KeyboardInterrupt:  # while it was built
            raise Stopped(run.folder, signal.SIGINT, AGAIN) from None
        except UserError as error:
            if not keep_going:
                raise
            results = error
        yield run, results
        gc.collect()  # a run is in reference cycles: its GPU memory would count in the next one's peak


def train_one_of_many(run: Run, watcher: Watcher, advice: str = AGAIN, *, resume: bool = False) -> dict[str, Any]:
    """Train where other runs follow. If asked to stop, even in the run's last moments, no other run begins.
    advice: for whoever stops it."""
    try:
        results = run.train(watcher, resume=resume)
    except Stopped as stopped:
        raise stopped.again(advice) from None
    except KeyboardInterrupt:  # without checkpoints the first Ctrl-C is one
        if run.folder is None:
            raise
        raise Stopped(run.folder, signal.SIGINT, advice, run.lost()) from None
    if run.stop_signal and run.folder:
        raise Stopped(run.folder, run.stop_signal, advice)
    return results
