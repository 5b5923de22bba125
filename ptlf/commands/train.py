"""`ptlf train`, `learn` and `sweep`."""

import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ptlf.core import processes
from ptlf.core.errors import UserError, short_repr, unknown
from ptlf.core.settings import as_dict, merge, parse_overrides
from ptlf.learner import Learner
from ptlf.report.live import Live, console, tell
from ptlf.report.tables import show_results, show_runs
from ptlf.run import sweep as sweeps
from ptlf.run.config import Config, read_yaml
from ptlf.run.fitting import free_settings
from ptlf.run.folder import check_vacant, has_finished, has_finished_as
from ptlf.run.incoming import STREAM
from ptlf.run.loop import Run
from ptlf.run.recipes import default_recipe, name_of, resolve_config
from ptlf.run.results import read_results, refuse_folder_of_runs
from ptlf.stream import STREAMS
from ptlf.stream.disk import subfolders
from ptlf.training.process import Stopped

Words = Sequence[str]  # overrides are settings, such as --training.epochs 2


def train(
    recipe: str | None, config: Path | None, out: Path | None, resume: Path | None, trust_code: bool, overrides: Words
) -> None:
    folder = resume or out
    if folder is None:
        raise UserError("`ptlf train` needs --out DIR, the folder for the run, or --resume DIR, a run to continue")
    if resume:
        named = [name for name, value in {"--out": out, "--recipe": recipe, "-c": config}.items() if value]
        named += [word.partition("=")[0] for word in overrides if word.startswith("--")]
        for word in named:
            if word not in ("--device", "--log"):  # these may change: the machine, and who tracks the run
                raise UserError(f"--resume takes the settings of {resume / 'config.yaml'}; leave out {word}")
        recipe, config = "", resume / "config.yaml"
    with processes.process_group():
        chosen: Any = None
        if processes.is_first():  # of several machines that share the run, only the first has its folder
            if resume and not (resume / "config.yaml").exists():
                refuse_folder_of_runs(resume)
            chosen = resolve_config(recipe, config, overrides, trust_code=trust_code, tell=tell)
        train_in(folder, processes.broadcast_object(chosen), resumes=resume is not None)


def train_in(folder: Path, config: Config, *, resumes: bool) -> None:
    """Train, show and draw. resumes: the settings are those of the folder, which else must be new."""
    first = processes.is_first()
    # After a restart by torchrun the command is the same, and the run is there already.
    resume = resumes or processes.restarts() > 0
    finished = resume and first and (has_finished(folder) if resumes else has_finished_as(folder, config))
    if processes.broadcast_object(finished):
        return tell(f"{folder}: already finished")
    if first and not resume:
        processes.use_idle_cores()
        check_vacant(folder)  # before tasks that arrived there are taken for the new run's
    run = Run(config, folder)
    results = run.train(Live(name_of(as_dict(run.config))), resume=resume)
    if first:
        show_results(console, results, folder)
        write_page([folder], folder / "report.html")


def learn(
    folder: Path,
    source: str | None,
    recipe: str | None,
    config: Path | None,
    size: int | None,
    name: str | None,
    watch: Path | None,
    settle: float,
    every: float,
    once: bool,
    undo: bool,
    trust_code: bool,
    overrides: Words,
    **how: Any,
) -> None:
    """how: `again`, `new_only`, `if_drift`, `keep_encoders`, and how images are packed, for `Learner.learn`."""
    check_alone("ptlf learn")
    if source and overrides and not overrides[0].startswith("-"):
        one = f"`ptlf learn` takes one folder of images per call, and {short_repr(overrides[0])} is a second one"
        raise UserError(f"{one}; call it once for each, or give --watch DIR to learn every subfolder of DIR")
    for word, value in {"SOURCE": source, "--name": name, "--new-only": how["new_only"]}.items():
        if watch and value:
            raise UserError(f"--watch takes its tasks from {watch}, every folder once; leave out {word}")
    if once and not watch:
        raise UserError("--once is for --watch DIR")
    if undo and (source or watch):
        raise UserError(f"--undo takes the last task of {folder} back; leave out {source or '--watch'}")
    learner = open_learner(folder, recipe, config, size, trust_code, overrides)
    if undo:
        before = learner.tasks
        show_results(console, learner.undo(), folder)
        tell(f"{before[-1]} is taken back; the encoder is the one after {before[-2]}")
        return write_page([folder], folder / "report.html")
    if watch:
        results = None
        for results in learner.watch(watch, settle=settle, every=every, once=once, **how):
            show_results(console, results, folder, brief=True)
            write_page([folder], folder / "report.html")
        if results:
            return show_runs(console, {results["name"]: [results]})
        young = f"its subfolders were learnt or hold no images{f', or changed in the last {settle:g} s' * bool(settle)}"
        return tell(f"nothing new in {watch}: {young if subfolders(watch) else 'it has no subfolders to learn'}")
    if source is None and learner.exists and has_finished(folder) and not how["keep_encoders"]:
        return tell(f"{folder}: nothing to finish; give images to learn")
    try:
        results = learner.learn(source, name, **how)
    except KeyboardInterrupt:  # before training, or in it without checkpoints: the task may not be in the run yet
        raise Stopped(folder, signal.SIGINT, "nothing more is saved; give the same command again") from None
    if learner.run is None and (how["if_drift"] or source is None):  # nothing was learnt
        return
    show_results(console, results, folder)
    write_page([folder], folder / "report.html")


def open_learner(
    folder: Path, recipe: str | None, config: Path | None, size: int | None, trust_code: bool, overrides: Words
) -> Learner:
    """The run in the folder, or a new one with these settings."""
    if not (folder / "config.yaml").exists():
        processes.use_idle_cores()
        for word in (word.partition("=")[0] for word in overrides):
            if word.startswith("--stream.") and word not in ("--stream.labelled", "--stream.resident"):
                raise UserError(f"`ptlf learn` takes tasks as they arrive; leave out {word}")
        values = read_yaml(config) if config else {}
        explicit = merge(Config, values, parse_overrides(Config, overrides))
        recipe = recipe or (None if values.get("recipe") else default_recipe(STREAM, explicit))  # None: the file's
        chosen = resolve_config(recipe, config, overrides, trust_code=trust_code)
        own = STREAMS.find(chosen.recipe.partition("/")[0]).own
        return Learner.new(chosen, folder, size, free_settings(explicit) if own else ())
    for word, value in {"--recipe": recipe, "-c": config, "--size": size}.items():
        if value:
            raise UserError(f"{folder} has settings of its own, in config.yaml; leave out {word}")
    return Learner.load(folder, trust_code=trust_code, **parse_overrides(Config, overrides))


def sweep(recipes: Words, seeds: list[int], out: Path, baseline: str | None, overrides: Words, **jobs: Any) -> None:
    """jobs: `cluster`, `jobs` and `job_options`, for `train_as_jobs`."""
    if any(word.partition("=")[0] == "--seed" for word in overrides):
        raise UserError("`ptlf sweep` takes --seeds, such as --seeds 0 1 2, in place of --seed")
    if baseline:
        ends = [recipe for recipe in recipes if f"/{recipe}".endswith(f"/{baseline}")]
        if not ends:
            raise unknown("baseline", baseline, recipes)
        baseline = ends[0]
    if not jobs["cluster"] and any(jobs.values()):
        raise UserError("--jobs and --job-options are for --cluster local or slurm; without it runs follow one another")
    check_alone("ptlf sweep")
    processes.use_idle_cores()
    runs = sweeps.plan(recipes, seeds, out, overrides, cache(tell))  # what is chosen is the same for all runs
    missing = [run for run in runs if not has_finished_as(run.folder, run.config)]
    for run in runs:
        if run not in missing:
            tell(f"{run.name}: already finished in {run.folder}")
    done = len(runs) - len(missing)
    tell(sweeps.describe_runs(done, missing))
    if jobs["cluster"]:
        sweeps.train_as_jobs(missing, out / "jobs", **jobs, tell=tell)
    else:
        for run, results in sweeps.train_all(missing, Live, tell, done):
            show_results(console, results, run.folder, brief=True)
    groups: dict[str, list[dict[str, Any]]] = {}  # by recipe
    for run in runs:
        groups.setdefault(run.config.recipe, []).append(read_results(run.folder))
    base = baseline or next((name for name, some in groups.items() if some[0].get("baseline")), None)
    several = f", means of {len(set(seeds))} seeds" if len(set(seeds)) > 1 else ""
    show_runs(console, groups, base, f"Summary{several}")
    write_page([out], out / "report.html", baseline)  # with what earlier sweeps left there


def check_alone(command: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"torchrun can share one run among processes: start `ptlf train` with it, not `{command}`")


def write_page(folders: Sequence[Path], out: Path, baseline: str | None = None) -> None:
    """The runs are done and saved: a page that cannot be made is worth a sentence, not a failure."""
    from ptlf.report.page import write_report  # matplotlib takes a while

    try:
        write_report(folders, out, baseline)
        tell(f"report: {out}")
    except UserError as error:
        tell(f"no report: {error}")
