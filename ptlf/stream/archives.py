"""The data sets that `ptlf data get` knows: where their official archives are, and how they are read.

To add one: a line in SOURCES, with a function that reads its archive without extracting it.
"""

import codecs
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ptlf.core.errors import UserError
from ptlf.core.reading import read_text
from ptlf.stream.disk import files_below
from ptlf.stream.rows import ImageSplit, Row, array_split, list_split, with_labels

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Splits = Mapping[str, ImageSplit]  # "train" and "test", with the names of the classes


class ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays. A pickle that names any other class or function is refused."""

    ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        return self.ALLOWED[module, name]


def unpickle(content: bytes) -> dict[bytes, Any]:
    try:
        value = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a malformed pickle can raise almost any exception
        raise UserError(f"the archive has a member that is no CIFAR batch ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"the archive has a member that is no CIFAR batch (it holds a {type(value).__name__})")
    return {key.encode() if isinstance(key, str) else key: item for key, item in value.items()}


def read_members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named members of a tar file, in one pass."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.name in names and (opened := tar.extractfile(member)) is not None:
                found[member.name] = opened.read()
    if missing := [name for name in names if name not in found]:
        raise UserError(f"{archive} has no member {', '.join(missing)}")
    return found


def cifar_split(batches: Sequence[bytes], names: Sequence[str], labels_key: bytes) -> ImageSplit:
    read = [cifar_batch(content, labels_key) for content in batches]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return with_labels(array_split(images), labels.tolist(), names)


def cifar_batch(content: bytes, labels_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) uint8 and labels (N,)."""
    batch = unpickle(content)
    data, labels = batch.get(b"data"), np.asarray(batch.get(labels_key, []))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), 3072):
        raise UserError("the archive has a member that is no CIFAR batch (no (N, 3072) bytes with N labels)")
    return np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def cifar10(archive: Path) -> Splits:
    train = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    members = read_members(archive, [*train, "cifar-10-batches-py/test_batch"])
    test = members.pop("cifar-10-batches-py/test_batch")
    parts = {"train": [members[name] for name in train], "test": [test]}
    return {split: cifar_split(part, CIFAR10_NAMES, b"labels") for split, part in parts.items()}


def cifar100(archive: Path) -> Splits:
    train, test, meta = (f"cifar-100-python/{part}" for part in ("train", "test", "meta"))
    members = read_members(archive, [train, test, meta])
    names = unpickle(members[meta]).get(b"fine_label_names")
    if not isinstance(names, list):
        raise UserError(f"{archive}: {meta} has no fine_label_names")
    names = [each.decode() if isinstance(each, bytes) else str(each) for each in names]
    parts = {"train": members[train], "test": members[test]}
    return {split: cifar_split([part], names, b"fine_labels") for split, part in parts.items()}


def tinyimagenet(archive: Path) -> Splits:
    top = "tiny-imagenet-200/"
    with zipfile.ZipFile(archive) as opened:
        files = [member.removeprefix(top) for member in opened.namelist() if member.startswith(top)]
        annotations = opened.read(f"{top}val/val_annotations.txt").decode()

    def in_archive(part: ImageSplit) -> ImageSplit:
        def read() -> Iterator[Row]:
            with zipfile.ZipFile(archive) as opened:
                for row in part.read():
                    yield row._replace(name=f"{archive}:{top}{row.name}", image=opened.read(top + row.name))

        return ImageSplit(part.count, read, part.names, part.labels)

    return {split: in_archive(part) for split, part in tiny_splits(files, annotations, archive).items()}


def tinyimagenet_folder(folder: Path) -> Splits | None:
    """The extracted archive, or the folder that it lies in; None for a folder of other form."""
    folder = next((path for path in (folder / "tiny-imagenet-200", folder) if path.is_dir()), folder)
    if not (folder / "val" / "val_annotations.txt").is_file():
        return None
    files = [file.relative_to(folder).as_posix() for part in ("train", "val") for file in files_below(folder / part)]
    return tiny_splits(files, read_text(folder / "val" / "val_annotations.txt"), folder)


def tiny_splits(files: Sequence[str], annotations: str, top: Path) -> Splits:
    """Classes are the sorted wnids. The classes of validation images, our test split, are in val_annotations.txt."""
    wnids = dict(line.split("\t")[:2] for line in annotations.splitlines() if "\t" in line)
    images = [PurePosixPath(file) for file in files if file.endswith(".JPEG")]
    train = sorted((file.parts[1], str(file)) for file in images if file.parts[0] == "train")
    val = sorted((wnids.get(file.name, ""), str(file)) for file in images if file.parts[0] == "val")
    names = sorted({wnid for wnid, _ in train})
    number = {wnid: index for index, wnid in enumerate(names)}
    if unknown := sorted(file for wnid, file in val if wnid not in number):
        raise UserError(f"{top}: val_annotations.txt gives no known class for {unknown[0]}")
    splits = {}
    for split, part in (("train", train), ("test", val)):
        rows = [Row(file, top / file, number[wnid]) for wnid, file in part]
        splits[split] = replace(list_split(rows), names=names)
    return splits


@dataclass(frozen=True)
class Source:
    about: str
    size: int  # pixels
    classes: int
    url: str | None = None  # of the official archive; None: cannot be downloaded
    md5: str = ""
    read: Callable[[Path], Splits] | None = None  # of the archive
    read_folder: Callable[[Path], Splits | None] | None = None  # of an extracted archive without folders per class
    names: tuple[str, ...] | None = None  # class folders to use, in label order; None: all, sorted


TORONTO = "https://www.cs.toronto.edu/~kriz/cifar-"
STANFORD = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
IMAGENET100_WNIDS = tuple((Path(__file__).parent / "imagenet100_wnids.txt").read_text().split())
FROM_IMAGENET = "give --source an ImageNet folder with train/WNID/ and val/WNID/; 100 classes are packed at 256 px"

SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "60,000 images of 10 classes at 32 px",
        32,
        10,
        f"{TORONTO}10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        cifar10,
    ),
    "cifar100": Source(
        "60,000 images of 100 classes at 32 px",
        32,
        100,
        f"{TORONTO}100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        cifar100,
    ),
    "tinyimagenet": Source(
        "110,000 images of 200 classes at 64 px",
        64,
        200,
        STANFORD,
        "90528d7ca1a48142e341f4ef8d21d0de",
        tinyimagenet,
        tinyimagenet_folder,
    ),
    "imagenet100": Source(FROM_IMAGENET, 256, 100, names=IMAGENET100_WNIDS),
}
