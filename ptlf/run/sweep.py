"""Every recipe with every seed, in a folder each: trained one after the other, or as jobs of submitit."""

import gc
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError, import_optional
from ptlf.core.files import check_no_link
from ptlf.core.phases import Watcher
from ptlf.core.settings import as_dict, parse
from ptlf.run.build import make_stream
from ptlf.run.compat import check_comparable
from ptlf.run.config import Config, from_dict
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config
from ptlf.training.process import Stopped

AGAIN = "the same command continues"
TIMEOUT = 24 * 60  # minutes; the cluster then stops the job and queues it again
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
    """Train where other runs follow: none begins after a signal, even in the run's last moments."""
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


class Job:
    """Train one run, or resume it. Called in another process, perhaps on another machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = as_dict(config), folder.absolute()

    def __call__(self) -> None:
        Run(from_dict(self.config), self.folder).train(resume=True)

    def checkpoint(self) -> Any:
        """What submitit queues when the job's time is over: the same job, which resumes the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def train_as_jobs(
    runs: Sequence[Planned], logs: Path, cluster: str, jobs: int | None, job_options: Sequence[str], tell: Tell
) -> None:
    """Train the runs, at most `jobs` at a time, and wait for all of them. logs: folder for the jobs' output and errors.
    job_options: KEY=VALUE for submitit's `update_parameters`."""
    check_no_link(logs)
    executor = import_optional("submitit", "--cluster", "cluster").AutoExecutor(logs, cluster=cluster)
    if wrong := [option for option in job_options if "=" not in option]:
        raise UserError(f"--job-options takes KEY=VALUE, such as slurm_partition=gpu, not {wrong[0]!r}")
    parameters = {key: parse(value) for key, _, value in (option.partition("=") for option in job_options)}
    try:
        executor.update_parameters(**{"name": "ptlf", "timeout_min": TIMEOUT, **parameters})
    except (NameError, TypeError, ValueError, AssertionError) as wrong_option:
        raise UserError(f"--job-options: {' '.join(str(wrong_option).split())[:200]}") from None
    waiting, failed = list(runs), []
    running: dict[str, Any] = {}  # name: submitit's job
    while waiting or running:
        while waiting and (jobs is None or len(running) < jobs):
            run = waiting.pop(0)
            running[run.name] = executor.submit(Job(run.config, run.folder))
            tell(f"{run.name}: job {running[run.name].job_id} in {run.folder}")
        for name, job in [(name, job) for name, job in running.items() if job.done()]:
            del running[name]
            error = job.exception()
            tell(f"{name}: {'failed' if error else 'finished'}")
            if error:  # the job's traceback is its text
                lines = [line.strip() for line in str(error).splitlines() if "Error" in line or "Stopped" in line]
                failed.append(f"{name} failed ({(lines or ['?'])[-1][:200]}; see {job.paths.stderr})")
        time.sleep(0.2 if cluster == "local" else 10)  # seconds; polling a cluster's controller often is impolite
    if failed:
        raise UserError("; ".join(failed) + "; the same command continues with what is not finished")
