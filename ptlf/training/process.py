"""The process that a run is: willing to stop when asked."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """The run was asked to stop by a signal, and has saved itself."""

    def __init__(self, folder: Path, number: int, advice: str = "") -> None:
        super().__init__(f"stopped; {advice or f'go on with `ptlf train --resume {folder}`'}")
        self.folder, self.number = folder, number

    def again(self, advice: str) -> Stopped:
        """The same, where something else than the run alone goes on."""
        return Stopped(self.folder, self.number, advice)


class StopSignals:
    """Inside, a first SIGINT or SIGTERM only asks (`asked` is its number); a second SIGINT interrupts as usual."""

    def __init__(self, active: bool = True, tell: bool = True) -> None:
        """Not active, signals do what they did before. `tell`: say on stderr that the signal was understood."""
        self.active, self.tell = active, tell
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if self.active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a run in the background of a shell ignores Ctrl-C
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number
        if self.tell:  # not print: the signal may have come in the middle of one
            os.write(2, b"\nptlf: finishing the step, then saving; Ctrl-C (again) leaves at once\n")
