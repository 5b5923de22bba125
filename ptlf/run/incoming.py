"""The next task of a run that learns tasks as they arrive: packed, and compared with those it has learnt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from ptlf.core.errors import UserError, info
from ptlf.run.build import check_grows
from ptlf.run.config import Config
from ptlf.run.folder import claim_folder
from ptlf.stream import Stream, StreamConfig
from ptlf.stream.arrivals import clear, known_images, pack_incoming, place, reduced, task_name
from ptlf.stream.decode import Fit
from ptlf.stream.disk import disk_errors, files_below
from ptlf.stream.pack import Pack, data_root
from ptlf.stream.squares import OnError

STREAM = "arriving"
SIZE = 32  # pixels, where neither the images nor the settings say
KEPT = 2  # checkpoints after a task: a run that never ends cannot keep them all


class Packing(TypedDict, total=False):
    """How images are packed, see `pack_folder`."""

    test_fraction: float
    on_error: OnError
    workers: int | None
    fit: Fit | None  # of a new run


def arriving_config(config: Config, out: Path) -> Config:
    """Of a new run in this folder, whose tasks arrive one by one."""
    if (out / "config.yaml").exists():
        raise UserError(f"{out} already holds a run; Learner.load continues it, or choose another folder")
    stream = StreamConfig(name=STREAM, labelled=config.stream.labelled, resident=config.stream.resident)
    kept = replace(config.checkpoint, keep_tasks=config.checkpoint.keep_tasks or KEPT)
    config = replace(config, stream=stream, checkpoint=kept)
    check_grows(config)
    return config


def appearance(folder: Path) -> list[tuple[str, int, int]]:
    """Of each file its name, size and date."""
    with disk_errors(folder):
        stats = [(str(file), file.stat()) for file in files_below(folder)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


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


def pack_task(
    folder: Path, config: Config, known: Stream | None, source: Any, name: str | None, size: int | None, how: Packing
) -> Pack:
    """The images of the next task. known: the run's stream, if there is a run; else they have this size in pixels."""
    wanted = how.get("fit")
    if known and wanted not in (None, known.fit):
        raise UserError(f"the images of {folder} were packed with --fit {known.fit}; leave out --fit {wanted}")
    options: dict[str, Any] = {**how, "fit": known.fit if known else wanted or "crop"}
    root, default = data_root(config.data_root), config.views.size or SIZE
    size = known.size if known else size
    return pack_incoming(folder, source, name, size, root=root, default_size=default, **options)


def select_new(incoming: Pack, learnt: Sequence[Pack], unfinished: bool, again: bool, new_only: bool) -> Pack | None:
    """What of the images is to be learnt. None: nothing, or they are those of the last task, which is unfinished."""
    if again:
        return incoming
    hint = "give --again (again=True) to learn them once more"
    checksum = incoming.split("train").sha256
    same = [number for number, pack in enumerate(learnt) if pack.split("train").sha256 == checksum]
    if unfinished and same and same[-1] == len(learnt) - 1:
        return None
    if same and not new_only:
        raise UserError(f"{task_name(incoming)} holds the very images of {place(learnt[same[0]], same[0] + 1)}; {hint}")
    known, tasks = known_images(incoming, learnt)
    if not known.any():
        return incoming
    if new_only and known.all():
        info(f"nothing new in {task_name(incoming)}: all {len(known)} images were learnt before")
        return None
    before = f"{known.sum()} of the {len(known)} images of {task_name(incoming)} were learnt before"
    if new_only:
        info(f"{before}, left out")
        return reduced(incoming, np.flatnonzero(~known))
    before += f": {'; '.join(tasks)}"
    if known.all():
        raise UserError(f"{before}; {hint}")
    info(f"{before}; they are learnt again, unless --new-only (new_only=True) is given")
    return incoming
