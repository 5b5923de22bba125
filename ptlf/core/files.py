"""Files that are whole or not there at all, also after a crash of the machine."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ptlf.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # what a file system without them says


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


@contextmanager
def locked(file: Path, busy: str, advice: str = "wait for it") -> Iterator[None]:
    """Hold the lock `file`; the system lets go of it with the process, however that ends. `busy` begins the sentence
    for whoever comes second."""
    handle = None
    while handle is None:
        handle = take_lock(file, busy, advice)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def take_lock(file: Path, busy: str, advice: str) -> int | None:
    """None where the file was removed by its last holder between opening and locking it."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise UserError(f"{busy} by process {holder}; {advice}") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            os.close(handle)
            raise
    try:
        is_current = os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        is_current = False
    if not is_current:
        os.close(handle)
        return None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    return handle
