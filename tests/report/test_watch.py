"""A run watched from its files: what is shown, what is guessed, what happens while lines are being written."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import made_up
import pytest
from rich.console import Console

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.report.watch import read_snapshot, view, watch
from ptlf.run.results import epoch_lines


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Three tasks of six epochs, stopped in the second epoch of task 2, in which a unit froze."""
    results = made_up.results()
    lines = epoch_lines(results)[:8]
    for line in lines:
        line["seconds"] = 2.0
    lines[-1] |= {"newly_frozen": ["stages.2.conv"], "frozen": 1, "loss": {"ssl": -0.25}, "views_per_second": 1234.0}
    results |= {"status": "running", "freezing": []}
    results["cost"] |= {"train_seconds": 12.0, "correlation_seconds": 1.0, "rebuild_seconds": 2.0, "eval_seconds": 3.0}
    folder = made_up.write(tmp_path / "run", results)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def shown(folder: Path, quiet: float = 0.0) -> str:
    """quiet: seconds since the run wrote something."""
    for name in ("metrics.jsonl", "results.json"):
        if (folder / name).exists():
            os.utime(folder / name, (time.time() - quiet,) * 2)
    return view(read_snapshot(folder)).plain


def test_once(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(running), "--once"]) == 0
    text = capsys.readouterr().out
    # 10 epochs left of 2 s each, and for every 12 s of training 6 s of everything else
    for words in ("task 2/3, epoch 2/6", "44%", "ssl -0.25", "1,234", "1/4", "30 s left"):
        assert words in text, words


def test_a_cut_line_waits_and_silence_is_named(running: Path) -> None:
    with open(running / "metrics.jsonl", "a") as file:
        file.write('{"task": 2, "epo')
    assert len(read_snapshot(running).lines) == 8
    assert "may have stopped" not in shown(running, 50)
    assert "no new line for 10 min: the run may have stopped" in shown(running, 600)
    (running / "metrics.jsonl").unlink()
    assert "no epoch finished yet" in shown(running)


def test_a_dead_process_is_named(running: Path) -> None:
    """The lock's file stays when its process is killed, and the system lets go of the lock."""
    code = (
        "import pathlib, sys; from ptlf.run.folder import lock_of_run\n"
        "held = lock_of_run(pathlib.Path(sys.argv[1])); held.__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(running)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        alive = shown(running, 600)
        other.kill()
    assert f"process {other.pid} on {socket.gethostname()} still holds the run" in " ".join(alive.split())
    assert "s left" in alive
    dead = " ".join(shown(running).split())
    assert f"process {other.pid} on {socket.gethostname()} exited without updating its status" in dead
    assert f"`ptlf train --resume {running}` continues the run" in dead
    assert "s left" not in dead
    results = json.loads((running / "results.json").read_text())
    (running / "results.json").write_text(json.dumps({**results, "arrived": 1}))
    assert f"`ptlf learn {running}` continues the run" in " ".join(shown(running).split())
    naps: list[float] = []
    with open(running / "screen", "w") as file:
        watch(running, console=Console(file=file, force_terminal=True), sleep=naps.append)
    assert naps == []  # there is nothing to wait for
    (running / ".lock").write_text("17 on another-machine\n")
    assert "exited without" not in shown(running)


def test_it_follows_until_the_end(running: Path) -> None:
    results = json.loads((running / "results.json").read_text())
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            (running / "results.json").write_text(json.dumps({**results, "status": "finished"}))

    with open(running / "screen", "w") as file:
        watch(running, console=Console(file=file, force_terminal=True), sleep=sleep)
    assert len(naps) == 3
    assert "finished" in (running / "screen").read_text()


def test_a_finished_run_needs_its_results_alone(tmp_path: Path) -> None:
    results = made_up.results()
    folder = made_up.write(tmp_path / "run", results)
    (folder / "metrics.jsonl").unlink()
    text = shown(folder)
    assert "task 3/3, epoch 6/6" in text


def test_a_folder_without_a_run(tmp_path: Path, running: Path) -> None:
    with pytest.raises(UserError, match=r"is no run but holds some; name one of them, as .*/run"):
        read_snapshot(tmp_path)
    with pytest.raises(UserError, match=r"holds no results\.json"):
        read_snapshot(tmp_path / "other")
    (running / "results.json").write_text('{"status": "running"}')
    with pytest.raises(UserError, match="damaged"):
        read_snapshot(running)
