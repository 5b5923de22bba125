"""Trackers hold what metrics.jsonl holds, as their own readers read it, through stops, kills and further tasks."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import QUICK, StopsAt, tiny_config

import ptlf
from ptlf.cli import main
from ptlf.commands import parser
from ptlf.core.errors import UserError
from ptlf.integrations.trackers import TRACKERS, Tracker, numbers
from ptlf.run.loop import Run
from ptlf.training.process import Stopped

pytestmark = pytest.mark.slow

ALL = ("tensorboard", "wandb")
Metrics = dict[str, dict[int, float]]  # by name and step
BLOCK, HEADER = 32768, 7  # bytes of a .wandb file: LevelDB's log format
QUICK = [*QUICK, "--training.epochs", "2"]


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb leaves one of its own


def expected(folder: Path) -> Metrics:
    """What metrics.jsonl holds, worked out without the package."""
    found: Metrics = {}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step, line in enumerate(lines, start=1):
        plain = {key: value for key, value in line.items() if key not in ("loss", "newly_frozen") and value is not None}
        for key, value in [*plain.items(), *((f"loss/{name}", value) for name, value in line["loss"].items())]:
            found.setdefault(key, {})[step] = float(value)
    return found


def read_tensorboard(folder: Path) -> Metrics:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found: Metrics = {}
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        found[tag] = {point.step: point.value for point in points}
        assert len(points) == len(found[tag]), f"doubled steps of {tag}"
    return found


def read_wandb(folder: Path) -> Metrics:
    """All files of the run, in order, with W&B's own description of a record; the package has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Metrics = {}
    for path in sorted((folder / "wandb").glob("*run-*/*.wandb")):
        for content in log_records(path.read_bytes()):
            record = Record.FromString(content)
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "_step" in values:
                step = int(values["_step"])
                for key, text in values.items():
                    if not key.startswith("_"):
                        assert step not in found.setdefault(key, {}), f"doubled step {step} of {key}"
                        found[key][step] = float(json.loads(text))
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log: blocks of 32 KiB with chunks of checksum (4 bytes), length (2), kind (1), content."""
    place, record = HEADER, b""  # after the file's own header
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # the rest of a block is padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        content = data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind == 0 or len(content) < length:
            return
        record = content if kind in (1, 2) else record + content  # full, first, middle, last
        if kind in (1, 4):
            yield record


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb}


def check(folder: Path, epochs: int, names: tuple[str, ...] = ALL) -> None:
    wanted = expected(folder)
    assert list(wanted["loss/ssl"]) == list(range(1, epochs + 1))
    for name in names:
        found = READERS[name](folder)
        assert set(found) == set(wanted), name
        for key, values in wanted.items():
            as_stored: Any = np.float32 if name == "tensorboard" else float
            assert found[key] == {step: as_stored(value) for step, value in values.items()}, (name, key)


def test_numbers_and_settings_of_a_run_are_read_back(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto.wandb_internal_pb2 import Record

    run = tmp_path / "run"
    Run(tiny_config("digits/simsiam/ptlf", training__lr=0.0625, log=[*ALL]), run).train()
    check(run, 4)
    assert not [place for place in tmp_path.iterdir() if place.name not in ("run", "home")]
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    records = map(Record.FromString, log_records(file.read_bytes()))
    updates = [item for record in records for item in record.run.config.update]
    settings = {item.key: json.loads(item.value_json) for item in updates}
    assert settings["training"]["lr"] == 0.0625
    (text,) = EventAccumulator(str(run / "tensorboard")).Reload().Tensors("settings/text_summary")
    assert b"\n  lr: 0.0625\n" in text.tensor_proto.string_val[0]


def test_a_stopped_run_goes_on_in_the_same_place(tmp_path) -> None:
    config = tiny_config(log=[*ALL], checkpoint__every_epochs=0)
    steps = Run(config).trainer.steps_per_epoch(Run(config).stream.tasks[0].train)
    with pytest.raises(Stopped):
        Run(config, tmp_path / "run").train(StopsAt(2 * steps + 1))
    check(tmp_path / "run", 2)
    ids = (tmp_path / "run" / "trackers.json").read_text()
    Run(config, tmp_path / "run").train(resume=True)
    check(tmp_path / "run", 4)
    assert (tmp_path / "run" / "trackers.json").read_text() == ids
    assert len(list((tmp_path / "run").glob("wandb/*run-*"))) == 1


KILLED = """
import os, signal, sys
from conftest import tiny_config
from ptlf.core.phases import Watcher
from ptlf.run.loop import Run

class Killed(Watcher):
    def begin_epoch(self, task, epoch, steps, frozen):
        if (task, epoch) == (1, 1):  # three lines are written, and a checkpoint after the first task
            os.kill(os.getpid(), signal.SIGKILL)

config = tiny_config(log=["tensorboard", "wandb"], checkpoint__every_epochs=0)
run = Run(config, sys.argv[1])
run.train(Killed())
"""


def test_a_killed_run_leaves_files_that_can_be_read_and_goes_on(tmp_path) -> None:
    run, here = tmp_path / "run", str(Path(__file__).parents[1])
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])}
    with (tmp_path / "said").open("w") as said:  # no pipe: wandb's own process would hold it open for a minute
        done = subprocess.run([sys.executable, "-c", KILLED, str(run)], env=paths, stdout=said, stderr=said)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "said").read_text()
    check(run, 3, ("tensorboard",))
    read_wandb(run)  # another process writes it, perhaps not yet to its end
    took, ids = expected(run)["seconds"], (run / "trackers.json").read_text()
    Run(tiny_config(log=[*ALL], checkpoint__every_epochs=0), run).train(resume=True)
    again = expected(run)["seconds"]
    assert [step for step in took if took[step] != again[step]] == [3]  # which was trained twice
    check(run, 4)
    assert (run / "trackers.json").read_text() == ids


def test_a_tracker_that_comes_later_gets_all_lines(tmp_path, capsys) -> None:
    words = ["train", "--recipe", "digits/simsiam/finetune", "--out", str(tmp_path / "run"), *QUICK]
    assert main([*words, "--log", "tensorboard"]) == 0
    check(tmp_path / "run", 4, ("tensorboard",))
    photos = np.random.default_rng(0).integers(0, 256, (150, 16, 16, 3), dtype=np.uint8)
    learner = ptlf.Learner.load(tmp_path / "run", trust_code=True, log=["tensorboard", "wandb"])
    learner.learn(photos, name="more")
    check(tmp_path / "run", 6, ("tensorboard", "wandb"))
    assert "log:\n- tensorboard\n- wandb\n" in (tmp_path / "run" / "config.yaml").read_text()


class Fragile(Tracker):
    """One of the user's own, which breaks in its second epoch."""

    seen: list[tuple[int, float]] = []  # noqa: RUF012

    def epoch(self, step: int, line: Mapping[str, Any]) -> None:
        if step == 2:
            raise OSError("the disk\nis full")
        self.seen.append((step, line["loss"]["ssl"]))


def test_one_of_your_own_that_fails_is_left_out_and_the_run_goes_on(tmp_path, capsys) -> None:
    Run(tiny_config(log=["test_trackers:Fragile", "tensorboard"]), tmp_path / "run").train()
    told = capsys.readouterr().err
    assert told.count("tracker 'test_trackers:Fragile' failed in task 1, epoch 2 and is left out") == 1
    assert "OSError: the disk is full" in told
    assert [step for step, _ in sys.modules["test_trackers"].Fragile.seen] == [1]
    check(tmp_path / "run", 4, ("tensorboard",))


def test_names_are_checked(tmp_path, monkeypatch, capsys) -> None:
    for name, message in (
        ("tensorbord", r"unknown tracker 'tensorbord'.*tensorboard"),
        ("conftest:tiny_encoder", "must be a subclass of Tracker"),
        ("mlflow", r"unknown tracker 'mlflow'. Known: tensorboard, wandb"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_config(log=name)
    assert tiny_config(log="wandb").log == ["wandb"]
    (tmp_path / "bad.yaml").write_text("log: ['conftest:anything']\n")
    assert main(["train", "-c", str(tmp_path / "bad.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert "names code, which would run here" in capsys.readouterr().err
    for name in ALL:
        monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
        with pytest.raises(UserError, match=rf"--log.* needs .*{name}, .*: pip install 'ptlf\[trackers\]'"):
            Run(tiny_config(log=name), tmp_path / name)
    assert main(["list", "trackers"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in TRACKERS)
    assert set(TRACKERS) >= set(parser.TRACKERS) == set(ALL)  # which --help and completion name
    # A package that breaks when it is imported is named.
    (tmp_path / "wandb.py").write_text("raise TypeError('Descriptors\\ncannot be created')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"--log needs wandb, which cannot be imported \(Descriptors cannot be created"):
        Run(tiny_config(log="wandb"), tmp_path / "run")


def test_numbers_of_a_line() -> None:
    found = numbers({"task": 1, "loss": {"ssl": "nan", "far": 0.5}, "peak_memory_bytes": None, "newly_frozen": ["a"]})
    assert math.isnan(found.pop("loss/ssl"))
    assert found == {"task": 1, "loss/far": 0.5}
