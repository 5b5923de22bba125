"""The next task of a run that learns tasks as they arrive: packed, and compared with those it has learnt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ptlf.core.errors import UserError, info
from ptlf.core.files import remove_folder
from ptlf.encoders.weights import KEPT
from ptlf.run.build import check_grows
from ptlf.run.config import Config
from ptlf.run.folder import claim_folder
from ptlf.run.results import results_if_any
from ptlf.run.versions import step_files
from ptlf.stream import StreamConfig
from ptlf.stream.arrivals import LOOKS, TASKS, arrived_names, clear, known_images, place, reduced, task_name
from ptlf.stream.pack import Pack
from ptlf.training.checkpoint import Checkpoints, Position

STREAM = "arriving"
KEEP_TASKS = 2  # checkpoints after a task: a run that never ends cannot keep them all


def arriving_config(config: Config, out: Path) -> Config:
    """Of a new run in this folder, whose tasks arrive one by one."""
    if (out / "config.yaml").exists():
        raise UserError(f"{out} already holds a run; Learner.load continues it, or choose another folder")
    stream = StreamConfig(name=STREAM, labelled=config.stream.labelled, resident=config.stream.resident)
    kept = replace(config.checkpoint, keep_tasks=config.checkpoint.keep_tasks or KEEP_TASKS)
    config = replace(config, stream=stream, checkpoint=kept)
    check_grows(config)
    return config


@contextmanager
def claimed_for_learning(folder: Path) -> Iterator[None]:
    """The folder, locked. One that was not there goes again if nothing was learnt."""
    made, existed = not folder.exists(), (folder / "config.yaml").exists()
    try:
        with claim_folder(folder, resume=existed):
            clear(folder, everything=not existed)  # left by a process that was killed
            yield
    finally:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def take_back(folder: Path, config: Config) -> None:
    """Remove the last task and what it left. Stopped in between, the run continues with that task or without it."""
    names, saved = arrived_names(folder), Checkpoints(folder, config.checkpoint)
    if len(names) < 2:
        learnt = "has learnt one task" if names else "has no task that arrived"
        raise UserError(f"{folder} {learnt}: there is nothing before it; remove the folder to begin anew")
    before = [path for path in saved.files() if path.name.startswith("after-")]
    tasks = (results_if_any(folder) or {"tasks": names})["tasks"]
    keep = saved.folder / Position(len(tasks) - 1).file
    if keep not in before:
        raise UserError(f"{folder} has no checkpoint from before {names[-1]} ({keep.name}), so it cannot be taken back")
    for path in saved.files():
        if path not in before[: before.index(keep) + 1]:
            path.unlink()
    (folder / "results.json").unlink(missing_ok=True)
    (folder / TASKS / LOOKS).unlink(missing_ok=True)
    for path in step_files(folder):
        if int(path.stem) >= len(tasks):
            path.unlink()
    for path in (folder / KEPT / names[-1].partition("-")[2], folder / TASKS / names[-1]):
        remove_folder(path)


def select_new(incoming: Pack, learnt: Sequence[Pack], unfinished: bool, again: bool, new_only: bool) -> Pack | None:
    """What of the images is to be learnt. None: nothing, or they are those of the last task, which is unfinished."""
    if again:
        return incoming
    name, hint = task_name(incoming), "give --again (again=True) to learn them once more"
    checksum = incoming.split("train").sha256
    same = [number for number, pack in enumerate(learnt, start=1) if pack.split("train").sha256 == checksum]
    if unfinished and same and same[-1] == len(learnt):
        return None
    if same and not new_only:
        raise UserError(f"{name} holds the very images of {place(learnt[same[0] - 1], same[0])}; {hint}")
    known, tasks = known_images(incoming, learnt)
    if not known.any():
        return incoming
    if new_only and known.all():
        info(f"nothing new in {name}: all {len(known)} images were learnt before")
        return None
    before = f"{known.sum()} of the {len(known)} images of {name} were learnt before"
    if new_only:
        info(f"{before}, left out")
        return reduced(incoming, np.flatnonzero(~known))
    before += f": {'; '.join(tasks)}"
    if known.all():
        raise UserError(f"{before}; {hint}")
    info(f"{before}; they are learnt again, unless --new-only (new_only=True) is given")
    return incoming
