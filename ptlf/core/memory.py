"""Memory: what a machine has, whether something fits, and a sentence for an allocation that failed."""

import re
from contextlib import suppress
from pathlib import Path

import torch

from ptlf.core.errors import UserError
from ptlf.freezing import format_bytes

# What libraries say where memory, or the size of a number, does not suffice.
PHRASES = ("allocate memory", "out of memory", "Unable to allocate", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
OVERFLOWS = ("Overflow when unpacking", "Maximum allowed dimension", "too large to convert", "Storage size calculation")
CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can still be allocated on the device; None where the system does not say."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # a container with a limit, by cgroup version 2
        known.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return min(known, default=None)


def check_fits(what: str, needed: float, device: torch.device | str = "cpu", hint: str = "lower it") -> None:
    """Refuse what needs more bytes than the device has free."""
    free = free_bytes(device)
    if free is not None and needed > free:
        where = "GPU" if torch.device(device).type == "cuda" else "machine"
        has = f"this {where} has {format_bytes(free)} free"
        raise UserError(f"{what} would take {format_bytes(needed)} of memory, and {has}; {hint}")


def too_large(error: BaseException) -> str | None:
    """What could not be allocated and what there is, if that is what the error says; None for other errors."""
    words = " ".join(str(error).split())
    if any(phrase in words for phrase in OVERFLOWS):
        return f"a number is too large for this machine ({words[:100]})"
    failed = isinstance(error, RuntimeError) and any(phrase in words for phrase in PHRASES)
    if not failed and not isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    on_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA" in words
    asked = re.search(r"(?:allocate|allocate:|tried to allocate) ([\d.]+ ?(?:bytes|[KMGTP]i?B))", words)
    free = free_bytes("cuda" if on_gpu and torch.cuda.is_available() else "cpu")
    has = f", which has {format_bytes(free)} free" if free is not None else ""
    tried = f" ({asked[1]} at once)" if asked else ""
    return f"this needs more memory{tried} than this {'GPU' if on_gpu else 'machine'} can give{has}"
