"""Whether a run can continue from a checkpoint: of the same settings, on the same images.

The checksum says that the checkpoint is as it was written: an error while it is loaded is a bug.
"""

import contextlib
import shlex
from typing import Any

import torch
from torch import Tensor

from ptlf.core.errors import UserError, warn
from ptlf.core.settings import as_dict
from ptlf.core.words import short_repr
from ptlf.run.compat import describe_changes
from ptlf.run.components import Components
from ptlf.run.config import from_dict
from ptlf.run.results import Json
from ptlf.stream import STREAMS, Stream
from ptlf.stream.task import digest

Images = list[dict[str, Any]]  # name, count and SHA-256 of each set of images


def check_same_run(state: Json, components: Components, images: Images) -> None:
    """Refuse other settings, or other images of the tasks begun, than the checkpoint was made with: the record would be
    false of what is already learnt. images: of the tasks begun, as they are now."""
    config, folder, stream = components.config, components.folder, components.stream
    file = shlex.quote(f"{folder}/config.yaml")
    begin = f"begin anew with `ptlf train --config {file} --out OTHER`"
    if components.encoder_given:
        begin = "begin anew in another folder"
    elif STREAMS.find(config.stream.name).arriving:
        begin = f"begin anew with `ptlf learn OTHER IMAGES --config {file}`"
    before = state["settings"]
    with contextlib.suppress(UserError):  # settings that this version does not know differ
        before = as_dict(from_dict(before))  # those that are newer than the checkpoint had their defaults' effect
    if changed := describe_changes(before, as_dict(config)):
        raise UserError(f"the settings in {folder}/config.yaml have changed: {changed}; put them back, or {begin}")
    for old, new in zip(state["images"], images, strict=False):
        if changed := describe_changes(old, new, ()):
            name = short_repr(new["name"])
            raise UserError(f"the images of {name} have changed: {changed}; put them back, or {begin}")
    arrived = len(stream.tasks) - state["tasks"]  # since the checkpoint was written
    if len(state["images"]) != len(images) or not 0 <= arrived <= stream.arrived:
        put_back = "put back what is missing, or " if arrived < 0 else ""
        tasks = f"the stream had {state['tasks']} tasks and now has {len(stream.tasks)}"
        raise UserError(f"{tasks}; {put_back}{begin}")
    own, theirs = (shapes(values) for values in (components.model.state_dict(), state["model"]))
    for name in {**theirs, **own}:
        if own.get(name) != theirs.get(name) and not (components.method.grows and name not in theirs):
            what = f"{short_repr(name)} has the shape {theirs.get(name)} there and {own.get(name)} now"
            raise UserError(f"the checkpoint in {folder} does not fit the encoder: {what}; give the same, or {begin}")


def shapes(state: Json) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def check_threads(before: int | None, device: torch.device) -> None:
    """Threads of the CPU share a sum among them: another number of them adds in another order."""
    now = torch.get_num_threads()
    if device.type == "cpu" and before not in (None, now):
        differ = "results may differ in the last bits from those of a run that was not stopped"
        warn(
            f"the checkpoint is of {before} CPU threads, and now there are {now}: "
            f"{differ}; set OMP_NUM_THREADS={before} for the same bits"
        )


def images_of_task(stream: Stream, task: int) -> Images:
    """What identifies the images of a task (from 0), and of the splits that are tested from it on."""
    new, splits = stream.tasks[task], [split for split in stream.eval_splits if split.since == task]
    parts = [(f"task {task + 1}, {new.name}", new.images, new.train)]
    parts += [(f"the test images of {split.name}", split.test_images, split.test) for split in splits]
    return [{"name": name, "count": len(rows), "sha256": digest(images, rows)} for name, images, rows in parts]
