"""`ptlf data get`: download a data set's official archive (or read it from the disk), check it, pack it."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from ptlf.core.errors import UserError, unknown
from ptlf.core.files import file_digest
from ptlf.stream.archives import SOURCES, Source, Splits
from ptlf.stream.disk import disk_errors, progress_bar
from ptlf.stream.folders import pack_folder, subfolders
from ptlf.stream.pack import Pack, check_target, data_root
from ptlf.stream.rows import number_classes
from ptlf.stream.squares import PackOptions, write_squares

__all__ = ["SOURCES", "data_root", "get"]

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 1 << 18
MAX_BYTES = 4 << 30  # of an archive; the largest one known has 250 MB


def get(
    name: str,
    root: Path,
    *,
    source: str | Path | None = None,
    url: str | None = None,
    keep_archive: bool = False,
    **options: Any,  # of `PackOptions`
) -> Pack:
    """Pack a named data set as ROOT/NAME: its official archive, or `source`, that archive or an image folder."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    entry, target, packing = SOURCES[name], Path(root) / name, PackOptions(**options)
    if source is not None and url:
        raise UserError("give one of --source and --url, not both")
    if source is None and entry.url is None:
        raise UserError(f"{name} cannot be downloaded: {entry.about}")
    check_target(target, packing.overwrite)
    if source is not None:
        with disk_errors(Path(source)):
            return pack_source(entry, Path(source).expanduser(), target, packing)
    folder = target.parent / ".downloads" / name
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = pack_splits(entry, download(entry, url, folder, name, packing.progress), target, packing)
            if not keep_archive:
                shutil.rmtree(folder)
        finally:
            for empty in (folder, folder.parent):
                with suppress(OSError):
                    empty.rmdir()  # fails if the folder is not empty
    return made


def pack_splits(entry: Source, source: Path, target: Path, options: PackOptions, splits: Splits | None = None) -> Pack:
    """Pack the splits of a folder, or else those of the archive."""
    place = str(source.resolve()) if splits else source.name
    if splits is None:
        assert entry.read is not None
        splits = entry.read(source)
    names = splits["train"].names or ()
    if len(names) != entry.classes:
        raise UserError(f"{source} has {len(names)} classes, {target.name} has {entry.classes}")
    pack = Pack(target, entry.size, "classes", (), source=place)
    return write_squares(pack, splits, options, partial(number_classes, source=place, names=names))


def pack_source(entry: Source, source: Path, target: Path, options: PackOptions) -> Pack:
    """Pack the archive or the image folder that the user has on the disk."""
    name = target.name
    if source.is_dir():
        if entry.read_folder and (splits := entry.read_folder(source)):
            return pack_splits(entry, source, target, options, splits)
        if not (source / "train").is_dir() or not any((source / split).is_dir() for split in ("test", "val")):
            raise UserError(f"{source} must hold train/CLASS/... and test/CLASS/... or val/CLASS/... for {name}")
        if entry.names is None and (count := len(subfolders(source / "train"))) != entry.classes:
            raise UserError(f"{source / 'train'} has {count} class folders, {name} has {entry.classes}")
        return pack_folder(source, target.parent, name, size=entry.size, names=entry.names, **vars(options))
    if not source.is_file():
        raise UserError(f"--source {source} does not exist")
    if entry.url is None:
        raise UserError(f"--source {source} is a file; {entry.about}")
    if (md5 := file_digest(source, "md5")) != entry.md5:
        whose = f"the archive of {name} has {entry.md5}"
        raise UserError(f"{source} has md5 {md5}, {whose}; download it again ({entry.url})")
    return pack_splits(entry, source, target, options)


class DownloadBar:
    """What pooch tells of a download, on a bar. Ends one that is too large."""

    total = 0  # bytes that the server will send; 0: it does not say

    def __init__(self, advance: Callable[..., None]) -> None:
        self.advance, self.done = advance, 0

    def update(self, amount: int) -> None:
        self.done += amount
        if max(self.total, self.done - BLOCK_BYTES) > MAX_BYTES:
            raise UserError(f"the server sends more than {MAX_BYTES} bytes; no archive here has as many")
        self.advance(amount, total=self.total or None)

    def reset(self) -> None:
        """Pooch tells the total once more in the end."""
        self.advance(-self.done)
        self.done = 0

    def close(self) -> None: ...


def download(entry: Source, url: str | None, folder: Path, name: str, progress: bool) -> Path:
    """The archive in `folder`, with its checksum checked; one that is there is not downloaded again."""
    import pooch
    from requests import RequestException

    url = url or str(entry.url)
    pooch.get_logger().setLevel("WARNING")
    try:
        file = PurePosixPath(urlsplit(url).path).name[:100] or name
        with progress_bar(f"downloading {file}", None, progress, "bytes") as advance:
            http = pooch.HTTPDownloader(DownloadBar(advance), BLOCK_BYTES, timeout=TIMEOUT_SECONDS)
            return Path(pooch.retrieve(url, f"md5:{entry.md5}", file, folder, downloader=http))
    except (RequestException, ValueError) as error:  # ValueError: the checksum, an address that is none
        why = " ".join(str(error).split())
        hint = f"give {name}'s archive or an image folder with --source, or a mirror with --url"
        raise UserError(f"{url} cannot be downloaded: {why}; {hint}") from error
