"""Two processes against one with the same global batch; a process that dies; settings that are refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worker import RUNS

from ptlf.cli import main
from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.encoders.norm import synchronise
from ptlf.objectives import OBJECTIVES
from ptlf.run.results import epoch_lines
from ptlf.training.trainer import TrainingConfig, check_batch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SYNCHRONISED = [name for name in RUNS if not name.endswith("local")]
MORTAL = [
    "train", "--recipe", "digits/simsiam/ptlf", "--freezing.final", "0.67", "--stream.groups", "[[0, 1], [2, 3]]",
    "--encoder.name", "worker:mortal_encoder", "--training.epochs", "2", "--training.batch", "64",
    "--training.last_batch", "drop", "--device", "cpu", "--evaluation.gallery", "false",
    "--checkpoint.every_steps", "2",
]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    paths = [str(HERE.parent.parent), str(HERE.parent), str(HERE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(words: list[str], count: int, **more: str) -> list[subprocess.Popen]:
    """Start processes as torchrun does, but without its supervision."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count), **more}
    environments = [environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([sys.executable, *words], env=own, **pipes) for own in environments]


def finish(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    ends = []
    try:
        for process in processes:
            text = process.communicate(timeout=seconds)[0]
            ends.append((process.returncode, text))
    finally:
        for process in processes:
            process.kill()
    return ends


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Results of the runs of `worker.py`: in a single process ("alone"), and in the first and second of two."""
    folder = tmp_path_factory.mktemp("found")
    for code, text in finish(start([str(HERE / "worker.py"), "double", str(folder)], 2), 240):
        assert code == 0, text
    alone, pair = ([torch.load(folder / f"{name}{rank}.pt") for rank in (0, 1)] for name in ("alone", "pair"))
    return {"alone": alone[0] | alone[1], "first": pair[0], "second": pair[1]}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in one.values())
    return max(float((value - other[name]).abs().max()) for name, value in one.items()) / largest


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_gradients_are_those_of_one_process(found, name: str) -> None:
    """At the first step of every epoch: in the first task, in the second, and after each freeze."""
    alone, pair = found["alone"][name], found["first"][name]
    assert alone["gradients"].keys() == pair["gradients"].keys()
    assert len(alone["gradients"]) == 2 * RUNS[name].get("training__epochs", 2)
    for place, gradients in alone["gradients"].items():
        assert apart(gradients, pair["gradients"][place]) < 1e-9, place


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_a_run_ends_as_in_one_process(found, name: str) -> None:
    alone, pair = found["alone"][name], found["first"][name]
    for one, other in zip(alone["freezing"], pair["freezing"], strict=True):
        assert (one["order"], one["events"]) == (other["order"], other["events"])
        assert one["ratios"] == pytest.approx(other["ratios"], abs=1e-9)
    assert alone["probes"] == pair["probes"]
    assert alone["random"].keys() == pair["random"].keys()
    assert all(torch.equal(state, pair["random"][source]) for source, state in alone["random"].items())
    for part in ("model", "method"):
        states = [
            {
                # Without the last row of a memory: it holds rejected images, which differ.
                key: (value[:-1] if key.startswith("memory.") and value.ndim else value).double()
                for key, value in run[part].items()
                if value.numel()
            }
            for run in (alone, pair)
        ]
        for key, value in states[0].items():
            torch.testing.assert_close(states[1][key], value, rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
    losses = [[line["loss"] for line in run["per_epoch"]] for run in (alone, pair)]
    assert all(one == pytest.approx(other, abs=1e-9) for one, other in zip(*losses, strict=True))
    assert [e["steps"] for e in alone["per_epoch"]] == [e["steps"] for e in pair["per_epoch"]]


@pytest.mark.parametrize("name", RUNS)
def test_both_processes_hold_the_same_bits(found, name: str) -> None:
    first, second = found["first"][name], found["second"][name]
    for part in ("model", "method"):
        assert all(torch.equal(value, second[part][key]) for key, value in first[part].items())
    assert first["freezing"] == second["freezing"]
    assert first["probes"] == second["probes"]


def test_local_norms_see_their_share(found) -> None:
    """Batch norms that are not synchronised give other gradients, and similar running statistics."""
    assert {name.split()[0] for name in SYNCHRONISED} == set(OBJECTIVES)
    alone, pair = found["alone"]["simsiam local"], found["first"]["simsiam local"]
    assert apart(alone["gradients"][1, 1], pair["gradients"][1, 1]) > 1e-3
    key = "encoder.1.running_mean"
    torch.testing.assert_close(pair["model"][key], alone["model"][key], rtol=0.5, atol=0.05)


@pytest.mark.parametrize("name", ["simsiam lump", "simclr si", "barlow_twins der"])
def test_frozen_parameters_are_not_sent(found, name: str) -> None:
    """The bytes sent in a step fall by those of the frozen parameters."""
    pair = found["first"][name]
    (entry,) = pair["freezing"]
    size, sent = pair["unit_bytes"], pair["sent"]
    first, second = (event["frozen"] for event in entry["events"])
    assert sent[1, 1] == sent[1, 2] > 0
    assert sent[1, 2] - sent[2, 1] == sum(size[unit] for unit in first) > 0
    assert sent[2, 1] - sent[2, 2] == sum(size[unit] for unit in second) > 0
    assert [line["all_reduced_bytes"] for line in pair["per_epoch"]] == list(sent.values())
    assert {line["all_reduced_bytes"] for line in found["alone"][name]["per_epoch"]} == {0}


def test_a_process_that_dies_ends_the_run_and_it_goes_on(tmp_path, capsys, monkeypatch) -> None:
    """Without torchrun's supervision, the other process notices by itself."""
    folder = tmp_path / "run"
    (code, told), (death, _) = finish(start(["-m", "ptlf", *MORTAL, "--out", str(folder)], 2), 90)
    assert death == -9
    assert code == 2
    assert "ptlf: another process of this run has ended, or does not answer" in told
    assert "Traceback" not in told
    assert (folder / "checkpoints").exists()
    assert not (folder / ".lock").exists()
    # A single process can resume: a checkpoint does not depend on the number of processes.
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["train", "--resume", str(folder), "--trust-code"]) == 0
    assert "continuing with task" in " ".join(capsys.readouterr().out.split())
    results = json.loads((folder / "results.json").read_text())
    assert results["status"] == "finished"
    assert [(line["task"], line["epoch"]) for line in epoch_lines(results)] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_signal_to_one_stops_all(tmp_path) -> None:
    folder = tmp_path / "run"
    words = [*MORTAL, "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "500", "--out", str(folder)]
    processes = start(["-m", "ptlf", *words], 2)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "checkpoints").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGTERM)
    finally:
        (code, told), (second, silent) = finish(processes, 60)
    assert (code, second) == (143, 143), told + silent
    assert f"continue with `ptlf train --resume {folder} --trust-code`" in told
    assert silent == ""
    assert json.loads((folder / "results.json").read_text())["status"] == "stopped"


def test_torchrun_restarts_and_the_run_goes_on(tmp_path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["-m", "ptlf", *MORTAL, "--out", str(tmp_path / "run")]
    how = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    done = subprocess.run([sys.executable, *words], env=environment(), **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing with task" in " ".join(done.stdout.split())
    assert done.stdout.count("files: ") == 1  # only rank 0 prints
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["status"], results["environment"]["processes"]) == ("finished", 2)


def test_what_three_processes_cannot_share_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(processes, "_world_size", 3)
    for batch, told in {128: "choose a multiple of 3", 3: "at least 6"}.items():
        with pytest.raises(UserError, match=told):
            check_batch(TrainingConfig(batch=batch), [1000])
    check_batch(TrainingConfig(batch=126), [1000])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="every process has its own GPU; use --device cuda"):
        processes.local_device(torch.device("cuda:0"))
    with pytest.raises(UserError, match="there are 2 GPUs here, too few for process 2"):
        processes.local_device(torch.device("cuda"))


def test_a_norm_that_does_more_is_not_replaced() -> None:
    """Such as timm's, whose forward has the activation too."""

    class WithReLU(torch.nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    with pytest.raises(UserError, match=r"WithReLU is no plain batch norm.*sync_batch_norm false"):
        synchronise(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), WithReLU(4)))
    kept = torch.nn.SyncBatchNorm(4)
    synchronise(torch.nn.Sequential(kept))
    assert type(kept) is torch.nn.SyncBatchNorm
