"""Whether a run can continue from a checkpoint: of a sound one, with the same settings, on the same images.

Everything that loading relies on is checked here, so that an error while loading is a bug and no damage to the file.
"""

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.reading import NUMBER, check_shape
from ptlf.core.settings import as_dict
from ptlf.core.words import short_repr
from ptlf.freezing.savings import Saving
from ptlf.run.compat import describe_changes
from ptlf.run.components import Components
from ptlf.run.config import from_dict
from ptlf.run.record import Record
from ptlf.run.results import ACCURACY, COUNT, EPOCH, FEATURES, FROZEN, Json
from ptlf.stream import STREAMS, Stream
from ptlf.stream.task import digest
from ptlf.training.checkpoint import SHAPED, parameters_of

Images = list[dict[str, Any]]  # name, count and SHA-256 of each set of images


def generator_state(value: object, place: str) -> None:
    if not isinstance(value, Tensor) or value.dtype is not torch.uint8 or value.ndim != 1:
        raise ValueError(f"{place} is {short_repr(value)}, not the state of a generator")


def step_losses(value: object, place: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 1:
        raise ValueError(f"{place} is {short_repr(value)}, not losses by step")


LINE = {**EPOCH, "correlation_seconds": NUMBER, "rebuild_seconds": NUMBER, "peak_memory_bytes": ACCURACY}
STATE: Json = {
    "position": dict.fromkeys(("task", "epoch", "step"), COUNT),
    "model": dict,
    "method": dict,
    "optimizer": {"*": dict},
    "optimizer_groups?": [dict],
    "freezing": {
        "active": bool,
        "frozen": [str],
        "log": [FROZEN],
        "savings": {"*": {field.name: NUMBER for field in fields(Saving)}},
        "ratios?": {"*": NUMBER},
        "stays?": [str],
    },
    "random": {"*": generator_state},
    "torch_random": {"cpu": generator_state, "cuda?": generator_state},
    "epoch_state?": {"order": generator_state, "steps": COUNT, "views": (0, 10**15), "losses": {"*": step_losses}},
    "clock": {"*": NUMBER},
    "looks": {"*": {"neighbours": [[COUNT]], "points": [[NUMBER]]}},
    "record": {
        "per_epoch": [LINE],
        "matrices": {"*": [[ACCURACY]]},
        "untrained": {"*": [ACCURACY]},
        "future": {"*": [ACCURACY]},
        "untrained_future?": {"*": [ACCURACY]},
        "used?": {"*": [{"*": (str, *NUMBER)}]},
        "newly_frozen": [str],
        "spent_before": {"*": NUMBER},
        "warned": bool,
        "features?": [FEATURES],
        "untrained_features?": [FEATURES],
        "memory_images?": {"*": (str, *NUMBER)},
        "reference?": {"*": [NUMBER]},
    },
    "ended?": bool,
    "looks_sha256?": str,
    "settings?": dict,
    "threads?": COUNT,
}
# What goes with `settings`, to compare.
COMPARED: Json = {"tasks": COUNT, "images": [{"name": str, "count": int, "sha256": str}]}


def check_state(state: object) -> None:
    """Raise a ValueError that names what is missing in a checkpoint, or is of another kind."""
    check_shape(state, STATE if not isinstance(state, dict) or state.get("settings") is None else STATE | COMPARED)


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
    if (before := state.get("settings")) is None:
        return processes.warn(f"the checkpoint in {folder} does not say its settings; nothing is compared")
    with contextlib.suppress(UserError):  # settings that this version does not know differ
        before = as_dict(from_dict(before))  # those that are newer than the checkpoint had their defaults' effect
    if changed := describe_changes(before, as_dict(config)):
        raise UserError(f"the settings in {folder}/config.yaml have changed: {changed}; put them back, or {begin}")
    for old, new in zip(state["images"], images, strict=False):
        if changed := describe_changes(old, new, ()):
            raise UserError(
                f"the images of {short_repr(new['name'])} have changed: {changed}; put them back, or {begin}"
            )
    arrived = len(stream.tasks) - state["tasks"]  # since the checkpoint was written
    if len(state["images"]) != len(images) or not 0 <= arrived <= stream.arrived:
        put_back = "put back what is missing, or " if arrived < 0 else ""
        tasks = f"the stream had {state['tasks']} tasks and now has {len(stream.tasks)}"
        raise UserError(f"{tasks}; {put_back}{begin}")


def check_fits_run(state: Json, components: Components, names: Mapping[Tensor, str]) -> None:
    """Raise a ValueError where a sound state is not of a run like this one. names: of its parameters."""
    parts, at = components, state["position"]
    if at["task"] > len(parts.stream.tasks) or at["epoch"] > parts.config.training.epochs:
        raise ValueError(f"its position, {at}, is beyond the run's end")
    check_tensors(state["model"], parts.model, "model", may_lack=parts.method.grows)
    check_tensors(state["method"], parts.method, "method")
    check_optimizer(state, parts.trainer.optimizer, names)
    units = {unit.name for unit in parts.freezing.freezer.units}
    for key in ("frozen", "stays", "savings"):
        if unknown := [name for name in state["freezing"].get(key) or () if name not in units]:
            raise ValueError(f"freezing.{key} names {short_repr(unknown[0])}, which is no unit")
    check_record(state["record"], len(parts.stream.eval_splits))
    if parts.gallery and parts.gallery.sha256 == state.get("looks_sha256"):
        pixels = len(parts.gallery.pixels)
        rows = [row for look in state["looks"].values() for row in look["neighbours"]]
        if beyond := [number for row in rows for number in row if number >= pixels]:
            raise ValueError(f"looks has image {beyond[0]} of {pixels}")


def check_tensors(state: Json, module: nn.Module, part: str, *, may_lack: bool = False) -> None:
    own = module.state_dict()
    unknown, missing = [key for key in state if key not in own], [key for key in own if key not in state]
    if unknown or (missing and not may_lack):
        raise ValueError(f"{part} lacks {short_repr(missing[:3])} and has {short_repr(unknown[:3])}")
    for key, value in state.items():
        if torch.is_tensor(own[key]) and (shape := getattr(value, "shape", None)) != own[key].shape:
            raise ValueError(f"{part}.{key} has the shape {shape and tuple(shape)}, not {tuple(own[key].shape)}")


def check_optimizer(state: Json, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    parameters = parameters_of(optimizer)
    known = {names[parameter]: parameter for parameter in parameters}
    known |= {str(number): parameter for number, parameter in enumerate(parameters)}  # as older checkpoints name them
    for name, values in state["optimizer"].items():
        if name not in known:
            raise ValueError(f"optimizer names {short_repr(name)}, which is no parameter that trains")
        for key in SHAPED & values.keys():
            if (shape := getattr(values[key], "shape", None)) != known[name].shape:
                raise ValueError(f"optimizer.{name}.{key} has the shape {shape}, the parameter {known[name].shape}")
    if (groups := state.get("optimizer_groups")) and len(groups) != len(optimizer.param_groups):
        raise ValueError(f"optimizer_groups has {len(groups)} groups, not {len(optimizer.param_groups)}")


def check_record(record: Json, splits: int) -> None:
    if unknown := record.keys() - {field.name for field in fields(Record)}:
        raise ValueError(f"record has {short_repr(sorted(unknown))}, which this version does not know")
    for probe, rows in record["matrices"].items():
        if any(len(row) > splits for row in rows):
            raise ValueError(f"record.matrices.{probe} has a row that is of more than {splits} eval_splits")
    for probe, future in record["future"].items():
        untrained = (record.get("untrained_future") or {}).get(probe) or record["untrained"].get(probe, [])[1:]
        if len(future) > len(untrained):
            raise ValueError(f"record.future.{probe} has {len(future)} values, the untrained encoder {len(untrained)}")
    if empty := [probe for probe, values in (record.get("reference") or {}).items() if not values]:
        raise ValueError(f"record.reference.{empty[0]} has no values")


def check_threads(before: int | None, device: torch.device) -> None:
    """Threads of the CPU share a sum among them: another number of them adds in another order."""
    now = torch.get_num_threads()
    if device.type == "cpu" and before not in (None, now):
        differ = "results may differ in the last bits from those of a run that was not stopped"
        processes.warn(
            f"the checkpoint is of {before} CPU threads, and now there are {now}: "
            f"{differ}; set OMP_NUM_THREADS={before} for the same bits"
        )


def images_of_task(stream: Stream, task: int) -> Images:
    """What identifies the images of a task (from 0), and of the splits that are tested from it on."""
    new, splits = stream.tasks[task], [split for split in stream.eval_splits if split.since == task]
    parts = [(f"task {task + 1}, {new.name}", new.images, new.train)]
    parts += [(f"the test images of {split.name}", split.test_images, split.test) for split in splits]
    return [{"name": name, "count": len(rows), "sha256": digest(images, rows)} for name, images, rows in parts]
