"""Tasks that arrive while a run goes on. Each is a packed set in `RUN/tasks/NUMBER-NAME`, in the order of arrival."""

import hashlib
import io
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.core.files import check_held, remove_folder, write_whole
from ptlf.stream.disk import files_below, natural, not_an_image, subfolders
from ptlf.stream.images import find_images, is_image_folder, own_side
from ptlf.stream.pack import Pack, open_pack, read_manifest
from ptlf.stream.packing import PackOptions, labelled_set, pack_images, write_squares
from ptlf.stream.rows import array_split, subset, with_labels
from ptlf.stream.task import Dataset, EvalSplit, Images, Stream, StreamConfig, Task, unlabelled_stream

TASKS, INCOMING = "tasks", ".incoming"
KNOWN, DIGEST = "train.sha256", "S32"  # beside a task's images: the digest of each, which stays when they are deleted
LOOKS = ".looks"  # beside the tasks: how watched folders look whose images are all learnt, see `settled`
NUMBERED = re.compile(r"(\d{4,})-(.+)")


class PackedImages(Images):
    """A split of a packed set. Files are opened when they are needed: a run with many tasks has few open."""

    def __init__(self, pack: Pack, split: str, numbers: np.ndarray) -> None:
        """numbers: the stream's label of each of the pack's names."""
        self.pack, self.split, self.numbers = pack, split, numbers
        self.sha256 = pack.splits[split].checksum

    def __len__(self) -> int:
        return self.pack.splits[self.split].count

    @property
    def kept(self) -> bool:  # type: ignore[override]
        part = self.pack.splits[self.split]
        return all((self.pack.path / name).is_file() for name in (part.images, part.labels))

    @property
    def size(self) -> int:
        return self.pack.size

    @property
    def pixels(self) -> np.ndarray:  # type: ignore[override]
        return self.pack.images(self.split)

    @property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        return self.numbers[self.pack.labels(self.split)]


def arrivals(folder: Path) -> list[Pack]:
    """The tasks that arrived in this run, in order. Only their pack.json is read."""
    names = arrived_names(folder)
    for number, name in enumerate(names, start=1):
        if int(name.partition("-")[0]) != number:
            raise missing(folder, number)
    return [read_manifest(folder / TASKS, name) for name in names]


def missing(folder: Path, number: int, name: str = "NAME") -> UserError:
    """number: of the task among those that arrived, from 1."""
    file = folder / TASKS / f"{number:04}-{folder_name(name)}"
    return UserError(f"task {number} of those that arrived is missing: there is no {file}; put it back")


def arrived_names(folder: Path) -> list[str]:
    root = folder / TASKS
    names = [name for name in os.listdir(root) if NUMBERED.fullmatch(name)] if root.is_dir() else []
    return sorted(names, key=natural)


def is_arrival(path: Path) -> bool:
    """Whether this, in a run's folder of tasks, is what ptlf puts there."""
    return path.name.startswith(".") or bool(NUMBERED.fullmatch(path.name) and (path / "pack.json").is_file())


def task_name(pack: Pack) -> str:
    return pack.name.partition("-")[2]


def without_tasks(config: StreamConfig, root: Path, packs: Sequence[Pack]) -> Stream:
    """The stream `arriving` before its first task; size and shape of the images as in `packs`."""
    plain = StreamConfig(name=config.name, labelled=config.labelled, resident=config.resident)
    for field in fields(StreamConfig):
        if getattr(config, field.name) != getattr(plain, field.name):
            raise UserError(f"the tasks of stream {config.name!r} arrive; leave out stream.{field.name}")
    if not packs:
        raise UserError(f"stream {config.name!r} has no task yet; `ptlf learn RUN IMAGES` brings the first")
    size = packs[0].size
    nothing = Images(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, np.int64))
    data = Dataset(config.name, (), nothing, None, "tasks", packs[0].fit)
    return unlabelled_stream(data, config, labelled_set(config, root, size, packs[0].fit))


def with_arrivals(stream: Stream, packs: Sequence[Pack]) -> Stream:
    """The stream, and then these tasks. Classes are known by name: a new one gets the next free label."""
    labels = {name: number for number, name in enumerate(stream.classes)}
    tasks, splits, order = list(stream.tasks), list(stream.eval_splits), list(stream.class_order)
    for pack in packs:
        if pack.size != stream.size:
            raise UserError(f"{task_name(pack)} has images of {pack.size} px; those before have {stream.size} px")
        classes: tuple[int, ...] = ()
        numbers = np.zeros(len(pack.names), np.int64)
        if pack.folders == "classes":
            order += [name for name in pack.names if name not in order]
            numbers = np.array([labels.setdefault(name, len(labels)) for name in pack.names])
            classes = tuple(numbers.tolist())
        name, images = task_name(pack), PackedImages(pack, "train", numbers)
        bank = np.arange(len(images))
        if classes and "test" in pack.splits:
            tests = PackedImages(pack, "test", numbers)
            splits.append(EvalSplit(name, images, bank, tests, np.arange(len(tests)), since=len(tasks)))
        tasks.append(Task(name, images, bank, classes))
    known: dict[str, Any] = {"class_order": tuple(order), "classes": tuple(labels), "arrived": len(packs)}
    return replace(stream, tasks=tuple(tasks), eval_splits=tuple(splits), **known)


def pack_incoming(
    folder: Path,
    source: Any,
    name: str | None,
    size: int | None,
    *,
    root: Path,
    default_size: int = 32,
    test_fraction: float = 0.0,
    **options: Any,
) -> Pack:
    """Pack SOURCE as the next task of the run in `folder`, in a place where `arrivals` does not see it yet.

    SOURCE is what `packing.pack_images` takes, or the name of a packed set in `root`. A folder of images is a task
    without labels; with a folder per class in its `train`, or with `test_fraction`, it has them.
    size: None: that of a packed set or of arrays, else `default_size`. options: of `PackOptions`.
    """
    number, word, labelled = len(arrivals(folder)) + 1, "images", None
    if isinstance(source, str | os.PathLike):
        source = path = find_images(os.fspath(source), root).absolute()
        word = path.stem if path.is_file() else path.resolve().name
        if (path / "pack.json").is_file():
            pack = open_pack(path.parent, path.name)
            if size not in (None, pack.size):
                raise UserError(f"{pack.name} has images of {pack.size} px, not {size}; pack it with --size {size}")
            options["fit"] = pack.fit
        elif is_image_folder(path):
            labelled = bool(test_fraction or ((path / "train").is_dir() and subfolders(path / "train")))
    target = folder / TASKS / INCOMING / f"{number:04}-{folder_name(name or word)}"
    size = size or own_side(source, default_size)
    return pack_images(source, target, size, labelled=labelled, test_fraction=test_fraction, **options)


def known_images(incoming: Pack, learnt: Sequence[Pack]) -> tuple[np.ndarray, list[str]]:
    """Which of its training images, (N,) bool, are in earlier tasks, by any name; and those tasks."""
    own, tasks = digests(incoming), []
    known = np.zeros(len(own), bool)
    for number, pack in enumerate(learnt, start=1):
        found = np.isin(own, digests(pack))
        if found.any():
            tasks.append(place(pack, number))
        known |= found
    return known, tasks


def digests(pack: Pack) -> np.ndarray:
    """Of each training image, (N,) or none if nothing is left of them."""
    with suppress(UserError):
        return pack.load(KNOWN, (pack.split("train").count,), np.dtype(DIGEST))
    with suppress(UserError):
        return np.array([hashlib.sha256(image).hexdigest()[:32] for image in pack.images("train")], DIGEST)
    return np.zeros(0, DIGEST)


def place(pack: Pack, number: int) -> str:
    """number: of the task among those that arrived, from 1."""
    return f"task {task_name(pack)}, number {number} of those that arrived"


def reduced(pack: Pack, rows: np.ndarray) -> Pack:
    """The pack, in its place, with these training images only, and the test images of their classes."""
    keep = {"train": np.isin(np.arange(pack.split("train").count), rows)}
    if "test" in pack.splits:
        keep["test"] = np.isin(pack.labels("test"), pack.labels("train")[rows])
    splits = {name: with_labels(array_split(pack.images(name)), pack.labels(name), pack.names) for name in keep}
    splits = {name: subset(part, keep[name]) for name, part in splits.items() if keep[name].any()}
    return write_squares(replace(pack, splits={}), splits, PackOptions(fit=pack.fit, overwrite=True, progress=False))


def accept(folder: Path, incoming: Pack) -> Pack:
    """The incoming pack as the run's next task. One with the name of an earlier task gets a number: monday-2."""
    taken, name = {task_name(pack) for pack in arrivals(folder)}, task_name(incoming)
    ends = ["", *(f"-{number}" for number in range(2, len(taken) + 2))]
    end = next(end for end in ends if name + end not in taken)
    target = folder / TASKS / (incoming.name + end)
    np.save(data := io.BytesIO(), digests(incoming))
    write_whole(incoming.path / KNOWN, data.getvalue())
    check_held(target)
    incoming.path.rename(target)
    return replace(incoming, path=target)


def clear(folder: Path, everything: bool = False) -> None:
    """Remove packs that were not accepted, and empty folders; with `everything` all tasks."""
    root = folder / TASKS
    for name in (INCOMING, *(arrived_names(folder) if everything else ())):
        remove_folder(root / name)
    if everything:
        (root / LOOKS).unlink(missing_ok=True)
    with suppress(OSError):  # it holds tasks, or is not there
        root.rmdir()


def check_watched(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"the folder to watch, {folder}, is not there (any more); the run is as it was")


def settled(folder: Path, settle: float, now: float) -> list[tuple[Path, str]]:
    """Subfolders in which nothing changed within `settle` seconds of `now`, the oldest image's first, and how each
    looks: a digest of its files' names, sizes and dates. What counts is when a file was changed here: its own date may
    be of a camera whose clock is wrong."""
    check_watched(folder)
    found = []
    for name in subfolders(folder):
        path = folder / name
        try:
            files = {file: file.stat() for file in files_below(path)}
            dates = [stat.st_ctime for stat in (path.stat(), *files.values())]
        except OSError:  # a file went away: somebody is at work
            continue
        images = [stat.st_mtime for file, stat in files.items() if not not_an_image(file.name)]
        if images and all(settle <= abs(now - date) for date in dates):
            looks = [(str(f.relative_to(path)), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in files.items()]
            look = hashlib.sha256(repr(looks).encode()).hexdigest()
            found.append((min(images), natural(name), path, look))
    return [(path, look) for _, _, path, look in sorted(found)]


def next_new(run: Path, watched: Path, settle: float, now: float, seen: Collection[str]) -> tuple[Path, str] | None:
    """The first subfolder that does not look as in `seen`, or as when all its images were learnt; and how it looks."""
    known = {*seen, *noted_looks(run)}
    return next(((path, look) for path, look in settled(watched, settle, now) if look not in known), None)


def noted_looks(run: Path) -> list[str]:
    file = run / TASKS / LOOKS
    return file.read_bytes().decode(errors="replace").split() if file.is_file() else []


def note_look(run: Path, look: str) -> None:
    """All images of a watched folder that looks so are learnt."""
    write_whole(run / TASKS / LOOKS, "\n".join([*noted_looks(run), look]))


def folder_name(name: str) -> str:
    """The name with what a folder cannot be called replaced."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "task"
