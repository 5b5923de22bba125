"""The bar and the lines of a run as it goes, in a terminal that is recorded and without one."""

import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import StopsAt, tiny_config
from rich.console import Console

from ptlf.core import phases
from ptlf.core.phases import Advance, Watcher
from ptlf.report import live
from ptlf.report.live import EVERY, Live
from ptlf.run.loop import Run
from ptlf.training.process import Stopped


def shown_by(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    out = io.StringIO()
    made = Console(file=out, force_terminal=terminal, width=140, markup=False, emoji=False)
    monkeypatch.setattr(live, "console", made)
    return out


class Told(Watcher):
    """Notes every phase with what was announced and what was done."""

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, name: str, of: int | None = None, unit: str = "images") -> Iterator[Advance]:
        entry = {"name": name, "of": of, "unit": unit, "done": 0}
        self.phases.append(entry)
        yield lambda amount: entry.update(done=entry["done"] + amount)


def test_every_phase_is_named_and_counted_to_its_end(tmp_path) -> None:
    told = Told()
    run = Run(tiny_config("digits/simsiam/ptlf", training__epochs=1, evaluation__gallery=True), tmp_path / "run")
    run.train(told)
    names = list(dict.fromkeys(entry["name"] for entry in told.phases))
    assert names == [
        *(f"testing the encoder before training, {part}" for part in ("features", "probes")),
        "gallery before training, features",
        *(f"testing after task 1 of 2, {part}" for part in ("features", "probes")),
        "correlation of task 2 with those before",
        *(f"testing after task 2 of 2, {part}" for part in ("features", "probes")),
        *(f"gallery after training, {part}" for part in ("features", "map")),
        "comparing with the encoder before training",
    ]
    splits = run.stream.eval_splits
    assert told.phases[0]["of"] == sum(len(split.bank) + len(split.test) for split in splits)
    assert told.phases[1] == {"name": names[1], "of": 3 * len(splits), "unit": "scores", "done": 3 * len(splits)}
    for entry in told.phases:
        assert entry["of"] is None or entry["done"] == entry["of"], entry


def test_what_is_compiled_is_a_phase_until_the_first_step(tmp_path) -> None:
    told = Told()
    run = Run(tiny_config(training__epochs=1, evaluation__enabled=False), tmp_path / "run")
    run.trainer.engine_kind = "captured"  # for `begin_epoch`; the engine itself stays the eager one
    run.train(told)
    assert [entry["name"] for entry in told.phases] == ["compiling the step"] * 2  # at each task's start


def test_a_terminal_shows_one_bar_named_by_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown_by(monkeypatch, terminal=True)
    bar = Live("x/y/z", clock=itertools.count().__next__)

    def look() -> str:
        bar.progress.refresh()
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    bar.progress.live.auto_refresh = False
    with bar.phase("opening"):  # before `begin`
        text = look()
        assert "opening" in text and "%" not in text  # nothing to count
    bar.begin(["about"], tasks=2, epochs=3, units=9, frozen=0, done=0)
    look()
    with bar.phase("testing [/a]", 200) as advance:
        advance(50)
        text = look()
        assert all(words in text for words in ("testing [/a]", " 25%", "50 of 200 images")) and "x/y/z" not in text
    bar.begin_epoch(0, 1, steps=4, frozen=2)
    bar.step(8)
    text = look()
    assert "task 1 of 2, epoch 2 of 3" in text and "2/9 frozen" in text and "testing" not in text
    bar.end()


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown_by(monkeypatch, terminal=False)
    now = 0.0
    bar = Live("x/y/z", clock=lambda: now)
    epochs = 12
    bar.begin(["about"], tasks=1, epochs=epochs, units=9, frozen=0, done=0)
    for _ in range(2):  # the second one is not new
        with bar.phase("testing before", 20) as advance:
            advance(20)
    for epoch in range(epochs):
        bar.begin_epoch(0, epoch, steps=1, frozen=0)
        now += EVERY / 4
        bar.step(10)
        bar.end_epoch({"ssl": -0.5})
    bar.end_task(0, {"knn": [50.0]})
    bar.end()
    # Each epoch takes a quarter of the time between lines: the first, every fourth after it, and the last.
    times = {1: "2 s, about 28 s more for this task", 5: "12 s, about 18 s more for this task"}
    times |= {9: "22 s, about 8 s more for this task", 12: "30 s"}
    how = "ssl -0.5000, 4 views/s, 0/9 frozen"
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "x/y/z: about",
        "testing before: 20 images",
        *(f"task 1 of 1, epoch {epoch} of {epochs}: {how}, {time}" for epoch, time in times.items()),
        "task 1 of 1 learnt: ssl -0.5000, knn 50.00, 0/9 frozen, 30 s",
    ]


class SecondPerStep(Live):
    def __init__(self, name: str) -> None:
        self.now = 0.0
        super().__init__(name, clock=lambda: self.now)

    def step(self, views: int) -> None:
        self.now += 1
        super().step(views)


@pytest.mark.parametrize(("stop", "rate", "left"), [(2, "68 views/s, ", ", about 3 s more for this task"), (3, "", "")])
def test_the_rate_of_a_resumed_epoch_is_of_the_views_since(tmp_path, monkeypatch, stop, rate, left) -> None:
    """290 images in steps of 128, 128 and 34, two views of each. After the last step nothing is known."""
    out = shown_by(monkeypatch, terminal=False)
    config = tiny_config(evaluation__enabled=False)
    with pytest.raises(Stopped):
        Run(config, tmp_path).train(StopsAt(stop))
    Run(config, tmp_path).train(SecondPerStep("x"), resume=True)
    first, second = [line for line in out.getvalue().splitlines() if "task 1 of 2, epoch" in line]
    assert re.fullmatch(rf"  task 1 of 2, epoch 1 of 2: ssl -0\.\d+, {rate}0/3 frozen, {3 - stop} s{left}", first)
    assert f", {580 / 3:.0f} views/s, 0/3 frozen" in second


@pytest.mark.parametrize("widgets", [False, True])
def test_a_notebook_has_a_bar_only_with_widgets(widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "find_spec", lambda name: object() if widgets else None)
    monkeypatch.setattr(live, "console", Console(file=io.StringIO(), force_jupyter=True))
    assert Live("a run").progress.disable is not widgets


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_goes_on(tmp_path) -> None:
    settings = ["--stream.groups", "[[0, 1], [2, 3]]", "--stream.per_class", "40", "--training.epochs", "2"]
    settings += ["--encoder.width", "4", "--evaluation.gallery", "false"]
    command = [sys.executable, "-m", "ptlf", "train", "--out", str(tmp_path / "run"), *settings]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    assert run.stdout.readline()
    run.stdout.close()
    assert run.wait(300) == 0, run.stderr.read()
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "finished"


def test_long_phases_are_told_now_and_then_and_the_time_left_is_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = shown_by(monkeypatch, terminal=False), 0.0
    bar = Live("x", clock=lambda: now)
    with bar.phase("testing", 1500) as advance:
        for _ in range(3):
            now += EVERY / 2
            advance(500)
    assert out.getvalue().splitlines() == ["  testing: 1,500 images", "  testing: 1,000 of 1,500 images"]
    out, now = shown_by(monkeypatch, terminal=False), 0.0
    bar = Live("x", clock=lambda: now)
    bar.begin(["about"], tasks=3, epochs=5, units=9, frozen=0, done=4)
    for task, epoch, seconds in ((0, 4, 100), (1, 0, 3600), (1, 1, 1200)):
        bar.begin_epoch(task, epoch, steps=1, frozen=0)
        now += seconds
        bar.step(10)
        bar.end_epoch({})
    bar.end()
    ends = [line.split(", ", 3)[-1] for line in out.getvalue().splitlines()[1:]]
    # Four epochs of an hour, three of 40 minutes.
    assert ends == ["100 s", "3700 s, about 4 h more for this task", "4900 s, about 2 h more for this task"]
