"""The one door to files: regular ones only; written whole, through no link, into no folder that another took over.

Atomic writes survive a crash of the machine. Also file locks, and text that is slow to make."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

from ptlf.core.errors import UserError, printable

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of file systems without locks
HELD: dict[Path, IO[bytes]] = {}  # lock files of this process


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> IO[bytes]:
    """A FIFO or a device, which may have no end, is refused by an OSError; so is a link, if the file is to be written.

    flags: of os.open; what is opened to append or create is not truncated."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a link, through which nothing is written", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb" if not writes else "wb" if flags & os.O_WRONLY else "r+b")


def check_regular(*paths: Path) -> None:
    """Before a library opens them."""
    for path in paths:
        open_regular(path).close()


def check_no_link(*paths: Path) -> None:
    """Of folders that are written into: what a stranger's link leads to is not ours."""
    for path in paths:
        if path.is_symlink():
            raise UserError(f"{path} is a link, through which nothing is written; put a folder in its place")


def remove_folder(path: Path) -> None:
    """Of a link only itself."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def same_file(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except OSError:
        return False


def check_held(path: Path) -> None:
    """Refuse to write into a folder that this process has locked, and that is another's or no longer there."""
    for lock, file in list(HELD.items()):
        if path.absolute().is_relative_to(lock.parent) and not same_file(file, lock):
            gone = f"{lock} was removed or replaced, perhaps with its folder, while this process used the folder"
            raise UserError(f"{gone}: {path.name} is not written, as another process may be at work there")


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
    check_held(path)
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed, or a link
        with open_regular(part, os.O_RDWR | os.O_CREAT | os.O_EXCL) as own:
            yield part
            os.fsync(own.fileno())
            check_held(path)
            if not same_file(own, part):
                raise OSError(errno.EBUSY, "another process writes it too")
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
    with open_regular(file) as opened:
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
        with open_regular(file) as opened:
            holder = printable(opened.read(200).decode(errors="replace").strip())
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
            handle = open_regular(file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise write_error(file, error) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                patience -= 1
                if patience:  # `lock_holder` of another process has it for a moment
                    time.sleep(0.02)
                    continue
                holder = handle.read(200).decode(errors="replace").strip()
                raise UserError(f"{busy} by process {holder or 'unknown'}; {advice}") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            if not same_file(handle, file):  # the previous holder removed the file between our open and our lock
                continue
            if not re.fullmatch(rb"(\d+ on [^\n]*\n?)?", handle.read(1000)):
                raise UserError(f"{file} is no lock of ptlf's, and is left as it is; remove it")
            handle.seek(0)
            handle.truncate()
            handle.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())
            handle.flush()
            HELD[at := file.absolute()] = handle
            try:
                yield
            finally:
                if same_file(HELD.pop(at), at):  # else it is another's, or gone
                    with suppress(OSError):  # the folder may be read-only: what counts is the lock
                        at.unlink()
            return
