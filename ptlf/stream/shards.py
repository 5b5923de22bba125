"""WebDataset shards: .tar files in which KEY.jpg and KEY.cls (or KEY.json) lie side by side."""

import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from posixpath import normpath
from typing import Any, NamedTuple

from PIL import Image

from ptlf.core.errors import UserError
from ptlf.stream.rows import LABEL_KEYS, ImageSplit, Row, plain_label
from ptlf.stream.splits import Part, by_split, files_with, labelled_splits

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
SIZES = (ValueError, OverflowError, MemoryError)  # by sizes in a header that no file has
DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, *SIZES)
MAX_LABEL, MAX_IMAGE = 1 << 20, 1 << 29  # bytes of a member


class Sample(NamedTuple):
    name: str  # of the image in its shard
    image: bytes
    label: Any


def shard_files(path: Path) -> list[Path]:
    """The shards of a set: one file, or a folder of them; none if `path` is something else."""
    if path.is_dir():
        return files_with(path, ENDINGS)
    return [path] if path.is_file() and path.name.lower().endswith(ENDINGS) else []


def given_shards(path: Path) -> dict[str, ImageSplit]:
    parts = {split: shard_part(files) for split, files in by_split(shard_files(path), path).items()}
    return labelled_splits(parts, path)


def shard_part(files: Sequence[Path]) -> Part:
    """The labels are read at once, the images when they are asked for."""
    labels = [sample.label for file in files for sample in samples(file, images=False)]
    if not labels:
        wanted = "a shard has KEY.jpg or KEY.png, and for labels KEY.cls or KEY.json"
        raise UserError(f"{files[0]} holds no images; {wanted}")

    def read() -> Iterator[Row]:
        for file in files:
            for sample in samples(file):
                yield Row(f"{file.name}/{sample.name}", sample.image, sample.label)

    return Part(len(labels), read, labels)


def samples(file: Path, images: bool = True) -> Iterator[Sample]:
    """Neighbours with the same key are one sample. images: False leaves their bytes unread."""
    key = ""
    found: dict[str, Any] = {}  # its members: "image", ".cls", ".json"
    files: dict[str, tarfile.TarInfo] = {}  # by name, the member that holds the bytes: a hard link has none of its own
    try:
        with tarfile.open(file, "r:*") as shard:
            for member in shard:
                if member.size < 0:  # the next member would be this one again
                    raise ValueError(f"{member.name} has {member.size} bytes")
                if member.islnk():
                    target = files.get(normpath(member.linkname))
                    if target is None and not is_of_a_sample(member.name):
                        continue
                    if target is None:
                        raise ValueError(f"{member.name} is a hard link to {member.linkname}, which is not before it")
                elif member.isfile():
                    target = member
                else:
                    continue
                files[normpath(member.name)] = target
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                if not stem:  # a hidden file
                    continue
                if f"{folder}/{stem}" != key:
                    yield from whole(found, file)
                    key, found = f"{folder}/{stem}", {}
                kind = kind_of(ending)
                if kind in Image.registered_extensions() and "image" not in found:
                    found["image"] = member.name, content(shard, target, MAX_IMAGE, file) if images else b""
                elif kind in (".cls", ".json"):
                    found[kind] = content(shard, target, MAX_LABEL, file)
            yield from whole(found, file)
    except DAMAGE as error:
        why = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise UserError(f"{file} is no readable shard: {why}") from None


def kind_of(name: str) -> str:
    """The name's last ending, such as ".jpg"."""
    return f".{name.lower().rpartition('.')[2]}"


def is_of_a_sample(name: str) -> bool:
    return kind_of(name) in (*Image.registered_extensions(), ".cls", ".json")


def content(shard: tarfile.TarFile, member: tarfile.TarInfo, most: int, file: Path) -> bytes:
    if member.size > most:
        raise UserError(f"{file}: {member.name} has {member.size} bytes; at most {most} are read of such a file")
    opened = shard.extractfile(member)
    return opened.read() if opened else b""


def whole(found: dict[str, Any], file: Path) -> Iterator[Sample]:
    """The sample of these members, if one is an image. A .cls file counts before a .json file."""
    if "image" not in found:
        return
    name, image = found["image"]
    label: Any = None
    try:
        if ".cls" in found:
            text = found[".cls"].decode().strip()
            label = int(text) if text.lstrip("-").isdigit() else text
        elif ".json" in found:
            about = json.loads(found[".json"])
            known = [about[key] for key in LABEL_KEYS if key in about] if isinstance(about, dict) else [about]
            label = known[0] if known else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: the label of {name} cannot be read: {error}") from None
    yield Sample(name, image, plain_label(label))
