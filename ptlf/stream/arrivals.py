"""Tasks that arrive while a run goes on. Each is a packed set in `RUN/tasks/NUMBER-NAME`, in the order of arrival."""

import functools
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.archives import Chunk
from ptlf.stream.datasets import packed
from ptlf.stream.decode import BATCH_BYTES, Fit, ImageFile, square
from ptlf.stream.disk import disk_errors, files_below
from ptlf.stream.folders import PackOptions, pack_files, pack_folder, subfolders
from ptlf.stream.given import pack_images
from ptlf.stream.pack import Pack, natural, open_pack, read_manifest, write_pack
from ptlf.stream.task import Dataset, EvalSplit, Images, Stream, StreamConfig, Task, exam

TASKS, INCOMING = "tasks", ".incoming"
NUMBERED = re.compile(r"(\d{4,})-(.+)")


class PackedImages(Images):
    """A split of a packed set. Files are opened where pixels or labels are asked for: a run with many tasks has few
    open."""

    def __init__(self, pack: Pack, split: str, numbers: np.ndarray) -> None:
        """numbers: the stream's label of each of the pack's names."""
        vars(self).update(pack=pack, split=split, numbers=numbers)  # the class is frozen

    pack: Pack
    split: str
    numbers: np.ndarray

    @property
    def pixels(self) -> np.ndarray:  # type: ignore[override]
        return self.pack.images(self.split)

    @property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        return self.numbers[self.pack.labels(self.split)]

    @property
    def sha256(self) -> str:  # type: ignore[override]
        return self.pack.splits[self.split].checksum

    def __len__(self) -> int:
        return self.pack.splits[self.split].count

    @property
    def size(self) -> int:
        return self.pack.size


def arrivals(folder: Path) -> list[Pack]:
    """The tasks that arrived in this run, in order. Only their pack.json is read, once in this process."""
    root = folder / TASKS
    return [manifest(root, name, identity(root / name / "pack.json")) for name in arrived_names(folder)]


def arrived_names(folder: Path) -> list[str]:
    root = folder / TASKS
    found = [NUMBERED.fullmatch(name) for name in os.listdir(root)] if root.is_dir() else []
    return [name for _, name in sorted((int(match[1]), match[0]) for match in found if match)]


@functools.lru_cache(maxsize=4096)
def manifest(root: Path, name: str, identity: tuple[int, int]) -> Pack:
    return read_manifest(root, name)


def identity(file: Path) -> tuple[int, int]:
    """Inode and date: another file has others."""
    stat = file.stat() if file.exists() else None
    return (stat.st_ino, stat.st_mtime_ns) if stat else (0, 0)


def task_name(pack: Pack) -> str:
    found = NUMBERED.fullmatch(pack.name)
    return found[2] if found else pack.name


def checksum(pack: Pack) -> str:
    """Of the training pixels."""
    return pack.split("train").sha256


def without_tasks(config: StreamConfig, root: Path, packs: Sequence[Pack]) -> Stream:
    """The stream `arriving` before its first task; size and shape of the images as in `packs`."""
    plain = StreamConfig(name=config.name, labelled=config.labelled, resident=config.resident)
    for field in fields(StreamConfig):
        if getattr(config, field.name) != getattr(plain, field.name):
            taken = f"stream {config.name!r} takes its tasks as they arrive"
            raise UserError(f"{taken}; leave out stream.{field.name}")
    if not packs:
        raise UserError(f"stream {config.name!r} has no task yet; `ptlf learn RUN IMAGES` brings the first")
    size = packs[0].size
    nothing = Images(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, np.int64))
    data = Dataset(config.name, (), nothing, None, "tasks", packs[0].fit)
    labelled = packed(root, config.labelled) if config.labelled else None
    return Stream(config.name, data, (), exam(labelled, data), classes=labelled.names if labelled else ())


def with_arrivals(stream: Stream, packs: Sequence[Pack]) -> Stream:
    """The stream, and then these tasks. Classes are known by name: a new one gets the next free label."""
    if not packs:
        return stream
    labels = {name: number for number, name in enumerate(stream.classes)}
    tasks, splits, order = list(stream.tasks), list(stream.eval_splits), list(stream.class_order)
    most = max(split.count for pack in packs for split in pack.splits.values())
    counting = np.arange(most)  # the tasks' indices are the beginnings of it
    for pack in packs:
        if pack.size != stream.size:
            sizes = f"{task_name(pack)} has images of {pack.size} px, and the stream of {stream.size} px"
            raise UserError(f"{sizes}; give images of one size")
        classes: tuple[int, ...] = ()
        numbers = np.zeros(len(pack.names), np.int64)
        if pack.folders == "classes":
            order += [name for name in pack.names if name not in order]
            numbers = np.array([labels.setdefault(name, len(labels)) for name in pack.names])
            classes = tuple(numbers.tolist())
        name, images = task_name(pack), PackedImages(pack, "train", numbers)
        bank = counting[: len(images)]
        if classes and "test" in pack.splits:
            tests = PackedImages(pack, "test", numbers)
            splits.append(EvalSplit(name, images, bank, tests, counting[: len(tests)], since=len(tasks)))
        tasks.append(Task(name, images, bank, classes))
    known: Mapping[str, Any] = {"class_order": tuple(order), "classes": tuple(labels), "arrived": len(packs)}
    return replace(stream, tasks=tuple(tasks), eval_splits=tuple(splits), **known)


class Arrays(NamedTuple):
    """Images in memory: (N, H, W, 3) uint8, and for each, if known, the number of its class in `names`."""

    images: np.ndarray
    labels: np.ndarray | None = None
    test_images: np.ndarray | None = None
    test_labels: np.ndarray | None = None
    names: Sequence[str] = ()


def pack_incoming(
    folder: Path,
    source: Path | str | Arrays | Sequence[Any],
    name: str | None,
    size: int | None,
    *,
    root: Path,
    default_size: int = 32,
    test_fraction: float = 0.0,
    **options: Any,
) -> Pack:
    """Pack what SOURCE holds as the next task of the run in `folder`, in a place where `arrivals` does not see it yet.

    A folder of images, at any depth, is a task without labels. With a `train` folder that holds a folder per class, or
    with `test_fraction`, it has labels. A packed set (its folder, or its name in `root`) and an .npz are taken as they
    are; a list or a data set as `given.pack_images` does.
    size: of the images in pixels; None: that of a packed set or array, else `default_size`.
    options: of `PackOptions`.
    """
    number, incoming = len(arrivals(folder)) + 1, folder / TASKS / INCOMING
    fit = PackOptions(**options).fit
    if isinstance(source, Arrays):
        place = f"{number:04}-{file_name(name or 'images')}"
        made = Pack(incoming / place, size or square_size(source.images), "tasks", (), fit=fit)
        return pack_arrays(source, made)
    if not isinstance(source, str | os.PathLike):
        target = incoming / f"{number:04}-{file_name(name or 'images')}"
        return pack_images(source, target, size or default_size, test_fraction=test_fraction, **options)
    given = find_pack(Path(source), root)
    path = given.path if given else Path(source)
    place = f"{number:04}-{file_name(name or (path.stem if path.is_file() else path.resolve().name))}"
    target, told = incoming / place, str(path.resolve())
    if test_fraction and (given or path.is_file()):
        raise UserError(f"--test-fraction is for a folder per class, and {source} is none; leave it out")
    if given:
        return pack_again(given, target, size)
    if path.is_file():
        arrays = read_npz(path)
        made = Pack(target, size or square_size(arrays.images), "tasks", (), source=told, fit=fit)
        return pack_arrays(arrays, made)
    size = size or default_size
    with disk_errors(path):
        if test_fraction or ((path / "train").is_dir() and subfolders(path / "train")):
            return pack_folder(path, incoming, place, size=size, test_fraction=test_fraction, **options)
        files = [ImageFile(0, str(file)) for file in files_below(path)]
    if not files:
        raise UserError(f"{path} holds no images")
    described = Pack(target, size, "tasks", (task_name_of(place),), source=told)
    return pack_files(described, {"train": files}, PackOptions(**options))


def accept(folder: Path, incoming: Pack) -> Pack:
    """The incoming pack as the run's next task."""
    target = folder / TASKS / incoming.name
    incoming.path.rename(target)
    return replace(incoming, path=target)


def clear(folder: Path, everything: bool = False) -> None:
    """Remove packs that were not accepted, and empty folders; with `everything` all tasks."""
    root = folder / TASKS
    shutil.rmtree(root / INCOMING, ignore_errors=True)
    for pack in arrivals(folder) if everything else ():
        shutil.rmtree(pack.path)
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()


def settled(folder: Path, settle: float, now: float) -> list[Path]:
    """Subfolders in which nothing has changed for `settle` seconds before `now`, oldest first.

    A folder is as old as its newest file. What counts as a change is also one that leaves the file's date alone, as a
    copy that keeps dates does.
    """
    if not folder.is_dir():
        raise UserError(f"the folder to watch, {folder}, is not there (any more); the run is as it was")
    found = []
    for name in subfolders(folder):
        path = folder / name
        try:
            stats = [path.stat(), *(file.stat() for file in files_below(path))]
        except OSError:  # a file went away: somebody is at work
            continue
        changed = max(max(stat.st_mtime, stat.st_ctime) for stat in stats)
        if settle <= 0 or now - changed >= settle:
            newest = max(stat.st_mtime for stat in stats[1:] or stats)
            found.append((newest, natural(name), path))
    return [path for _, _, path in sorted(found)]


def file_name(name: str) -> str:
    """The name with what a folder cannot be called replaced."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "task"


def task_name_of(place: str) -> str:
    return place.partition("-")[2]


def find_pack(source: Path | str, root: Path) -> Pack | None:
    """The packed set that SOURCE is: its folder, or its name in `root`. None if SOURCE is another folder or file."""
    path = Path(source)
    if (path / "pack.json").is_file():
        return open_pack(path.resolve().parent, path.resolve().name)
    if path.exists():
        return None
    if len(path.parts) == 1 and (root / path / "pack.json").is_file():
        return open_pack(root, str(source))
    raise UserError(f"there is no folder or file {source}, and no packed set of that name in {root}")


def pack_again(pack: Pack, target: Path, size: int | None) -> Pack:
    """A copy of a packed set."""
    if size not in (None, pack.size):
        raise UserError(f"{pack.name} has images of {pack.size} px, not {size}; pack it again with --size {size}")
    if "train" not in pack.splits:
        raise UserError(f"{pack.name} has no training images; pack it again with a train folder")
    chunks = {
        split: (found.count, blocks(pack.images(split), pack.labels(split))) for split, found in pack.splits.items()
    }
    return write_pack(replace(pack, path=target, splits={}, source=str(pack.path.resolve())), chunks)


def pack_arrays(arrays: Arrays, pack: Pack) -> Pack:
    """Images of another size are made square as those of files are."""
    pairs = {"train": (arrays.images, arrays.labels), "test": (arrays.test_images, arrays.test_labels)}
    names = tuple(arrays.names)
    if arrays.labels is None:
        names, pairs = (task_name_of(pack.name),), {"train": (arrays.images, np.zeros(len(arrays.images), np.int64))}
    elif not names:
        names = tuple(map(str, range(1 + int(max(labels.max() for _, labels in pairs.values() if labels is not None)))))
    chunks = {
        split: (len(images), blocks(images, labels, pack.size, pack.fit))
        for split, (images, labels) in pairs.items()
        if images is not None and labels is not None
    }
    return write_pack(replace(pack, folders="classes" if arrays.labels is not None else "tasks", names=names), chunks)


def blocks(images: np.ndarray, labels: np.ndarray, size: int | None = None, fit: Fit = "crop") -> Iterator[Chunk]:
    step = max(1, BATCH_BYTES // max(1, images[0].nbytes))
    for start in range(0, len(images), step):
        part = np.asarray(images[start : start + step])
        if size is not None and part.shape[1:3] != (size, size):
            part = np.stack([np.asarray(square(Image.fromarray(image), size, fit)) for image in part])
        yield part, labels[start : start + step]


def square_size(images: np.ndarray) -> int:
    return int(min(images.shape[1:3]))


def read_npz(path: Path) -> Arrays:
    """`images` (N, H, W, 3) uint8; `labels` (N,), `test_images`, `test_labels` and `names` if they are there."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array")
            found = {name: stored[name] for name in Arrays._fields if name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no folder of images, packed set or readable .npz: {error}") from None
    return check_arrays(found, str(path))


def check_arrays(found: Mapping[str, Any], where: str) -> Arrays:
    """As described by `Arrays`, or a sentence."""
    if "images" not in found:
        raise UserError(f"{where} holds no array `images`; store them as np.savez(FILE, images=...)")
    for images, labels in (("images", "labels"), ("test_images", "test_labels")):
        if (pixels := found.get(images)) is None:
            continue
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise UserError(f"{images} of {where} must be uint8 (N, H, W, 3), and is {pixels.dtype} {pixels.shape}")
        if not len(pixels):
            raise UserError(f"{where} holds no {images.replace('_', ' ')}")
        given = found.get(labels)
        if given is not None and (given.shape != (len(pixels),) or given.dtype.kind not in "iu" or given.min() < 0):
            raise UserError(f"{labels} of {where} must be one whole number from 0 for each of {len(pixels)} images")
    return Arrays(**{**found, "names": [str(name) for name in found.get("names", ())]})
