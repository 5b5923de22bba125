"""Streams: which training images arrive in which order, and on which images the encoder is evaluated."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.core.registry import Registry
from ptlf.core.settings import key
from ptlf.stream.decode import Fit
from ptlf.stream.pack import open_pack


@dataclass
class StreamConfig:
    name: str = key("digits", "stream of tasks (see `ptlf list streams`)")
    pack: str | None = key(None, "packed data set to read (see `ptlf data pack`); null = the stream's own")
    tasks: int | None = key(None, "number of tasks; null = the stream's own number", ge=1)
    classes: int | None = key(None, "use only the first N classes; null = all", ge=1)
    per_class: int | None = key(None, "use only the first N training and test images of each class; null = all", ge=1)
    class_order: str | list[str | int] = key("natural", "natural, seeded, or a list of all classes by name or number")
    groups: list[list[str | int]] | None = key(None, "the classes of each task, by name or number, instead of `tasks`")
    labelled: str | None = key(None, "for a folder per task: labelled folder or packed set to evaluate on; null = none")
    resident: bool | None = key(None, "keep all images on the device, or prefetch them; null = keep them if they fit")


@dataclass(eq=False)
class Images:
    """`pixels` (N, H, W, 3) uint8, possibly memory-mapped, and `labels` (N,) int64. Two are equal if they are one."""

    pixels: np.ndarray
    labels: np.ndarray
    sha256: str | None = None  # of the files that hold pixels and labels, where it is known

    kept = True  # False: they were deleted since

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> int:
        return int(self.pixels.shape[1])


@dataclass(frozen=True)
class Dataset:
    """Training and test images. `names` are those of the labels: classes, or tasks if `folders` is "tasks"."""

    name: str
    names: tuple[str, ...]
    train: Images
    test: Images | None
    folders: str = "classes"
    fit: Fit = "crop"  # how the images became squares

    @property
    def size(self) -> int:
        return self.train.size


@dataclass(frozen=True, eq=False)
class Task:
    """One step of the stream: indices of its training images in `images`, and their classes (none: unlabelled)."""

    name: str
    images: Images
    train: np.ndarray
    classes: tuple[int, ...] = ()
    joined: int = 1  # how many tasks of the stream it holds


@dataclass(frozen=True, eq=False)
class EvalSplit:
    """Indices of labelled training images (the kNN bank) and test images. Evaluated from task number `since` on."""

    name: str
    bank_images: Images
    bank: np.ndarray
    test_images: Images
    test: np.ndarray
    since: int
    always: bool = False  # belongs to no task: tested after every one, however evaluation is limited

    @property
    def kept(self) -> bool:
        """Whether its images are still there."""
        return self.bank_images.kept and self.test_images.kept


@dataclass(frozen=True)
class Stream:
    name: str
    data: Dataset
    tasks: tuple[Task, ...]
    eval_splits: tuple[EvalSplit, ...]
    class_order: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # names of the labels of the eval splits' images
    untested: tuple[str, ...] = ()  # tasks whose classes the test images lack: they have no eval split
    arrived: int = 0  # how many of the tasks, the last ones, are not the stream's own: `ptlf learn` brought them

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def fit(self) -> Fit:
        return self.data.fit

    def joint(self) -> Stream:
        """All tasks' images as one task, evaluated on every split: the upper bound of continual learning."""
        train = np.sort(np.concatenate([task.train for task in self.tasks]))
        classes = tuple(c for task in self.tasks for c in task.classes)
        everything = Task("all tasks", self.data.train, train, classes, joined=len(self.tasks))
        splits = tuple(replace(eval_split, since=0) for eval_split in self.eval_splits)
        return replace(self, tasks=(everything,), eval_splits=splits)


@dataclass(frozen=True)
class StreamEntry:
    """A stream's defaults. `pack` is its packed set; None: embedded, or given by the user."""

    about: str
    pack: str | None = None
    tasks: int | None = None
    classes: int | None = None
    embedded: Callable[[Any], Dataset] | None = None  # makes the images, from an instance of Config
    Config: type[StreamConfig] = StreamConfig
    protocol: str = "lump"  # the settings its recipes start from
    own: bool = False  # images of the user's: what fits them and the machine is chosen, see run/fitting.py
    arriving: bool = False  # has no tasks of its own: `ptlf learn` brings them
    presets: Mapping[str, Any] = field(default_factory=dict, hash=False)  # settings of its recipes, over the protocol's


def stream_entry(make: Callable[[], Dataset], about: str = "", **more: Any) -> StreamEntry:
    """The entry of a function that takes no settings."""
    return StreamEntry(about, embedded=lambda config: make(), **more)


def packed(root: Path, name: str) -> Dataset:
    pack = open_pack(root, name)
    splits = {name: Images(pack.images(name), pack.labels(name), pack.split(name).checksum) for name in pack.splits}
    return Dataset(name, tuple(pack.names), splits["train"], splits.get("test"), pack.folders, pack.fit)


@functools.cache
def digits() -> Dataset:
    """scikit-learn's 1797 handwritten digits, 8x8 grey enlarged to 16x16 RGB; every fifth image is a test image."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8), 0..16 -> 0..255
    pixels = np.repeat(np.repeat(grey, 2, axis=1), 2, axis=2)[..., None].repeat(3, axis=3)
    labels = bunch.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 0
    train, test = (Images(np.ascontiguousarray(pixels[part]), labels[part]) for part in (~held_out, held_out))
    return Dataset("digits", tuple(str(digit) for digit in range(10)), train, test)


LabelledSet = Callable[[StreamConfig, Path, int, Fit], Dataset | None]


def open_stream(
    config: StreamConfig, source: StreamEntry, root: Path, seed: int, labelled: LabelledSet | None = None
) -> Stream:
    """labelled: opens `stream.labelled`."""
    stream, pack = f"stream {config.name!r}", config.pack or source.pack
    if source.embedded is not None:
        if config.pack is not None:
            raise UserError(f"{stream} is embedded and reads no stream.pack; use --stream.name folder")
        data = source.embedded(config)
    elif pack is None:
        raise UserError(f"{stream} needs stream.pack: the name given to `ptlf data pack`")
    else:
        data = packed(root, pack)
    if data.folders == "tasks":
        return unlabelled_stream(data, config, labelled and labelled(config, root, data.size, data.fit))
    if config.labelled is not None:
        raise UserError(f"{data.name} has a folder per class and its own test images; leave out stream.labelled")
    if config.groups is None:
        config = replace(config, tasks=config.tasks or source.tasks, classes=config.classes or source.classes)
        if config.tasks is None:
            raise UserError(f"{stream} needs stream.tasks (a number) or stream.groups (the classes of each task)")
    return split(data, config, seed)


def split(data: Dataset, config: StreamConfig, seed: int) -> Stream:
    """Divide the ordered classes among the tasks: consecutive classes, or the groups given."""
    if config.groups is not None:
        if config.tasks is not None or config.classes is not None or config.class_order != "natural":
            raise UserError("stream.groups is given; leave out stream.tasks, stream.classes and stream.class_order")
        if not config.groups or not all(config.groups):
            raise UserError(f"stream.groups must name at least one class per task, not {config.groups}")
        order = class_numbers([each for group in config.groups for each in group], data.names, "groups")
        rest = iter(order)
        groups = [tuple(islice(rest, len(group))) for group in config.groups]
    else:
        order, tasks = class_order(data.names, config, seed), config.tasks or 1
        per_task, left_over = divmod(len(order), tasks)
        if left_over:
            divisors = ", ".join(str(d) for d in range(1, len(order) + 1) if len(order) % d == 0)
            ways = f"choose stream.tasks from {divisors}, or name the classes of each task in stream.groups"
            raise UserError(f"{tasks} tasks do not divide the {len(order)} classes of {data.name}; {ways}")
        groups = [tuple(order[start : start + per_task]) for start in range(0, len(order), per_task)]
    made, eval_splits, untested = [], [], []
    for index, group in enumerate(groups):
        name = ", ".join(data.names[c] for c in group)
        train = indices(data.train, group, config.per_class)
        if len(train) == 0:
            raise UserError(f"task {index + 1} ({name}) of {data.name} has no training images")
        made.append(Task(name, data.train, train, group))
        if data.test is not None and len(test := indices(data.test, group, config.per_class)):
            eval_splits.append(EvalSplit(name, data.train, train, data.test, test, since=index))
        elif data.test is not None:
            untested.append(name)
    ordered = tuple(data.names[c] for c in order)
    return Stream(config.name, data, tuple(made), tuple(eval_splits), ordered, data.names, tuple(untested))


def unlabelled_stream(data: Dataset, config: StreamConfig, labelled: Dataset | None) -> Stream:
    """A stream with a folder of unlabelled images per task, evaluated on a separate labelled set, if there is one."""
    if config.tasks is not None and config.tasks != len(data.names):
        raise UserError(f"stream.tasks is {config.tasks}, but {data.name} has {len(data.names)} task folders")
    if config.classes is not None or config.groups is not None or config.class_order != "natural":
        raise UserError(f"{data.name} has a folder per task; leave out stream.classes, .groups and .class_order")
    chosen = [indices(data.train, (label,), config.per_class) for label in range(len(data.names))]
    tasks = tuple(Task(name, data.train, train) for name, train in zip(data.names, chosen, strict=True))
    if labelled is None:
        return Stream(config.name, data, tasks, ())
    if labelled.test is None:
        raise UserError(f"{labelled.name} has no test images; pack it with a test folder or with --test-fraction")
    if labelled.size != data.size:
        sizes = f"{labelled.size} px and {data.size} px"
        raise UserError(f"{labelled.name} and {data.name} have images of {sizes}; pack both at one size")
    bank, test = np.arange(len(labelled.train)), np.arange(len(labelled.test))
    split = EvalSplit(labelled.name, labelled.train, bank, labelled.test, test, since=0, always=True)
    return Stream(config.name, data, tasks, (split,), classes=labelled.names)


def single_task_stream(data: Dataset, name: str, seen: int = 1) -> Stream:
    """A labelled set to test an encoder with that did not learn it. seen: how many tasks the encoder has learnt."""
    stream = split(data, StreamConfig(name=name, tasks=1), 0)
    splits = tuple(replace(each, always=True) for each in stream.eval_splits)
    return replace(stream, eval_splits=splits, tasks=tuple(replace(task, joined=seen) for task in stream.tasks))


def class_order(names: Sequence[str], config: StreamConfig, seed: int) -> list[int]:
    wanted, count = config.class_order, config.classes or len(names)
    if count > len(names):
        raise UserError(f"stream.classes is {count}, the data set has {len(names)}")
    if wanted == "natural":
        return list(range(count))
    if wanted == "seeded":
        return np.random.default_rng(seed).permutation(count).tolist()
    if isinstance(wanted, str):
        raise UserError(f"stream.class_order must be natural, seeded or a list of classes, not {wanted!r}")
    order = class_numbers(wanted, names, "class_order")
    if len(order) < count:
        missing = ", ".join([name for c, name in enumerate(names) if c not in order][:8])
        raise UserError(f"stream.class_order has {len(order)} classes, the stream takes {count}; missing: {missing}")
    return order[:count]


def class_numbers(values: Sequence[str | int], names: Sequence[str], where: str) -> list[int]:
    """The labels of classes given by name or by number. If a class name is a number, the name wins."""
    known: dict[str | int, int] = {name: label for label, name in enumerate(names)}
    order: list[int] = []
    for value in values:
        label = known.get(str(value), value)
        if not isinstance(label, int) or not 0 <= label < len(names):
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise UserError(f"stream.{where} names {value!r}, which is not a class of this stream ({shown})")
        if label in order:
            raise UserError(f"stream.{where} names {names[label]} more than once; name each class once")
        order.append(label)
    return order


def indices(images: Images, labels: Sequence[int], per_class: int | None) -> np.ndarray:
    """Sorted indices of the images with these labels, at most the first `per_class` of each."""
    return np.sort(np.concatenate([np.flatnonzero(images.labels == label)[:per_class] for label in labels]))


def digest(images: Images, chosen: np.ndarray) -> str:
    """SHA-256 of the chosen images and their labels, or of the checksum of their files, where that is known."""
    if images.sha256 is not None:
        found = hashlib.sha256(images.sha256.encode())
        found.update(np.ascontiguousarray(chosen, dtype="<i8").tobytes())
    else:
        found = hashlib.sha256(np.ascontiguousarray(images.labels[chosen], dtype="<i8").tobytes())
        for part in np.array_split(chosen, max(1, len(chosen) // 1024)):
            found.update(np.ascontiguousarray(images.pixels[part]).tobytes())
    return found.hexdigest()


# Streams by name. To add one: pack its images (`ptlf data pack`) or write a loader such as `digits`, and add a line.
MEMORY_VIEWS = {"views": {"memory": "memory-tinyimagenet"}}
OWN_IMAGES = {"views": {"name": "gentle"}, "training": {"optimizer": {"name": "adamw"}, "lr": 1e-3}}
OWN_IMAGES |= {"probes": {"knn_task": {"k": 10}, "knn_class": {"k": 10}}}  # one k for all rows and verdicts
MEMBERS: dict[str, StreamEntry] = {
    "digits": stream_entry(digits, "scikit-learn's digits, embedded, 5 tasks x 2 classes", tasks=5, protocol="digits"),
    "split-cifar10": StreamEntry("CIFAR-10, 5 tasks x 2 classes, 32 px", "cifar10", tasks=5),
    "split-cifar100": StreamEntry("CIFAR-100, 20 tasks x 5 classes, 32 px", "cifar100", tasks=20),
    "split-tinyimagenet": StreamEntry(
        "first 100 classes of Tiny-ImageNet, 20 x 5, 64 px", "tinyimagenet", 20, 100, presets=MEMORY_VIEWS
    ),
    "imagenet100": StreamEntry("100 ImageNet classes, 5 tasks x 20, 224 px", "imagenet100", 5, protocol="cassle"),
    "arriving": StreamEntry(
        "tasks that arrive one by one: `ptlf learn RUN IMAGES`", own=True, arriving=True, presets=OWN_IMAGES
    ),
    "folder": StreamEntry(
        "your own packed image folder, stream.pack: a folder per task or per class", own=True, presets=OWN_IMAGES
    ),
}
STREAMS: Registry[StreamEntry] = Registry("stream", "ptlf.streams", StreamEntry, MEMBERS, wrap=stream_entry)
