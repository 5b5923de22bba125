"""Stopping a run by a signal."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ptlf.core.errors import quoted

PATIENCE = 2.0  # seconds


class Stopped(Exception):
    """The run was stopped by a signal, after saving a checkpoint, or else `lost` says what is lost. `unlearnt` names a
    task that was given and is not in the run yet."""

    def __init__(self, folder: Path, number: int, advice: str = "", lost: str = "", unlearnt: str = "") -> None:
        how = f"stopped without saving: {lost}" if lost else "stopped"
        what = f"{unlearnt}; " if unlearnt else ""
        super().__init__(f"{how}; {what}{advice or f'continue with `ptlf train --resume {quoted(folder)}`'}")
        self.folder, self.number, self.lost, self.unlearnt = folder, number, lost, unlearnt

    def again(self, advice: str) -> "Stopped":
        """The same with another advice, for a command that trains several runs."""
        return Stopped(self.folder, self.number, advice, self.lost, self.unlearnt)


class InterruptOnce:
    """A handler of SIGINT for a whole program: what the first Ctrl-C ends is not disturbed by those that follow at
    once, and given up after the next."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.at is None:
            self.at = time.monotonic()
            raise KeyboardInterrupt
        if abs(time.monotonic() - self.at) > PATIENCE:
            os._exit(128 + number)


class StopSignals:
    """Inside, the first SIGINT or SIGTERM only sets `stop_signal`; a second SIGINT raises KeyboardInterrupt."""

    def __init__(self, active: bool = True, tell: bool = True) -> None:
        """active: False leaves the handlers alone. tell: confirm the signal on stderr."""
        self.active, self.tell = active, tell
        self.stop_signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self.active and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # shells ignore SIGINT for background jobs
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal is not None and number == signal.SIGINT:
            before = self._before.get(number)
            return before(number, frame) if callable(before) else signal.default_int_handler(number, frame)
        self.stop_signal = number
        if self.tell:  # os.write, because print is not reentrant
            words = "finishing what is under way, then saving; Ctrl-C (again) leaves at once, unsaved"
            os.write(2, f"\nptlf: {words}\n".encode())
