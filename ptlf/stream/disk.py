"""Large files and folders: atomic folders, progress bars, and disk errors as user errors."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ptlf.core.errors import UserError
from ptlf.core.files import check_held, locked, open_regular, remove_folder, sync_folder
from ptlf.core.phases import cannot_move

# What people and programs keep beside images: notes, labels, tables, pages, settings, edits, previews, sound and film.
NOT_IMAGES = (
    *(".txt", ".md", ".rst", ".log", ".html", ".htm", ".doc", ".docx", ".odt"),
    *(".json", ".jsonl", ".csv", ".tsv", ".xls", ".xlsx", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".py", ".ipynb", ".sh", ".db", ".sqlite", ".xmp", ".aae", ".md5", ".sha1", ".sha256"),
    *(".wav", ".mp3", ".m4a", ".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm"),
)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A hidden folder, locked for this process. Renamed to `target` after the block; removed if the block raises."""
    root, name = target.parent, target.name
    partial, old = root / f".{name}.partial", root / f".{name}.old"

    def tidy() -> None:
        if old.exists() and not target.exists():  # the two renames below were interrupted
            old.rename(target)
        for folder in (partial, old):
            remove_folder(folder)

    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f".{name}.lock", f"{name} is being packed"):
        tidy()
        try:
            partial.mkdir()
            yield partial
            for file in partial.iterdir():
                with open_regular(file) as opened:
                    os.fsync(opened.fileno())
            sync_folder(partial)
            check_held(target)
            if target.exists():
                target.rename(old)
            partial.rename(target)
            sync_folder(root)
        finally:
            tidy()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on {where}; free some, or give another --data-root") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"no permission for {where}; change it, or give another --data-root") from error
        raise UserError(f"{where}: {error.strerror or error}") from error


def files_below(folder: Path) -> list[Path]:
    """All files that are not hidden, sorted by path. Links are followed; a folder reached twice is read once."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    visited: set[str] = set()
    for parent, inside, files in os.walk(folder, followlinks=True, onerror=fail):
        if (real := os.path.realpath(parent)) in visited:
            inside.clear()
            continue
        visited.add(real)
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def image_files(folder: Path) -> list[Path]:
    """`files_below`, without those whose ending says that they are no images. There must be some."""
    with disk_errors(folder):
        files = [file for file in files_below(folder) if not not_an_image(file.name)]
    if not files:
        raise UserError(f"{folder} holds no images")
    return files


def not_an_image(name: str) -> bool:
    return name.lower().endswith(NOT_IMAGES)


def subfolders(folder: Path) -> list[str]:
    with disk_errors(folder):
        names = (entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return sorted(names, key=natural)


@contextmanager
def progress_bar(text: str, total: float | None, show: bool, unit: str = "images") -> Iterator[Callable[..., None]]:
    """Yields `advance(n)`, which moves a bar on stderr on by n images or bytes; `total=` corrects their number."""
    counter = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), counter, TimeRemainingColumn()]
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not show or cannot_move(console)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount, **state: bar.update(task, advance=amount, **state)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key: "task2" before "task10"."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] + [(-1, 0, name)]


def quote_names(names: Iterable[str], most: int = 10) -> str:
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
