"""Files that are whole or not there at all, also after a crash of the machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from ptlf.errors import UserError


def write_whole(path: Path, data: bytes | str | Iterable[bytes]) -> None:
    """Write under a temporary name, sync, rename: a reader sees the old file or the new one, never half of one."""
    parts = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            for piece in parts:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise write_error(path, error) from error


def sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk: without this a rename may be lost with the power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and do not need to
            raise
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left on the disk for {path}; free some, or choose another place")
    return UserError(f"cannot write {path}: {error.strerror or error}; choose another place")
