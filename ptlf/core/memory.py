"""Memory: what a machine has, whether something fits, and a sentence for an allocation that failed."""

from contextlib import suppress
from pathlib import Path

import torch

from ptlf.core.errors import UserError
from ptlf.freezing import format_bytes

# What libraries say in a RuntimeError where memory does not suffice.
PHRASES = ("allocate memory", "out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


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
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        known.append(limit - used)
    return min(known, default=None)


def check_fits(what: str, needed: float, device: torch.device | str = "cpu", hint: str = "lower it") -> None:
    """Refuse what needs more bytes than the device has free."""
    free = free_bytes(device)
    if free is not None and needed > free:
        where = "GPU" if torch.device(device).type == "cuda" else "machine"
        has = f"this {where} has {format_bytes(free)} free"
        raise UserError(f"{what} would take {format_bytes(needed)} of memory, and {has}; {hint}")


def too_large(error: BaseException) -> str | None:
    """What could not be allocated, if that is what the error says; None for other errors."""
    words = " ".join(str(error).split())
    failed = isinstance(error, RuntimeError) and any(phrase in words for phrase in PHRASES)
    if failed or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory: {words[:150] or 'an allocation failed'}"
    return None
