"""Packed data sets: the only format on disk that training reads.

`ROOT/NAME/` holds `pack.json` and, per split, `SPLIT.npy` (uint8, N x S x S x 3) and `SPLIT_labels.npy` (int64, N). A
pack is written to a hidden folder and renamed when complete, so `ROOT/NAME` is never incomplete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ptlf.core.errors import UserError
from ptlf.stream.archives import Chunk
from ptlf.stream.console import progress_bar
from ptlf.stream.disk import check_space, disk_errors, file_digest, staged
from ptlf.stream.sources import SOURCES

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


@dataclass(frozen=True)
class Pack:
    path: Path
    name: str
    size: int
    folders: Folders
    names: tuple[str, ...]  # of the classes or tasks, in label order
    splits: Mapping[str, Split]
    skipped: tuple[Mapping[str, str], ...]  # {"file", "why"}
    source: str

    def split(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.name} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.splits[split]

    def images(self, split: str) -> np.memmap:
        """(N, S, S, 3) uint8, memory-mapped, read-only."""
        return np.load(self.path / self.split(split).images, mmap_mode="r")

    def labels(self, split: str) -> np.ndarray:
        """(N,) int64: indices into `names`."""
        file = self.path / self.split(split).labels
        labels = np.load(file)
        if labels.min() < 0 or labels.max() >= len(self.names):
            raise UserError(f"{file} holds labels outside 0..{len(self.names) - 1}; {way_out(self.name)}")
        return labels


def data_root(option: str | None = None) -> Path:
    """The folder of packed sets: the option, else PTLF_DATA, else ~/.cache/ptlf."""
    return Path(option or os.environ.get("PTLF_DATA") or "~/.cache/ptlf").expanduser()


def open_pack(root: Path, name: str) -> Pack:
    pack = read_manifest(Path(root), name)
    for problem in file_problems(pack).values():
        raise UserError(f"{problem}; {way_out(name)}")
    return pack


def list_packs(root: Path) -> list[Pack]:
    """All packed sets in `root`, sorted by name. Only their pack.json is read."""
    return [read_manifest(Path(root), name) for name in pack_names(Path(root))]


def pack_names(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    found = [folder.name for folder in root.iterdir() if not folder.name.startswith(".")]
    return sorted((name for name in found if (root / name / "pack.json").is_file()), key=natural)


def verify_pack(root: Path, name: str, *, progress: bool = True) -> list[str]:
    """All problems of a packed set, with checksums compared; empty if there are none."""
    pack = read_manifest(Path(root), name)
    problems = file_problems(pack)
    expected: dict[Path, str] = {}
    for split in pack.splits.values():
        expected |= {pack.path / split.images: split.sha256, pack.path / split.labels: split.labels_sha256}
    files = {file: sha for file, sha in expected.items() if file not in problems}
    total = sum(file.stat().st_size for file in files)
    with disk_errors(pack.path), progress_bar(f"verifying {name}", total, progress, unit="bytes") as advance:
        for file, sha in files.items():
            actual = file_digest(file, "sha256", advance)
            if actual != sha:
                problems[file] = f"{file} has sha256 {actual}, pack.json says {sha}"
    return list(problems.values())


def read_manifest(root: Path, name: str) -> Pack:
    check_name(name)
    file = root / name / "pack.json"
    if not file.is_file():
        there = ", ".join(pack_names(root)) or "nothing"
        raise UserError(f"no packed data set {name!r} in {root} (there: {there}); {way_out(name, overwrite=False)}")
    try:
        return parse_manifest(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {error}); {way_out(name)}") from error


def parse_manifest(file: Path) -> Pack:
    data = json.loads(file.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
    splits = {split: Split(**entry) for split, entry in data["splits"].items()}
    files = [name for split in splits.values() for name in (split.images, split.labels)]
    if not splits or any(Path(name).name != name for name in files):
        raise ValueError("splits must name files beside pack.json")
    if data["folders"] not in ("classes", "tasks"):
        raise ValueError(f"folders is {data['folders']!r}")
    size, names, skipped = int(data["size"]), tuple(data["names"]), tuple(data["skipped"])
    return Pack(file.parent, data["name"], size, data["folders"], names, splits, skipped, data["source"])


def file_problems(pack: Pack) -> dict[Path, str]:
    """Problem by file, checked by presence, size and header only."""
    found = {}
    for split in pack.splits.values():
        images, labels = pack.path / split.images, pack.path / split.labels
        found[images] = npy_problem(images, (split.count, pack.size, pack.size, 3), "uint8", split.bytes)
        found[labels] = npy_problem(labels, (split.count,), "int64")
    return {file: problem for file, problem in found.items() if problem}


def npy_problem(file: Path, shape: tuple[int, ...], dtype: str, size: int | None = None) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    try:
        with open(file, "rb") as opened:
            np.lib.format.read_magic(opened)
            actual, fortran, kind = np.lib.format.read_array_header_1_0(opened)
            full_size = opened.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize
    except (OSError, ValueError) as error:
        return f"{file} ({file.stat().st_size} bytes) is no readable .npy file ({error})"
    expected, found = size or full_size, file.stat().st_size
    if found != expected:
        return f"{file} has {found} bytes where {expected} are expected"
    if (actual, fortran, kind) != (shape, False, np.dtype(dtype)):
        return f"{file} holds {kind} {actual} where {dtype} {shape} is expected"
    return None


def way_out(name: str, overwrite: bool = True) -> str:
    """The command that makes the set again, for error messages."""
    flag = " --overwrite" if overwrite else ""
    if name in SOURCES:
        return f"run `ptlf data get {name}{flag}`"
    return f"run `ptlf data pack FOLDER --name {name} --size PIXELS{flag}`"


# ----------------------------------------------------------------------------------------------------------- writing


def write_pack(
    root: Path,
    name: str,
    *,
    names: Sequence[str],
    folders: Folders,
    splits: Mapping[str, tuple[int, Iterable[Chunk]] | tuple[np.ndarray, np.ndarray]],
    size: int,
    source: str = "",
    skipped: list[dict[str, str]] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Pack:
    """Write a packed set. A split is either (images, labels) or (count, chunks); chunks are written as they come.

    `skipped` may grow while the chunks are read. The images written plus the images skipped must equal `count`.
    """
    root, skipped = Path(root), [] if skipped is None else skipped
    check_name(name)
    if len(set(names)) != len(names):
        raise UserError(f"names repeat: {quoted(sorted({each for each in names if list(names).count(each) > 1}))}")
    streams = {split: as_stream(value) for split, value in splits.items()}
    with disk_errors(root / name), staged(root / name) as folder:
        check_free(root, name, overwrite)
        check_space(root, sum(count for count, _ in streams.values()) * size * size * 3)
        entries = {}
        for split, (count, chunks) in streams.items():
            with progress_bar(f"packing {name} {split}", count, progress) as advance:
                entries[split] = write_split(folder, split, count, chunks, len(names), size, skipped, advance)
        manifest = asdict(Pack(folder, name, size, folders, tuple(names), entries, tuple(skipped), source))
        manifest = {"schema": SCHEMA, **{key: value for key, value in manifest.items() if key != "path"}}
        (folder / "pack.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    return open_pack(root, name)


def as_stream(value: tuple[Any, Any]) -> tuple[int, Iterable[Chunk]]:
    first, second = value
    return (len(first), [(first, second)]) if isinstance(first, np.ndarray) else (int(first), second)


def write_split(
    folder: Path,
    split: str,
    count: int,
    chunks: Iterable[Chunk],
    classes: int,
    size: int,
    skipped: list[dict[str, str]],
    advance: Callable[[int], None],
) -> Split:
    file, labels_file = folder / f"{split}.npy", folder / f"{split}_labels.npy"
    digest, labels, skipped_before = hashlib.sha256(), [np.zeros(0, np.int64)], len(skipped)
    header = npy_header(count, size)
    digest.update(header)
    with open(file, "wb") as out:
        out.write(header)
        for images, chunk_labels in chunks:
            check_chunk(images, chunk_labels, size, classes)
            if len(images):
                block = np.ascontiguousarray(images).data
                digest.update(block)
                out.write(block)
                labels.append(np.asarray(chunk_labels, np.int64))
            advance(len(images))
        written, left_out = sum(map(len, labels)), len(skipped) - skipped_before
        if written + left_out != count or not written:
            raise UserError(f"{split} announced {count} images, but {written} arrived and {left_out} were skipped")
        out.seek(0)
        out.write(npy_header(written, size))
    buffer = io.BytesIO()  # np.save into a file drops the errno of a failed write
    np.save(buffer, np.concatenate(labels))
    labels_file.write_bytes(buffer.getvalue())
    return Split(
        count=written,
        images=file.name,
        bytes=file.stat().st_size,
        sha256=digest.hexdigest() if written == count else file_digest(file, "sha256"),
        labels=labels_file.name,
        labels_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
    )


def check_chunk(images: np.ndarray, labels: np.ndarray, size: int, classes: int) -> None:
    if images.dtype != np.uint8 or images.shape != (len(labels), size, size, 3):
        raise ValueError(f"chunk is {images.dtype} {images.shape}, not uint8 {(len(labels), size, size, 3)}")
    if len(labels) and not 0 <= np.min(labels) <= np.max(labels) < classes:
        raise UserError(f"labels {np.min(labels)}..{np.max(labels)} do not fit {classes} names")


def npy_header(count: int, size: int) -> bytes:
    """Its length does not depend on `count`, because numpy pads it, so it can be rewritten once the count is known."""
    buffer = io.BytesIO()
    shape = (count, size, size, 3)
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------------------- names


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise UserError(f"{name!r} cannot name a data set; use letters, digits, '.', '_', '-' and begin with no '.'")


def check_free(root: Path, name: str, overwrite: bool) -> None:
    target = Path(root) / name
    if not target.exists():
        return
    if not (target / "pack.json").is_file():
        raise UserError(f"{target} exists and is no packed data set; choose another name or remove it")
    if not overwrite:
        raise UserError(f"{target} is already packed; give --overwrite to replace it")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: "task2" before "task10"."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] + [(-1, 0, name)]


def quoted(names: Iterable[str], most: int = 10) -> str:
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
