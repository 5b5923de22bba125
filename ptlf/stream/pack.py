"""Packed data sets, the only format on disk that training reads: `ROOT/NAME/` holds `pack.json` and, per split,
`SPLIT.npy` (uint8, N x S x S x 3) and `SPLIT_labels.npy` (int64, N)."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ptlf.core.errors import UserError
from ptlf.core.files import check_regular, file_digest
from ptlf.core.reading import DAMAGE, check_shape, explain, parse_json, read_text
from ptlf.stream.archives import SOURCES
from ptlf.stream.decode import FITS, Fit
from ptlf.stream.disk import disk_errors, natural, progress_bar

SPLIT = {"count": (1, 10**10), "bytes": (1, 10**15), "images": str, "sha256": str, "labels": str, "labels_sha256": str}
MANIFEST = {"schema": int, "size": (1, 100_000), "names": [str], "splits": {"*": SPLIT}, "fit?": str}
MANIFEST |= {"folders": str, "skipped": [{"file": str, "why": str}], "source": str}
Folders = Literal["classes", "tasks"]
SCHEMA = 1


@dataclass(frozen=True)
class Split:
    count: int
    images: str  # file name
    bytes: int
    sha256: str
    labels: str  # file name
    labels_sha256: str

    @property
    def checksum(self) -> str:
        """Of pixels and labels."""
        return f"{self.sha256}-{self.labels_sha256}"


@dataclass(frozen=True)
class Pack:
    path: Path
    size: int
    folders: Folders
    names: Sequence[str]  # of the classes or tasks, in label order
    splits: Mapping[str, Split] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)  # {"file", "why"}
    source: str = ""
    fit: Fit = "crop"  # how its images became squares

    @property
    def name(self) -> str:
        return self.path.name

    def split(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.name} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.splits[split]

    def images(self, split: str) -> np.memmap:
        """(N, S, S, 3) uint8, memory-mapped, read-only."""
        part = self.split(split)
        return self.load(part.images, (part.count, self.size, self.size, 3), np.uint8)

    def labels(self, split: str) -> np.ndarray:
        """(N,) int64: indices into `names`."""
        part = self.split(split)
        labels = np.array(self.load(part.labels, (part.count,), np.int64))
        if labels.min() < 0 or labels.max() >= len(self.names):
            outside = f"{self.path / part.labels} holds labels outside 0..{len(self.names) - 1}"
            raise UserError(f"{outside}; {hint(self.name)}")
        return labels

    def load(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """A file of the set, memory-mapped."""
        file = self.path / name
        try:
            check_regular(file)
            array = np.load(file, mmap_mode="r")
        except Exception as error:  # numpy can raise almost any exception on a malformed file
            raise UserError(f"{file} cannot be read: {explain(error)}; {hint(self.name)}") from None
        if (array.shape, array.dtype) != (shape, dtype):
            wanted = f"{np.dtype(dtype)} {shape} is expected; {hint(self.name)}"
            raise UserError(f"{file} holds {array.dtype} {array.shape} where {wanted}")
        return array


def data_root(option: str | None = None) -> Path:
    """The folder of packed sets: the option, else PTLF_DATA, else ~/.cache/ptlf."""
    return Path(option or os.environ.get("PTLF_DATA") or "~/.cache/ptlf").expanduser()


def open_pack(root: Path, name: str) -> Pack:
    """The set, with its files looked at but not read."""
    pack = read_manifest(Path(root), name)
    for split in pack.splits:
        pack.images(split)
        pack.labels(split)
    return pack


def list_packs(root: Path) -> list[Pack]:
    """All packed sets in `root`, sorted by name. Only their pack.json is read."""
    return [read_manifest(root, name) for name in pack_names(root)]


def pack_names(root: Path) -> list[str]:
    return sorted((file.parent.name for file in root.glob("[!.]*/pack.json")), key=natural)


def verify_pack(root: Path, name: str, *, progress: bool = True) -> list[str]:
    """All problems of a packed set, with checksums compared; empty if there are none."""
    pack, problems = read_manifest(Path(root), name), []
    total = sum(part.bytes for part in pack.splits.values())
    with disk_errors(pack.path), progress_bar(f"verifying {name}", total, progress, unit="bytes") as advance:
        for split, part in pack.splits.items():
            files = (pack.images, part.images, part.sha256), (pack.labels, part.labels, part.labels_sha256)
            for read, file, expected in files:
                try:
                    read(split)
                    if (actual := file_digest(pack.path / file, "sha256", advance)) != expected:
                        problems.append(f"{pack.path / file} has sha256 {actual}, pack.json says {expected}")
                except UserError as error:
                    problems.append(str(error))
    return problems


def read_manifest(root: Path, name: str) -> Pack:
    check_name(name)
    file = root / name / "pack.json"
    if not file.is_file():
        there = ", ".join(pack_names(root)) or "nothing"
        raise UserError(f"no packed data set {name!r} in {root} (there: {there}); {hint(name, overwrite=False)}")
    try:
        data = parse_json(read_text(file))
        check_shape(data, MANIFEST)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
        splits = {split: Split(**entry) for split, entry in data["splits"].items()}
        files = [name for split in splits.values() for name in (split.images, split.labels)]
        if "train" not in splits or any(Path(name).name != name or not name.isascii() for name in files):
            raise ValueError("splits must be train and test, with files beside pack.json")
        fit = data.get("fit") or FITS[0]
        if data["folders"] not in get_args(Folders) or fit not in FITS:
            raise ValueError(f"folders is {data['folders']!r}, fit is {fit!r}")
        names, skipped = tuple(data["names"]), list(data["skipped"])
        return Pack(file.parent, data["size"], data["folders"], names, splits, skipped, data["source"], fit)
    except (UserError, OSError, *DAMAGE) as error:
        raise UserError(f"{file} cannot be read ({explain(error)}); {hint(name)}") from error


def hint(name: str, overwrite: bool = True) -> str:
    """The command that makes the set again, for error messages."""
    command = f"get {name}" if name in SOURCES else f"pack FOLDER --name {name} --size PIXELS"
    return f"run `ptlf data {command}{' --overwrite' if overwrite else ''}`"


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise UserError(f"{name!r} cannot name a data set; use letters, digits, '.', '_', '-' and begin with no '.'")


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse a folder that is no packed set, or one that is and must not be replaced."""
    check_name(target.name)
    if target.exists() and not (target / "pack.json").is_file():
        raise UserError(f"{target} exists and is no packed data set; choose another name or remove it")
    if target.exists() and not overwrite:
        raise UserError(f"{target} is already packed; give --overwrite to replace it")
