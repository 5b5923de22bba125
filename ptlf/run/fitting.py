"""Settings that fit the user's own images and this machine: network, batch, epochs, number of tasks. They are chosen
once, for a new run, where the user gives none; config.yaml then holds them."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.settings import merge, nested
from ptlf.methods import METHODS
from ptlf.run.config import Config
from ptlf.stream.pack import Pack, data_root, open_pack

Settings = Mapping[str, Any]
MAX_TASKS = 5
MAX_GROUPED = 200  # classes; the groups of more would make config.yaml unreadable
EPOCHS = (10, 15, 20, 30, 50, 75, 100, 150, 200)  # the greatest of them that the machine manages in its seconds
FLOPS_PER_PIXEL = {"resnet18": 1.085e6, "resnet18-imagenet": 7.3e4, "resnet18-mini": 2.44e4}  # of a forward
UNKNOWN_FLOPS = 7.3e4  # per pixel, of other encoders
MAX_CONTINUED = 48_000  # images, every epoch's counted, that a given encoder is trained on in a task of few
STEP = 6  # forwards that a step on an image costs: two views, and the backward takes as long as two forwards

ARGUMENTS_OF_LEARN = {"name", "again", "new_only", "if_drift", "keep_encoders", "watcher", "test_fraction"}
ARGUMENTS_OF_LEARN |= {"on_error", "workers", "fit"}


@dataclass(frozen=True)
class Machine:
    gpu: bool
    cores: int

    @property
    def flops(self) -> float:
        """Per second, in training: 57e9 were measured on two cores, 270e12 on an H200."""
        return 2e13 if self.gpu else 2e10 * self.cores

    @property
    def seconds(self) -> float:
        """That training may take."""
        return 3600 if self.gpu else 300

    def __str__(self) -> str:
        return "a GPU" if self.gpu else f"{self.cores} CPU core{'s' * (self.cores > 1)}"

    def network(self, pixels: int) -> str:
        return "resnet18-imagenet" if pixels > 64 else "resnet18" if self.gpu else "resnet18-mini"

    def batch(self, smallest: int) -> int:
        """A power of two, up to 256 on a GPU and 64 elsewhere: four steps in an epoch of the smallest task where that
        leaves 16 images or more. A multiple of the number of processes."""
        wanted = min(256 if self.gpu else 64, max(16, smallest // 4), smallest)
        power, count = 1 << max(1, wanted.bit_length() - 1), processes.world_size()
        return max(power // count * count, 2 * count)

    def epochs(self, flops: float, images: int) -> int:
        """flops: of one image's forward. images: of all tasks."""
        possible = self.seconds * self.flops / (STEP * flops * max(images, 1))
        return max([number for number in EPOCHS if number <= possible], default=EPOCHS[0])


def this_machine(device: str) -> Machine:
    gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    return Machine(gpu, os.cpu_count() or 1)


def free_settings(explicit: Settings) -> set[str]:
    """Which of the settings that are chosen here the user leaves open."""
    sections = (explicit.get(name) for name in ("training", "stream"))
    training, stream = (section if isinstance(section, Mapping) else {} for section in sections)
    free = {f"training.{name}" for name in ("batch", "epochs") if name not in training}
    free |= {"encoder"} - set(explicit)
    return free | (set() if {"tasks", "groups"} & set(stream) else {"stream.tasks"})


def fit_pack(values: Settings, free: Collection[str]) -> tuple[Settings, str]:
    """`values`, all settings, with what is free chosen for the packed set that they name, and a sentence on it."""
    found = class_counts(values) if free else None
    if found is None:  # a set that cannot be read is left to those who open it for training
        return values, ""
    pack, counts = found
    chosen: dict[str, Any] = {}
    if "stream.tasks" in free and pack.folders != "tasks":
        chosen = division(pack, len(counts), values["stream"])
        values = merge(Config, values, *[nested(name, value) for name, value in chosen.items()])
    return fit_settings(values, free, expected_sizes(values), pack.size, chosen)


def fit_settings(
    values: Settings, free: Collection[str], sizes: Sequence[int], size: int, divided: Settings | None = None
) -> tuple[Settings, str]:
    """The same for tasks of `sizes` images of `size` px; the sentence is also on `divided`, chosen for the stream."""
    machine, pixels = this_machine(values["device"]), values["views"]["size"] or size
    chosen: dict[str, Any] = dict(divided or {})
    if "encoder" in free:
        chosen["encoder.name"] = machine.network(pixels)
    if "training.batch" in free and sizes:
        chosen["training.batch"] = machine.batch(min(sizes))
    if "training.epochs" in free and METHODS.find(values["method"]["name"]).starts_from_given:
        most = values["training"]["epochs"]  # enough for few images; steps of more images do not become more
        chosen["training.epochs"] = max(min(most, 10), min(most, MAX_CONTINUED // max(1, sum(sizes))))
    elif "training.epochs" in free:
        flops = FLOPS_PER_PIXEL.get(chosen.get("encoder.name") or values["encoder"]["name"], UNKNOWN_FLOPS) * pixels**2
        chosen["training.epochs"] = max(machine.epochs(flops, sum(sizes)), 2 * values["training"]["warmup"])
    values = merge(Config, values, *[nested(name, value) for name, value in chosen.items()])
    if groups := chosen.get("stream.groups"):
        chosen["stream.groups"] = f"[{len(groups)} tasks of {'+'.join(str(len(group)) for group in groups)} classes]"
    words = [f"--{name} {value}" for name, value in chosen.items()]
    images = f"{sum(sizes)} image{'s' * (sum(sizes) != 1)} of {size} px on {machine}"
    told = f"chosen for {images}: {' '.join(words)}; each can be given with a value of your own"
    return values, told if words else ""


def division(pack: Pack, classes: int, stream: Settings) -> dict[str, Any]:
    """`tasks`, or `groups` where that number does not divide the classes: up to five tasks, of two classes or more."""
    tasks = min(MAX_TASKS, max(2, classes // 2), classes)
    if classes % tasks == 0:
        return {"stream.tasks": tasks}
    fixed = stream["class_order"] != "natural" or stream["classes"] is not None
    if fixed or classes > MAX_GROUPED:
        return {"stream.tasks": max(number for number in range(1, tasks + 1) if classes % number == 0)}
    groups = np.array_split(range(classes), tasks)
    return {"stream.groups": [[pack.names[number] for number in group] for group in groups]}


def class_counts(settings: Settings) -> tuple[Pack, np.ndarray] | None:
    """The packed set that the settings name, if it can be read, and the training images of each class or task."""
    stream = settings["stream"]
    if stream["pack"] is None:
        return None
    try:
        pack = open_pack(data_root(settings["data_root"]), stream["pack"])
        counts = np.bincount(pack.labels("train"), minlength=len(pack.names))
    except UserError:
        return None
    if pack.folders == "classes":
        counts = counts[: stream["classes"]]
    return pack, np.minimum(counts, stream["per_class"] or counts)


def expected_sizes(settings: Settings) -> list[int]:
    """Training images of each task of the packed set that the settings name, or about so; empty if not known."""
    found, stream = class_counts(settings), settings["stream"]
    if found is None:
        return []
    pack, counts = found
    if pack.folders == "tasks":
        return counts.tolist()
    if stream["groups"] is not None:
        names = {name: int(count) for name, count in zip(pack.names, counts, strict=False)}
        numbers = dict(enumerate(names.values()))
        return [sum(names.get(str(name), numbers.get(name, 0)) for name in group) for group in stream["groups"]]
    return [int(part.sum()) for part in np.array_split(counts, min(stream["tasks"] or 1, len(counts)))]


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and dotted keys, as Python gives them, as one nested dictionary."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ARGUMENTS_OF_LEARN:
            raise UserError(f"{name} is no setting of the run but an argument of learn(): learn(images, {name}=...)")
        given = merge(Config, given, nested(name, value))
    return given
