"""`ptlf data get`: download a data set's official archive (or read it from the disk), check it, pack it."""

import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from ptlf.core.errors import UserError, unknown
from ptlf.core.files import check_no_link, file_digest
from ptlf.stream.archives import SOURCES, Source
from ptlf.stream.disk import disk_errors, progress_bar, subfolders
from ptlf.stream.pack import Pack, check_target, data_root
from ptlf.stream.packing import PackOptions, pack_folder, write_squares

__all__ = ["SOURCES", "data_root", "get"]

TIMEOUT_SECONDS = 60
BLOCK_BYTES = 1 << 18


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
    folder = target.parent / ".downloads" / name
    check_no_link(folder.parent, folder)
    with disk_errors(Path(source or folder)):
        given = Path(source).expanduser() if source else download(entry, url, folder, packing.progress)
        made = pack_source(entry, given, target, packing)
        if not source and not keep_archive:
            shutil.rmtree(folder)
            with suppress(OSError):
                folder.parent.rmdir()  # fails if other archives are kept
    return made


def pack_source(entry: Source, source: Path, target: Path, options: PackOptions) -> Pack:
    """Pack the archive or an image folder."""
    name = target.name
    if source.is_dir():
        if not (source / "train").is_dir() or not any((source / split).is_dir() for split in ("test", "val")):
            raise UserError(f"{source} must hold train/CLASS/... and test/CLASS/... or val/CLASS/... for {name}")
        if entry.names is None and (count := len(subfolders(source / "train"))) != entry.classes:
            raise UserError(f"{source / 'train'} has {count} class folders, {name} has {entry.classes}")
        return pack_folder(source, target.parent, name, size=entry.size, names=entry.names, **vars(options))
    if not source.is_file():
        raise UserError(f"--source {source} does not exist")
    if entry.read is None:
        raise UserError(f"--source {source} is a file; {entry.about}")
    if (md5 := file_digest(source, "md5")) != entry.md5:
        whose = f"the archive of {name} has {entry.md5}"
        raise UserError(f"{source} has md5 {md5}, {whose}; download it again ({entry.url})")
    return write_squares(Pack(target, entry.size, "classes", (), source=source.name), entry.read(source), options)


def download(entry: Source, url: str | None, folder: Path, progress: bool) -> Path:
    """The archive in `folder`, with its checksum checked; one that is there is not downloaded again."""
    import pooch
    from requests import RequestException

    url = url or str(entry.url)
    pooch.get_logger().setLevel("WARNING")
    try:
        file = PurePosixPath(urlsplit(url).path).name[:100] or folder.name
        with progress_bar(f"downloading {file}", None, progress, "bytes") as advance:
            bar = SimpleNamespace(total=0, close=lambda: None)  # what pooch uses of tqdm; total: 0 if it is not known
            bar.update = lambda amount: advance(amount, total=bar.total or None)
            bar.reset = lambda: advance(0, completed=0)
            http = pooch.HTTPDownloader(bar, BLOCK_BYTES, timeout=TIMEOUT_SECONDS)
            return Path(pooch.retrieve(url, f"md5:{entry.md5}", file, folder, downloader=http))
    except (RequestException, ValueError) as error:  # ValueError: the checksum, an address that is none
        why = " ".join(str(error).split())
        hint = f"give {folder.name}'s archive or an image folder with --source, or a mirror with --url"
        raise UserError(f"{url} cannot be downloaded: {why}; {hint}") from error
