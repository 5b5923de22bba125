"""Other programs on the cores, on clocks that the test sets."""

from __future__ import annotations

import pytest
from conftest import tiny_config

from ptlf.run import loop
from ptlf.run.loop import Run
from ptlf.training import crowding
from ptlf.training.crowding import LOOKS, CpuTime, Crowding


class Machine:
    """Its seconds go on when the test says so; others use so many cores, and this process the rest."""

    def __init__(self, cores: float, others: float) -> None:
        self.cores, self.others, self.now, self.reads = cores, others, 100.0, 0

    def clock(self) -> float:
        return self.now

    def read(self) -> CpuTime:
        self.reads += 1
        return CpuTime(self.now, 3 + self.now * (self.cores - self.others), self.now * self.cores)


@pytest.mark.parametrize(
    ("threads", "cores", "others", "told"),
    [
        (2, 2, 0.7, "other programs use 0.7 of the 2 cores, and the 2 threads of this run"),
        (2, 2, 0.1, ""),  # an editor, a browser
        (2, 4, 1.0, ""),  # there is room for both
        (4, 8, 5.0, "other programs use 5.0 of the 8 cores"),
        (1, 2, 2.0, ""),  # one thread waits for no other
    ],
)
def test_others_are_told_of_once_where_they_take_cores_of_ours(threads, cores, others, told) -> None:
    machine = Machine(cores, others)
    crowd = Crowding(threads, cores, clock=machine.clock, read=machine.read)
    said = []
    for _ in range(100):
        machine.now += 1
        said.append(crowd())
    assert [bool(line) for line in said].count(True) == bool(told)
    assert next(filter(None, said), "").startswith(told)
    if told:
        assert said[:4] == [""] * 4 and said[4].endswith("OMP_NUM_THREADS=1")  # after five seconds
    assert machine.reads <= 1 + LOOKS  # at the start only


def test_a_system_that_does_not_say_is_not_asked_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "STAT", tmp_path / "none")
    assert crowding.cpu_time() is None
    crowd = Crowding(8, 2, clock=lambda: 1e9)
    assert [crowd() for _ in range(3)] == [""] * 3


def test_what_the_system_says(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """User, nice, system, idle, waiting for disks, interrupts, soft interrupts, stolen; guests are in the first two."""
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 50 60\ncpu0 1 2 3\n")
    monkeypatch.setattr(crowding, "STAT", tmp_path / "stat")
    monkeypatch.setattr(crowding.os, "sysconf", lambda name: 100)
    found = crowding.cpu_time()
    assert found is not None
    assert found.all == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)


def test_a_run_passes_it_on_while_it_trains(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class Told(Crowding):
        def __call__(self) -> str:
            self.threads, before = 0, self.threads
            return f"{before} threads" if before else ""

    monkeypatch.setattr(loop, "Crowding", Told)
    monkeypatch.setattr(loop.torch, "get_num_threads", lambda: 3)
    Run(tiny_config(training__epochs=1, evaluation__enabled=False), tmp_path / "run").train()
    assert capsys.readouterr().err.splitlines() == ["ptlf: warning: 3 threads"]
