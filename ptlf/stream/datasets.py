"""Open a stream: from packed files, or the digits embedded in scikit-learn."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.stream.pack import open_pack
from ptlf.stream.task import Dataset, Images, Stream, StreamConfig, split, unlabelled_stream


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
    if "train" not in splits:
        raise UserError(f"{name} has no training images; pack it again with a train folder")
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


def open_stream(config: StreamConfig, source: StreamEntry, root: Path, seed: int) -> Stream:
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
        return unlabelled_stream(data, config, packed(root, config.labelled) if config.labelled else None)
    if config.labelled is not None:
        why = "this set has a folder per class and is evaluated on its own test images"
        raise UserError(f"stream.labelled is for sets with a folder per task; {why}; leave stream.labelled out")
    if config.groups is None:
        config = replace(config, tasks=config.tasks or source.tasks, classes=config.classes or source.classes)
        if config.tasks is None:
            raise UserError(f"{stream} needs stream.tasks (a number) or stream.groups (the classes of each task)")
    return split(data, config, seed)
