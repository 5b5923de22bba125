"""Other programs on the cores that a run trains on, seen while it trains."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")  # Linux: its first line has the CPU time of all processes since the start, by kind
IDLE = (3, 4)  # numbers of the kinds in which no process runs: idle, and waiting for a disk
KINDS = 8  # those after them are counted in the first two as well
SECONDS = 5.0  # over which the cores are looked at
LOOKS = 12  # at the start of a run
LEAST = 0.5  # cores that the threads lack, from which on it is told


class CpuTime(NamedTuple):
    """In seconds."""

    wall: float
    own: float  # of this process's threads together
    all: float  # of all processes


def cpu_time() -> CpuTime | None:
    """None where the system does not say."""
    try:
        kinds = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1 : 1 + KINDS]]
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = sum(value for number, value in enumerate(kinds) if number not in IDLE)
    return CpuTime(time.perf_counter(), time.process_time(), busy / ticks)


class Crowding:
    """Called at every step, it says once if others use the cores that the threads of this process need: the threads
    wait for each other in every operation, and all of them for the one that has no core."""

    def __init__(
        self,
        threads: int,
        cores: int | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        read: Callable[[], CpuTime | None] = cpu_time,
    ) -> None:
        """threads: 1 has nobody to wait for, and nothing is looked at. cores: default: the machine's."""
        self.threads, self.cores = threads, cores or os.cpu_count() or 1
        self.clock, self.read = clock, read
        self.left = LOOKS if threads > 1 else 0
        self.before = read() if self.left else None

    def __call__(self) -> str:
        """Empty if there is nothing to say."""
        if not self.left or self.before is None or self.clock() - self.before.wall < SECONDS:
            return ""
        before, now = self.before, self.read()
        self.before, self.left = now, self.left - 1
        if now is None:
            return ""
        others = ((now.all - before.all) - (now.own - before.own)) / (now.wall - before.wall)
        if others + self.threads < self.cores + LEAST:
            return ""
        self.left = 0
        return (
            f"other programs use {others:.1f} of the {self.cores} cores, and the {self.threads} threads of this run "
            "wait for each other; it may be many times faster with OMP_NUM_THREADS=1"
        )
