"""Calls that a thread of its own makes, one after another, so that one that hangs holds up nobody."""

import queue
import threading
from collections.abc import Callable


class Feed:
    """Calls wait in a queue. The first one that raises ends the thread, after `failed(moment, error)`.

    room: how many calls may wait.
    """

    def __init__(self, name: str, room: int, failed: Callable[[str, BaseException], None]) -> None:
        self.failed = failed
        self.waiting: queue.Queue[tuple[Callable[[], None], str, bool]] = queue.Queue(room)
        self.answers = 0  # calls that have returned
        self.abandoned = False
        # A daemon: one that hangs does not keep the process from its end.
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put(self, call: Callable[[], None], moment: str, *, last: bool = False) -> bool:
        """False: there is no room. moment: when it is called, for `failed`. last: the thread ends with it."""
        if not self.thread.is_alive():
            return True  # it has failed, and said so
        try:
            self.waiting.put_nowait((call, moment, last))
        except queue.Full:
            return False
        return True

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end. False: no call has returned for `timeout` seconds."""
        while self.thread.is_alive():
            before = self.answers
            self.thread.join(timeout)
            if self.answers == before and self.thread.is_alive():
                self.abandoned = True
                return False
        return True

    def _work(self) -> None:
        last = False
        while not last:
            call, moment, last = self.waiting.get()
            try:
                call()
            except (Exception, SystemExit) as error:  # the disk, the network, the package
                return None if self.abandoned else self.failed(moment, error)
            self.answers += 1
