"""Packed data sets: the one form on the disk that training reads.

`ROOT/NAME/` holds per split `SPLIT.npy` (uint8, N x S x S x 3), `SPLIT_labels.npy` (int64, N) and `pack.json`. A pack
is written into a hidden folder beside its place and renamed when whole, so a folder with its proper name is whole.

How an image becomes S x S x 3: EXIF orientation applied; transparency composited on white; 16-bit grey divided by 257;
CMYK, palette and grey converted to RGB; short side resized to S (bicubic, antialiased) and cropped around the centre.
A broken or animated image is refused, or skipped and recorded by name; never used in part.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ptlf.errors import UserError, unknown

Folders = Literal["classes", "tasks"]
OnError = Literal["refuse", "skip"]
Chunk: TypeAlias = tuple[np.ndarray, np.ndarray]  # images (n, S, S, 3) uint8, labels (n,) int64

SCHEMA = 1
CHUNK_BYTES = 4 << 20
SHOWN_SKIPS = 20


# ---------------------------------------------------------------------------------------------------------- reading


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
    names: tuple[str, ...]  # of classes or tasks, in label order
    splits: Mapping[str, Split]
    skipped: tuple[Mapping[str, str], ...]  # {"file", "why"}
    source: str

    def split(self, split: str) -> Split:
        if split not in self.splits:
            raise UserError(f"{self.name} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.splits[split]

    def images(self, split: str) -> np.memmap:
        """(N, S, S, 3) uint8, read-only, on the disk."""
        return np.load(self.path / self.split(split).images, mmap_mode="r")

    def labels(self, split: str) -> np.ndarray:
        """(N,) int64: indices into `names`."""
        file = self.path / self.split(split).labels
        labels = np.load(file)
        if labels.min() < 0 or labels.max() >= len(self.names):
            raise UserError(f"{file} holds labels outside 0..{len(self.names) - 1}; {way_out(self.name)}")
        return labels


def open_pack(root: Path, name: str) -> Pack:
    pack = read_manifest(Path(root), name)
    for problem in file_problems(pack).values():
        raise UserError(f"{problem}; {way_out(name)}")
    return pack


def list_packs(root: Path) -> list[Pack]:
    """All packed sets below `root`, by name; their files are not looked at."""
    return [read_manifest(Path(root), name) for name in pack_names(Path(root))]


def pack_names(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    found = [folder.name for folder in root.iterdir() if not folder.name.startswith(".")]
    return sorted((name for name in found if (root / name / "pack.json").is_file()), key=natural)


def verify_pack(root: Path, name: str, *, progress: bool = True) -> list[str]:
    """Everything that is wrong with a packed set, checksums included; an empty list when it is whole."""
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
    names = [name for split in splits.values() for name in (split.images, split.labels)]
    if not splits or any(Path(name).name != name for name in names):
        raise ValueError("splits must name files beside pack.json")
    if data["folders"] not in ("classes", "tasks"):
        raise ValueError(f"folders is {data['folders']!r}")
    return Pack(
        path=file.parent,
        name=data["name"],
        size=int(data["size"]),
        folders=data["folders"],
        names=tuple(data["names"]),
        splits=splits,
        skipped=tuple(data["skipped"]),
        source=data["source"],
    )


def file_problems(pack: Pack) -> dict[Path, str]:
    """What is wrong with which file, as far as presence, size and header tell."""
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
            whole = opened.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize
    except (OSError, ValueError) as error:
        return f"{file} ({file.stat().st_size} bytes) is no readable .npy file ({error})"
    expected, found = size or whole, file.stat().st_size
    if found != expected:
        return f"{file} has {found} bytes where {expected} are expected"
    if (actual, fortran, kind) != (shape, False, np.dtype(dtype)):
        return f"{file} holds {kind} {actual} where {dtype} {shape} is expected"
    return None


def way_out(name: str, overwrite: bool = True) -> str:
    from ptlf.stream.fetch import SOURCES  # fetch builds on this file; only this sentence needs it here

    flag = " --overwrite" if overwrite else ""
    if name in SOURCES:
        return f"run `ptlf data get {name}{flag}`"
    return f"run `ptlf data pack FOLDER --name {name} --size PIXELS{flag}`"


# ---------------------------------------------------------------------------------------------------------- writing


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
    """Write a packed set. A split is (images, labels), or (count, chunks) and then streamed to the disk.

    `skipped` may grow while chunks are drawn: what arrives plus what was skipped must make up `count`.
    """
    root, skipped = Path(root), [] if skipped is None else skipped
    if len(set(names)) != len(names):
        raise UserError(f"names repeat: {quoted(sorted({each for each in names if list(names).count(each) > 1}))}")
    streams = {split: as_stream(value) for split, value in splits.items()}
    with disk_errors(root / name), staged(root, name, overwrite) as folder:
        check_space(root, sum(count for count, _ in streams.values()) * size * size * 3)
        entries = {}
        for split, (count, chunks) in streams.items():
            with progress_bar(f"packing {name} {split}", count, progress) as advance:
                entries[split] = write_split(folder, split, count, chunks, len(names), size, skipped, advance)
        manifest = {
            "schema": SCHEMA,
            "name": name,
            "size": size,
            "folders": folders,
            "names": list(names),
            "splits": {split: asdict(entry) for split, entry in entries.items()},
            "skipped": skipped,
            "source": source,
        }
        write_synced(folder / "pack.json", json.dumps(manifest, indent=1, ensure_ascii=False).encode())
    return open_pack(root, name)


def as_stream(value: tuple[Any, Any]) -> tuple[int, Iterable[Chunk]]:
    first, second = value
    return (len(first), iter([(first, second)])) if isinstance(first, np.ndarray) else (int(first), second)


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
        for images, chunk_labels in closing(chunks):
            check_chunk(images, chunk_labels, size, classes)
            if len(images):
                block = np.ascontiguousarray(images).data
                digest.update(block)
                out.write(block)
                labels.append(np.asarray(chunk_labels, np.int64))
            advance(len(images))
        written, lost = sum(map(len, labels)), len(skipped) - skipped_before
        if written + lost != count or not written:
            raise UserError(f"{split} announced {count} images, but {written} arrived and {lost} were skipped")
        out.seek(0)
        out.write(npy_header(written, size))
        out.flush()
        os.fsync(out.fileno())
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate(labels))
    write_synced(labels_file, buffer.getvalue())
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
    """Always the same length: numpy leaves room for the first axis to grow, so the count can be put right later."""
    buffer = io.BytesIO()
    shape = (count, size, size, 3)
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@contextmanager
def staged(root: Path, name: str, overwrite: bool) -> Iterator[Path]:
    """A hidden folder that becomes ROOT/NAME when the block ends well, and vanishes when it does not."""
    check_name(name)
    target, partial = root / name, root / f".{name}.partial-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f".{name}.lock", f"{name} is being packed"):
        remove_leftovers(root, name)
        check_free(root, name, overwrite)
        try:
            partial.mkdir()
            yield partial
            sync_folder(partial)
            replace_folder(partial, target)
            sync_folder(root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def check_free(root: Path, name: str, overwrite: bool) -> None:
    target = Path(root) / name
    if not target.exists():
        return
    if not (target / "pack.json").is_file():
        raise UserError(f"{target} exists and is no packed data set; choose another name or remove it")
    if not overwrite:
        raise UserError(f"{target} is already packed; give --overwrite to replace it")


def remove_leftovers(root: Path, name: str) -> None:
    """Clear what a killed process left behind. Only for the holder of the lock."""
    for folder in list(root.iterdir()):
        found = re.fullmatch(rf"\.{re.escape(name)}\.(partial|old)-\d+", folder.name)
        if found and found[1] == "old" and not (root / name).exists():
            os.rename(folder, root / name)  # killed between the two renames of `replace_folder`
        elif found:
            shutil.rmtree(folder)


def replace_folder(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(partial, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked(file: Path, busy: str) -> Iterator[None]:
    """Hold the lock `file`, which the system lets go with the process, however that ends."""
    handle = take_lock(file, busy)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def take_lock(file: Path, busy: str) -> int:
    import fcntl  # absent on Windows, where packs can still be read

    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(os.fstat(handle), os.stat(file)):
                return handle  # otherwise its last holder removed it in between
        except BlockingIOError as error:
            os.close(handle)
            raise UserError(f"{busy} by another process (it holds {file}); wait for it") from error
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                return handle  # a file system without locks
            os.close(handle)
            raise
        os.close(handle)


def write_synced(file: Path, content: bytes) -> None:
    with open(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise UserError(f"no space left on {root}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a path into a sentence."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on {where}; free some, or choose another place with --data-root") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"no permission for {where}; change it, or choose another place with --data-root"
            ) from error
        raise UserError(f"{where}: {error.strerror or error}") from error


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise UserError(f"{name!r} cannot name a data set; use letters, digits, '.', '_', '-' and begin with no '.'")


def closing(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Draw from `chunks` and, however drawing ends, let a generator clean up at once."""
    try:
        yield from chunks
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def file_digest(file: Path, algorithm: str, advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


@contextmanager
def progress_bar(text: str, total: float | None, show: bool, unit: str = "images") -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`. The bar is drawn on stderr."""
    counter = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = [TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount: bar.advance(task, amount)


def say(text: str) -> None:
    print(text, file=sys.stderr)


# --------------------------------------------------------------------------------------------------------- decoding


class BadImage(Exception):
    """Why an image cannot be used."""


class ImageFile(NamedTuple):
    label: int
    member: str  # path of the file, or its name inside `archive`
    archive: str | None = None  # a zip file

    @property
    def shown(self) -> str:
        return f"{self.archive}:{self.member}" if self.archive else self.member


def decode_image(file: str | io.BytesIO, size: int) -> np.ndarray:
    """(S, S, 3) uint8, or BadImage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large but allowed, or odd metadata: the pixels decide
            with Image.open(file) as image:
                frames = getattr(image, "n_frames", 1)
                # a camera's MPO holds a photo and its preview or gain map, not an animation
                if frames > 1 and image.format != "MPO":
                    raise BadImage(f"animated or multi-page, {frames} frames")
                image.load()
                return np.asarray(square(to_rgb(ImageOps.exif_transpose(image)), size))
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image in a known format") from None
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    except Exception as error:  # Pillow's readers raise nearly anything on malformed bytes
        raise BadImage(f"{type(error).__name__}: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return grey16_to_rgb(np.asarray(image))
    if image.mode == "F":
        raise BadImage("floating-point pixels have no defined range")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def grey16_to_rgb(values: np.ndarray) -> Image.Image:
    if values.min() < 0 or values.max() > 65535:
        raise BadImage(f"integer pixels {values.min()}..{values.max()} do not fit 16 bits")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB")  # 65535 / 257 = 255


def square(image: Image.Image, size: int) -> Image.Image:
    """Resize the short side to `size` and crop the centre, in one resampling."""
    if image.size == (size, size):
        return image
    short = min(image.size)
    left, top = (image.width - short) / 2, (image.height - short) / 2
    return image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))


def decode_batch(files: Sequence[ImageFile], size: int) -> tuple[np.ndarray, np.ndarray, list[tuple[str, str]]]:
    """Images (n, S, S, 3), labels (n,), and (file, why) for each that failed."""
    images, labels, problems = [], [], []
    for file in files:
        try:
            images.append(decode_image(open_image(file), size))
            labels.append(file.label)
        except BadImage as problem:
            problems.append((file.shown, str(problem)))
    stacked = np.stack(images) if images else np.zeros((0, size, size, 3), np.uint8)
    return stacked, np.array(labels, np.int64), problems


def open_image(file: ImageFile) -> str | io.BytesIO:
    if file.archive is not None:
        return io.BytesIO(open_zip(file.archive).read(file.member))
    try:
        if os.path.getsize(file.member) == 0:
            raise BadImage("empty file, 0 bytes")
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    return file.member


@functools.lru_cache(maxsize=1)
def open_zip(archive: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(archive)


@contextmanager
def decoders(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that decode; None means this one."""
    if workers == 1:
        yield None
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_decoder)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a decoding process died: out of memory, or a script that packs without `if __name__ == '__main__':`; "
            "try --workers 1"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_decoder() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def decode_all(
    files: Sequence[ImageFile], size: int, pool: ProcessPoolExecutor | None, workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[str, str]]]]:
    """Batches in the order of `files`; at most 2 batches per worker are held in memory."""
    step = min(256, max(1, CHUNK_BYTES // (size * size * 3)))
    batches = (files[start : start + step] for start in range(0, len(files), step))
    if pool is None:
        yield from (decode_batch(batch, size) for batch in batches)
        return
    running: deque[Future] = deque()
    for batch in batches:
        running.append(pool.submit(decode_batch, batch, size))
        if len(running) >= 2 * workers:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def pack_images(
    root: Path,
    name: str,
    *,
    names: Sequence[str],
    folders: Folders,
    splits: Mapping[str, Sequence[ImageFile]],
    size: int,
    source: str,
    on_error: OnError = "refuse",
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Pack:
    """Decode listed image files and pack them, in the order given."""
    if on_error not in ("refuse", "skip"):
        raise unknown("on_error", on_error, ("refuse", "skip"))
    if size < 1 or (workers is not None and workers < 1):
        raise UserError(f"size and workers must be at least 1, not {size} and {workers}")
    skipped: list[dict[str, str]] = []
    total = sum(map(len, splits.values()))
    if workers is None:
        workers = min(os.cpu_count() or 1, 1 + total // 1000)  # starting a process costs about as much as 1000 images

    with decoders(workers) as pool:

        def chunks(files: Sequence[ImageFile]) -> Iterator[Chunk]:
            seen: set[int] = set()
            for images, labels, problems in decode_all(files, size, pool, workers):
                if problems and on_error == "refuse":
                    file, why = problems[0]
                    raise UserError(f"{file} cannot be packed: {why}; repair or remove it, or give --on-error skip")
                skipped.extend({"file": file, "why": why} for file, why in problems)
                seen.update(labels.tolist())
                yield images, labels
            if lost := {file.label for file in files} - seen:
                raise UserError(f"no readable image is left in {quoted(names[label] for label in sorted(lost))}")

        pack = write_pack(
            root,
            name,
            names=names,
            folders=folders,
            splits={split: (len(files), chunks(files)) for split, files in splits.items()},
            size=size,
            source=source,
            skipped=skipped,
            overwrite=overwrite,
            progress=progress,
        )
    report_skipped(pack, total)
    return pack


def report_skipped(pack: Pack, total: int) -> None:
    if not pack.skipped:
        return
    say(f"{pack.name}: skipped {len(pack.skipped)} of {total} images:")
    for entry in pack.skipped[:SHOWN_SKIPS]:
        say(f"  {entry['file']}: {entry['why']}")
    if len(pack.skipped) > SHOWN_SKIPS:
        say(f"  and {len(pack.skipped) - SHOWN_SKIPS} more, all named in {pack.path / 'pack.json'}")


# ---------------------------------------------------------------------------------------------------------- folders


def pack_folder(
    source: Path,
    root: Path,
    name: str,
    *,
    size: int,
    folders: Folders = "classes",
    on_error: OnError = "refuse",
    workers: int | None = None,
    overwrite: bool = False,
    test_fraction: float = 0.0,
    names: Sequence[str] | None = None,
    progress: bool = True,
) -> Pack:
    """Pack a folder of images: `train/NAME/...` (and `test/` or `val/`), or `NAME/...` directly.

    One folder per class, or per task; files at any depth below it belong to it, hidden files (".x") do not. `names`
    restricts and orders the folders. Where there is no test folder, `test_fraction` holds out files evenly spread over
    each class.
    """
    source = Path(source)
    if folders not in ("classes", "tasks"):
        raise unknown("folders", folders, ("classes", "tasks"))
    check_name(name)
    check_free(root, name, overwrite)
    with disk_errors(source):
        trees = split_folders(source)
        if names is None:
            names = folder_names(trees["train"])
            check_test_names(trees)
        splits = {split: list_images(tree, names) for split, tree in trees.items()}
    if test_fraction:
        check_fraction(test_fraction, folders, "test" in splits)
        splits = hold_out(splits["train"], names, test_fraction)
    return pack_images(
        root,
        name,
        names=names,
        folders=folders,
        splits=splits,
        size=size,
        source=str(source.resolve()),
        on_error=on_error,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )


def split_folders(source: Path) -> dict[str, Path]:
    """{"train": ..., "test": ...?}. A folder `train` without folders in it is a class that is called so."""
    if not source.is_dir():
        raise UserError(f"{source} is no folder; give one that holds a folder per class or task")
    inside = subfolders(source)
    if not inside:
        raise UserError(f"{source} holds no folders; put the images into one folder per class or task")
    if "train" not in inside or not subfolders(source / "train"):
        if set(inside) <= {"train", "test", "val"}:
            raise UserError(f"{source / inside[0]} holds no folders; put the images into one folder per class or task")
        note_unused(source, inside)
        return {"train": source}
    trees, known = {"train": source / "train"}, set(subfolders(source / "train"))
    candidates = [split for split in ("test", "val") if split in inside]
    usable = [split for split in candidates if known & set(subfolders(source / split))]
    if candidates and not usable:
        raise UserError(f"{source / candidates[0]} holds none of the folders of {source / 'train'}")
    if usable:
        trees["test"] = source / usable[0]
    note_unused(source, ["train", *usable[:1]])
    note_unused(trees["train"], list(known))
    return trees


def note_unused(folder: Path, used: Iterable[str]) -> None:
    unused = sorted({entry.name for entry in folder.iterdir() if not entry.name.startswith(".")} - set(used))
    if unused:
        say(f"note: not packed from {folder}: {quoted(unused)}")


def folder_names(folder: Path) -> list[str]:
    names = subfolders(folder)
    if not names:
        raise UserError(f"{folder} holds no folders; put the images into one folder per class or task")
    return names


def subfolders(folder: Path) -> list[str]:
    return sorted((e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")), key=natural)


def list_images(tree: Path, names: Sequence[str]) -> list[ImageFile]:
    if missing := [name for name in names if not (tree / name).is_dir()]:
        raise UserError(f"{tree} has no folder {quoted(missing)}")
    listed = []
    for label, name in enumerate(names):
        files = files_below(tree / name)
        if not files:
            raise UserError(f"{tree / name} holds no files; fill it or remove it")
        listed += [ImageFile(label, str(file)) for file in files]
    return listed


def files_below(folder: Path) -> list[Path]:
    """All files that are not hidden, sorted by path; links are followed, but no folder is visited twice."""
    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    for parent, inside, files in os.walk(folder, followlinks=True, onerror=raise_error):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:
            inside.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def raise_error(error: OSError) -> None:
    raise error


def check_test_names(trees: Mapping[str, Path]) -> None:
    if "test" in trees and (extra := set(subfolders(trees["test"])) - set(subfolders(trees["train"]))):
        raise UserError(f"{trees['test']} has folders that {trees['train']} lacks: {quoted(sorted(extra))}")


def check_fraction(fraction: float, folders: str, has_test: bool) -> None:
    if not 0 < fraction < 1:
        raise UserError(f"test_fraction is {fraction}; it must lie between 0 and 1")
    if folders == "tasks":
        raise UserError("test_fraction needs folders='classes'; give tasks their own test/ folder")
    if has_test:
        raise UserError("test_fraction is given, but the source has a test folder; use one of them")


def hold_out(files: Sequence[ImageFile], names: Sequence[str], fraction: float) -> dict[str, list[ImageFile]]:
    """1/k holds out every k-th file of each class; other fractions are spread as evenly."""
    share = Fraction(fraction).limit_denominator(1000)
    splits: dict[str, list[ImageFile]] = {"train": [], "test": []}
    position = [0] * len(names)
    for file in files:
        i = position[file.label] = position[file.label] + 1
        splits["test" if int(i * share) > int((i - 1) * share) else "train"].append(file)
    for split, part in splits.items():
        if lacking := set(range(len(names))) - {file.label for file in part}:
            short = quoted(names[label] for label in sorted(lacking))
            raise UserError(f"test_fraction {fraction} leaves no {split} image in {short}; it has too few files")
    return splits


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: "task2" before "task10"."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] + [(-1, 0, name)]


def quoted(names: Iterable[str], most: int = 10) -> str:
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
