"""Atomic writes, which survive a crash of the machine, file locks, and text that is slow to make."""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from ptlf.core.errors import UserError, printable

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of file systems without locks


def write_whole(path: Path, data: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write to a temporary file, fsync, rename: a reader sees the old file or the new one, never a partial one."""
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")  # a name that is not UTF-8 has surrogates
    with whole_file(path) as part, open(part, "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, on the disk and renamed to it after the block; removed if the block raises."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with open(part, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # the folder may have become read-only
            part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """fsync a folder: without it a rename may be lost in a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot fsync a folder, and need not
            raise
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}; choose another place")


def file_digest(file: Path, algorithm: str = "sha256", advance: Callable[[int], None] = lambda _: None) -> str:
    """advance: takes the number of bytes read, again and again."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def cached_text(function: str, *arguments: str | None) -> str:
    """What MODULE:FUNCTION says about members and settings, which imports torch. The text is kept in the user's cache
    folder until a file of ptlf changes. Where other packages or the running program may add members it is made anew."""
    own = "torch" not in sys.modules and not any(group.startswith("ptlf.") for group in entry_points().groups)
    files = sorted((str(file), file.stat().st_mtime_ns) for file in Path(__file__).parents[1].rglob("*.py"))
    version = hashlib.sha256(repr(files).encode(errors="replace"), usedforsecurity=False).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ptlf-help", version)
    module, _, name = function.partition(":")
    path = cache / "-".join([name, *filter(None, arguments)])
    with suppress(OSError, UnicodeDecodeError):
        if own:
            return path.read_text(encoding="utf-8")
    text: str = getattr(import_module(module), name)(*arguments)
    with suppress(OSError, UserError):  # a home that cannot be written to
        if own:
            if not cache.exists():
                shutil.rmtree(cache.parent, ignore_errors=True)  # texts of other versions
            cache.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    return text


def lock_holder(file: Path) -> tuple[str, bool | None]:
    """Who wrote the lock file, as "PROCESS on MACHINE" (empty if there is none), and whether that process still holds
    the lock; None where this machine cannot know."""
    holder = ""
    try:
        with open(file, errors="replace") as opened:
            holder = printable(opened.read(200).strip())
            if not holder.endswith(f" on {socket.gethostname()}"):
                return holder, None
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return holder, False
    except BlockingIOError:
        return holder, True
    except OSError:
        return "", None


@contextmanager
def locked(file: Path, busy: str, advice: str = "wait for it") -> Iterator[None]:
    """Hold an exclusive lock on `file`. If another process holds it: "`busy` by process ...; `advice`"."""
    patience = 5
    while True:
        try:
            handle = open(file, "a+", errors="replace")  # noqa: SIM115
        except OSError as error:
            raise write_error(file.parent, error) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                patience -= 1
                if patience:  # `lock_holder` of another process has it for a moment
                    time.sleep(0.02)
                    continue
                handle.seek(0)
                raise UserError(f"{busy} by process {handle.read(200).strip() or 'unknown'}; {advice}") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            same = False
            with suppress(FileNotFoundError):
                same = os.path.samestat(os.fstat(handle.fileno()), os.stat(file))
            if not same:  # the previous holder removed the file between our open and our lock
                continue
            handle.truncate(0)
            handle.write(f"{os.getpid()} on {socket.gethostname()}\n")
            handle.flush()
            try:
                yield
            finally:
                with suppress(OSError):  # the file may be gone, or the folder read-only: what counts is the lock
                    file.unlink()
            return
