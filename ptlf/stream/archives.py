"""The data sets that `ptlf data get` knows: lines of SOURCES, with functions that read archives unextracted."""

import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ptlf.stream.rows import ImageSplit, Row, array_split, with_labels

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Splits = dict[str, ImageSplit]  # "train" and "test", with the names of the classes


class ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays. A pickle that names any other class or function is refused."""

    ALLOWED = (
        *(("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")),
        *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")
        return super().find_class(module, name)


def cifar(archive: Path, train: Sequence[str], test: str, labels: bytes, names: Sequence[str] = ()) -> Splits:
    """names: of the classes; else the archive has them. Its checksum was compared: it holds what it should."""
    read = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:  # in one pass: going back would decompress it anew
            if (name := PurePosixPath(member.name).name) in (*train, test, "meta"):
                read[name] = ArrayUnpickler(tar.extractfile(member), encoding="bytes").load()  # type: ignore[arg-type]

    def split(parts: Sequence[str]) -> ImageSplit:
        planes = np.concatenate([read[part][b"data"] for part in parts]).reshape(-1, 3, 32, 32)
        found = np.concatenate([read[part][labels] for part in parts])
        return with_labels(array_split(np.ascontiguousarray(planes.transpose(0, 2, 3, 1))), found, names)

    names = names or [name.decode() for name in read["meta"][b"fine_label_names"]]
    return {"train": split(train), "test": split([test])}


BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
cifar10 = partial(cifar, train=BATCHES, test="test_batch", labels=b"labels", names=CIFAR10_NAMES)
cifar100 = partial(cifar, train=["train"], test="test", labels=b"fine_labels")


def tinyimagenet(archive: Path) -> Splits:
    """Classes are the sorted wnids. The classes of validation images, our test split, are in val_annotations.txt."""
    with zipfile.ZipFile(archive) as opened:
        files = [PurePosixPath(name) for name in opened.namelist() if name.endswith(".JPEG")]
        annotations = opened.read("tiny-imagenet-200/val/val_annotations.txt").decode()
    wnids = dict(line.split("\t")[:2] for line in annotations.splitlines())
    train = sorted((file.parts[2], str(file)) for file in files if file.parts[1] == "train")
    val = sorted((wnids[file.name], str(file)) for file in files if file.parts[1] == "val")
    names = sorted({wnid for wnid, _ in train})

    def split(part: Sequence[tuple[str, str]]) -> ImageSplit:
        def rows() -> Iterator[Row]:
            with zipfile.ZipFile(archive) as opened:
                for wnid, file in part:
                    yield Row(file, opened.read(file), wnid)

        return ImageSplit(len(part), rows, names)

    return {"train": split(train), "test": split(val)}


@dataclass(frozen=True)
class Source:
    about: str
    size: int  # pixels
    classes: int
    url: str | None = None  # of the official archive; None: cannot be downloaded
    md5: str = ""
    read: Callable[[Path], Splits] | None = None  # of the archive
    names: tuple[str, ...] | None = None  # class folders to use, in label order; None: all, sorted


CIFAR10, CIFAR100 = (f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz" for classes in (10, 100))
STANFORD = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
IMAGENET100_WNIDS = tuple((Path(__file__).parent / "imagenet100_wnids.txt").read_text().split())
FROM_IMAGENET = "give --source an ImageNet folder with train/WNID/ and val/WNID/; 100 classes are packed at 256 px"

SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "60,000 images of 10 classes at 32 px", 32, 10, CIFAR10, "c58f30108f718f92721af3b95e74349a", cifar10
    ),
    "cifar100": Source(
        "60,000 images of 100 classes at 32 px", 32, 100, CIFAR100, "eb9058c3a382ffc7106e4002c42a8d85", cifar100
    ),
    "tinyimagenet": Source(
        "110,000 images of 200 classes at 64 px", 64, 200, STANFORD, "90528d7ca1a48142e341f4ef8d21d0de", tinyimagenet
    ),
    "imagenet100": Source(FROM_IMAGENET, 256, 100, names=IMAGENET100_WNIDS),
}
