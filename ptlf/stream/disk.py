"""The disk: folders that are whole or not there, one process at a time, and its errors as sentences."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ptlf.core.errors import UserError
from ptlf.core.files import locked, sync_folder


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes `target` when the block ends well, and vanishes when it does not."""
    root, name = target.parent, target.name
    partial = root / f".{name}.partial-{os.getpid()}"
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f".{name}.lock", f"{name} is being packed"):
        remove_leftovers(target)
        try:
            partial.mkdir()
            yield partial
            for file in partial.iterdir():
                sync_file(file)
            sync_folder(partial)
            replace_folder(partial, target)
            sync_folder(root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def remove_leftovers(target: Path) -> None:
    """Clear what a killed process left behind. Only for the holder of the lock."""
    for folder in list(target.parent.iterdir()):
        found = re.fullmatch(rf"\.{re.escape(target.name)}\.(partial|old)-\d+", folder.name)
        if found and found[1] == "old" and not target.exists():
            os.rename(folder, target)  # killed between the two renames of `replace_folder`
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


def sync_file(file: Path) -> None:
    with open(file, "r+b") as opened:
        os.fsync(opened.fileno())


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


def file_digest(file: Path, algorithm: str, advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
