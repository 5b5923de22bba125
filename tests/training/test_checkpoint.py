"""Checkpoint files: round trips, damage, hostile content; and stopped runs, which must continue bit for bit."""

import contextlib
import errno
import json
import os
import pickle
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import StopsAt
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from ptlf.core.errors import UserError
from ptlf.core.files import locked
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.report.live import Watcher
from ptlf.run.folder import lock_of_run
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.run.snapshots import Snapshots
from ptlf.training import checkpoint
from ptlf.training.checkpoint import CheckpointConfig, Checkpoints, HostCopy, Position, write_checkpoint
from ptlf.training.optimizers import OPTIMIZERS, UpdateRule
from ptlf.training.process import Stopped
from ptlf.training.trainer import EpochState

pytestmark = pytest.mark.slow


def state(number: int = 0) -> dict:
    return {"number": number, "weights": {"a": torch.full((4, 3), float(number))}}


def through_a_file(state: dict, path: Path) -> dict:
    write_checkpoint(path, HostCopy(state))
    return checkpoint.read_checkpoint(path)


def tensors_in_file(path: Path) -> dict[str, torch.Tensor]:
    """As another reader of safetensors finds them, behind the first line."""
    return load(path.read_bytes().partition(b"\n")[2])


def test_what_goes_in_comes_out(tmp_path) -> None:
    path, shared = tmp_path / "x.ckpt", torch.arange(6.0).view(2, 3)
    tensors = [shared, shared.T, shared[0], torch.tensor(3), torch.zeros(0, 2), torch.ones(3).bfloat16()]
    tensors += [torch.Generator().manual_seed(1).get_state(), torch.tensor([1.0, float("nan"), -0.0])]
    # Such as a rotary embedding, or a table of indices.
    tensors += [torch.arange(3).to(dtype) for dtype in (torch.uint16, torch.float8_e4m3fn)]
    values = [None, True, 1, 0.1 + 0.2, 1e-320, "text", [], {}]
    back = through_a_file({"tensors": tensors, "values": values, "deep": {"er": {"t": shared}}}, path)
    assert back["values"] == values
    assert torch.equal(back["deep"]["er"]["t"], shared)
    for one, other in zip(tensors, back["tensors"], strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)
    found = tensors_in_file(path)
    assert sorted(found)[:2] == ["deep/er/t", "tensors/0"] and torch.equal(found["tensors/1"], shared.T)


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_copied_to_pinned_memory(tmp_path) -> None:
    given = {"a": torch.randn(64, 8, 3, 3, device="cuda").to(memory_format=torch.channels_last), "b": torch.ones(())}
    expected = given["a"].cpu().contiguous()
    copy = HostCopy(given)
    given["a"].zero_()
    assert copy.tensors["a"].is_pinned() and not copy.tensors["b"].is_pinned()
    write_checkpoint(tmp_path / "x", copy)
    assert torch.equal(tensors_in_file(tmp_path / "x")["a"], expected)


class Gate:
    """Holds up every checkpoint's thread before it writes, until it is opened."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.writing = threading.Event(), 0
        whole = checkpoint.write_whole
        monkeypatch.setattr(checkpoint, "write_whole", lambda *words: (self.wait(), whole(*words)))

    def wait(self) -> None:
        self.writing += 1
        assert self.open.wait(60)
        self.writing -= 1


def test_what_changes_while_the_thread_writes_is_not_in_the_file(tmp_path, monkeypatch) -> None:
    gate, kept, given = Gate(monkeypatch), Checkpoints(tmp_path, CheckpointConfig()), state(1)
    kept.save(Position(0, 1), given)
    given["weights"]["a"].zero_()
    given["number"] = 2
    assert kept.last is None  # of it nothing is on the disk yet
    gate.open.set()
    found = kept.load()
    assert kept.files() == [kept.last]
    assert found["number"] == 1 and torch.equal(found["weights"]["a"], torch.full((4, 3), 1.0))


def test_one_checkpoint_is_written_at_a_time(tmp_path, monkeypatch) -> None:
    gate, kept = Gate(monkeypatch), Checkpoints(tmp_path, CheckpointConfig(keep=9))
    most = []
    whole = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *copy: (most.append(gate.writing), whole(*copy))[1])
    kept.save(Position(0, 1), state(1))
    opens = threading.Timer(0.05, gate.open.set)
    opens.start()
    for epoch in range(2, 6):  # the first of these waits for the gate
        kept.save(Position(0, epoch), state(epoch))
    kept.wait()
    assert [Position.of_file(path.name) for path in kept.files()] == [Position(0, epoch) for epoch in range(1, 6)]
    assert most == [0] * 5
    opens.join()


@pytest.mark.parametrize("stop", [None, 3])
def test_a_run_ends_only_when_its_last_checkpoint_is_written(tiny, tmp_path, monkeypatch, stop: int | None) -> None:
    """At its end, and when it is stopped."""
    gate, order = Gate(monkeypatch), []
    config = tiny("digits/simsiam/lump", checkpoint__every_epochs=0)
    wait, save_results = Checkpoints.wait, Snapshots.save_results

    def waiting(kept: Checkpoints) -> None:
        gate.open.set()
        wait(kept)

    def saving(snapshots: Snapshots) -> None:
        order.append((snapshots.progress.status, gate.writing))
        save_results(snapshots)

    monkeypatch.setattr(Checkpoints, "wait", waiting)
    monkeypatch.setattr(Snapshots, "save_results", saving)
    run = Run(config, tmp_path / "run")
    with contextlib.nullcontext() if stop is None else pytest.raises(Stopped):
        run.train(None if stop is None else StopsAt(stop))
    assert order[-1] == ("finished" if stop is None else "stopped", 0)
    files = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert files == (["after-task01.ckpt", "after-task02.ckpt"] if stop is None else [Position(0, 0, 3).file])


def test_an_unforeseen_error_of_the_thread_is_not_lost(tmp_path, monkeypatch) -> None:
    kept = Checkpoints(tmp_path, CheckpointConfig())
    monkeypatch.setattr(checkpoint, "save", lambda *copy: 1 / 0)
    kept.save(Position(0, 1), state())
    with pytest.raises(ZeroDivisionError):
        kept.wait()
    assert kept.last is None


def refuse(*words, **named) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    """In a folder that became read-only. Neither the new file can be named, nor the unfinished one be removed."""
    kept = Checkpoints(tmp_path, CheckpointConfig(keep=1), "ptlf train --resume RUN")
    kept.save(Position(0, 1), state(1))
    kept.wait()
    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(os, "replace", refuse)
        patch.setattr(Path, "unlink", refuse)
        kept.save(Position(0, 2), state(2))
        kept.save(Position(0, 3), state(3))
    way = "put that right, and `ptlf train --resume RUN` continues from task01-epoch001-step00000.ckpt"
    assert str(caught.value) == f"cannot write {kept.folder / Position(0, 2).file}: Permission denied; {way}"
    kept.wait()  # told once
    assert [path.name for path in kept.files()] == [Position(0, 1).file]
    assert kept.load()["number"] == 1


def test_locks_that_cannot_be_removed_or_made_are_no_error(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="the first"):
        patch.setattr(Path, "unlink", refuse)
        with locked(tmp_path / "lock", "held"):
            raise ValueError("the first")
    with locked(tmp_path / "lock", "held"):  # it was released
        pass

    def without(descriptor: int, what: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)
    with lock_of_run(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_when_it_is_time_and_which_files_are_kept(tmp_path) -> None:
    rows = [
        ({}, Position(0, 1), True), ({}, Position(0, 0, 7), False), ({}, Position(3), True),
        ({"every_epochs": 3}, Position(0, 2), False), ({"every_epochs": 3}, Position(0, 6), True),
        ({"every_epochs": 0}, Position(0, 6), False), ({"every_epochs": 0}, Position(1), True),
        ({"every_steps": 5}, Position(0, 2, 10), True), ({"every_steps": 5}, Position(0, 2, 11), False),
        ({"every_minutes": 1e-9}, Position(0, 2, 11), True), ({"every_minutes": 60}, Position(0, 2, 11), False),
    ]  # fmt: skip
    for settings, position, due in rows:
        assert Checkpoints(tmp_path, CheckpointConfig(**settings)).due(position) is due, (settings, position)
    kept = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    places = [Position(*at) for at in ((0, 1), (0, 2, 5), (1,), (8, 9), (9, 10, 99_999), (9, 1000))]
    for place in places:
        assert Position.of_file(place.file) == place
        kept.save(place, state(place.epoch))
    kept.wait()
    assert [Position.of_file(path.name) for path in kept.files()] == [places[2], *places[-2:]]
    assert kept.load()["number"] == 1000
    assert Position.of_file("notes.ckpt") is None


def test_a_damaged_file_is_named_and_the_one_before_it_used(tmp_path, capsys) -> None:
    kept = Checkpoints(tmp_path, CheckpointConfig())
    assert kept.load() is None
    kept.save(Position(0, 1), state(1))
    kept.save(Position(0, 2), state(2))
    kept.wait()
    path = kept.folder / Position(0, 2).file
    whole = path.read_bytes()
    path.unlink()
    flipped = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(0, len(whole), 37)]
    for data in (b"", whole + b"\0", *(whole[:i] for i in range(0, len(whole), 61)), *flipped, None):
        if data is None:
            path.with_name(path.name + ".damaged").unlink()
            path.mkdir()
        else:
            path.write_bytes(data)
        found = kept.load()
        assert found is not None and found["number"] == 1, data
        assert f"{path} is damaged" in capsys.readouterr().err, data
        assert path.with_name(path.name + ".damaged").exists() and not path.exists()
    shutil.rmtree(path.with_name(path.name + ".damaged"))
    (kept.folder / Position(0, 1).file).write_bytes(b"x")
    (kept.folder / ".task01-epoch002-step00000.ckpt.part").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole; put one back"):
        kept.load()
    assert [path.suffix for path in kept.folder.iterdir()] == [".damaged"]


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_hostile_file_runs_nothing(tmp_path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "x.ckpt"
    with pytest.raises(FileExistsError):  # the payload works
        pickle.loads(pickle.dumps(Payload(tmp_path)))
    torch.save({"state": Payload(mark)}, tmp_path / "saved.pt")
    for payload in (pickle.dumps(Payload(mark)), (tmp_path / "saved.pt").read_bytes()):
        for data in (payload, checkpoint.first_line(payload) + payload, checkpoint.MAGIC + payload):
            path.write_bytes(data)
            with pytest.raises((checkpoint.DamagedCheckpoint, SafetensorError)):
                checkpoint.read_checkpoint(path)
    assert not mark.exists()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_optimizer_state_keeps_values_and_layout(tmp_path, momentum: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    model[2].bias.grad = None  # as in a frozen unit
    optimizer.step()
    before = {p: dict(values) for p, values in optimizer.state.items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    stored = through_a_file(checkpoint.optimizer_state(optimizer, names), tmp_path / "x")
    checkpoint.load_optimizer_state(optimizer, stored, names)
    assert optimizer.state.keys() == before.keys()
    for parameter, values in before.items():
        for name, value in values.items():
            loaded = optimizer.state[parameter][name]
            assert (loaded is None) == (value is None)
            if value is not None:
                assert torch.equal(loaded, value)
                assert loaded.stride() == parameter.stride()


class Slowing(torch.optim.Optimizer):
    """Counts and adapts in its parameter groups, as Schedule-Free and Prodigy do."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "fused": None, "k": 0, "d": torch.zeros(())})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] += 0.5
            group["last"] = group["d"] / group["k"]
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                parameter -= group["lr"] / group["k"] * group["d"] * parameter.grad


class SlowingRule(UpdateRule):
    @staticmethod
    def make(config, parameters, lr):
        return Slowing(parameters, lr)


def test_what_an_optimizer_keeps_in_its_groups_is_kept(tmp_path) -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    first, second = (Slowing(layer.parameters(), lr) for layer, lr in zip(layers, (0.1, 0.2), strict=True))
    names = [{parameter: name for name, parameter in layer.named_parameters()} for layer in layers]
    first.step()
    stored = through_a_file(checkpoint.optimizer_state(first, names[0]), tmp_path / "x")
    assert stored["optimizer_groups"] == [{"k": 1, "d": torch.tensor(0.5), "last": torch.tensor(0.5)}]
    read_by_a_graph = second.param_groups[0]["d"]
    second.param_groups[0]["fused"] = True  # on another device it may be
    for state in (stored, {"optimizer": {}}):  # an older checkpoint has no groups
        checkpoint.load_optimizer_state(second, state, names[1])
        loaded = {name: value for name, value in second.param_groups[0].items() if name != "params"}
        assert loaded == {"lr": 0.2, "betas": (0.9, 0.99), "fused": True, "k": 1, "d": 0.5, "last": 0.5}
        assert second.param_groups[0]["d"] is read_by_a_graph


def test_an_optimizer_that_counts_in_its_groups_goes_on_to_the_same_bits(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "slowing", SlowingRule)
    small = {"stream__per_class": 48, "training__batch": 32, "evaluation__enabled": False}
    assert_resumes(tiny(training__optimizer="slowing", **small), tmp_path, 2, 3)


def test_a_full_disk_stops_the_run_and_it_goes_on_later(tiny, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        config = tiny("digits/simsiam/lump", training__epochs=3)
        with pytest.raises(UserError, match=r"No space left on device; put that right, .* from task01-epoch003"):
            Run(config, disk / "run").train(FillsTheDisk(disk))
        (disk / "filler").unlink()
        results = Run(config, disk / "run").train(resume=True)
        assert results["status"] == "finished"
        assert weights(disk / "run") == weights_alone(config, tmp_path)
    finally:
        subprocess.run(["umount", disk], check=True)


class FillsTheDisk(Watcher):
    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def end_task(self, task, rows) -> None:
        free = os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_frsize
        (self.disk / "filler").write_bytes(bytes(free - 300_000))


def weights(folder: Path) -> bytes:
    return (folder / "encoder.safetensors").read_bytes()


def weights_alone(config, tmp_path: Path) -> bytes:
    Run(config, tmp_path / "alone").train()
    return weights(tmp_path / "alone")


def lasting(results: dict) -> str:
    from faults import lasting

    return json.dumps(lasting(results))


def assert_resumes(config, folder: Path, *stops: int, every_step: bool = False) -> None:
    """Stopped after these steps and resumed, a run leaves the bits of one that was not stopped. A number below zero
    counts back from its end."""
    alone = Run(config, folder / "alone").train()
    steps = sum(line["steps"] for line in epoch_lines(alone))
    stops = (1,) * steps if every_step else tuple(stop if stop > 0 else steps + stop for stop in stops)
    stopped = stop_and_go_on(config, folder / "stopped", *stops)
    assert lasting(stopped) == lasting(alone)
    assert weights(folder / "stopped") == weights(folder / "alone")


def stop_and_go_on(config, folder: Path, *stops: int) -> dict:
    for number in stops:
        with pytest.raises(Stopped):
            Run(config, folder).train(StopsAt(number), resume=True)
    return Run(config, folder).train(resume=True)


ROWS = ["simsiam cassle sgd", "barlow_twins lump sgd", "mocov2plus der lars", "byol pnn sgd", "simclr si adamw"]
ROWS += ["vicreg pfr sgd", "supervised finetune adamw", "simsiam multitask sgd", "barlow_twins anchor adamw"]


@pytest.mark.parametrize("row", ROWS)
def test_every_member_resumes_bit_exactly(tiny, tmp_path, row: str) -> None:
    """Stopped inside the first epoch of the first task, and inside the last of the second, with frozen units."""
    assert {name for each in ROWS for name in each.split()} == {*OBJECTIVES, *METHODS, *OPTIMIZERS}
    objective, method, optimizer = row.split()
    policy = "ascending" if METHODS[method].freezable else "none"
    settings = {"method__name": method, "training__optimizer": optimizer, "stream__per_class": 48}
    settings |= {"freezing__policy": policy, "freezing__final": 0.67, "training__batch": 32}
    settings |= {"encoder__name": "conftest:tiny_resnet"} if method == "pnn" else {}
    assert_resumes(tiny(f"digits/{objective}/finetune", **settings), tmp_path, 2, -3)


def test_every_step_is_a_place_to_go_on_from(tiny, tmp_path) -> None:
    config = tiny(
        "digits/simsiam/ptlf", evaluation__gallery=True, freezing__final=0.67, training__schedule="cosine",
        training__warmup=1, training__batch=32, stream__per_class=48,
    )  # fmt: skip
    assert_resumes(config, tmp_path, every_step=True)
    gallery = [(tmp_path / name / "gallery.json").read_text() for name in ("alone", "stopped")]
    assert gallery[0] == gallery[1]


def test_dropout_goes_on_where_it_was(tiny, tmp_path) -> None:
    """Code that draws from torch's global generator is reproducible, and the generator's state is restored."""
    config = tiny("digits/simsiam/finetune", encoder__name="conftest:dropping_encoder")
    before = torch.get_rng_state()
    assert_resumes(config, tmp_path, 3, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_a_gpu_run_goes_on_to_the_same_decisions(tiny, tmp_path, engine: str) -> None:
    settings = {"device": "cuda", "freezing__final": 0.67, "training__epochs": 3, "training__engine": engine}
    config = tiny("digits/simsiam/ptlf", **settings)
    alone = Run(config, tmp_path / "alone").train()
    stopped = stop_and_go_on(config, tmp_path / "stopped", 4, 7, 3)
    assert [entry["order"] for entry in stopped["freezing"]] == [entry["order"] for entry in alone["freezing"]]
    assert [entry["events"] for entry in stopped["freezing"]] == [entry["events"] for entry in alone["freezing"]]
    losses = [[line["loss"]["ssl"] for line in epoch_lines(run)] for run in (alone, stopped)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_metrics_beyond_the_checkpoint_are_dropped(tiny, tmp_path) -> None:
    config = tiny("digits/simsiam/lump", checkpoint__every_epochs=0)
    Run(config, tmp_path / "alone").train()
    stop_and_go_on(config, tmp_path / "run", 8)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"task": 9}\n{"cut')
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (tmp_path / "run" / "results.json").write_text(json.dumps({**results, "status": "running"}))
    Run(config, tmp_path / "run").train(resume=True)
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("alone", "run")]
    lines = [[lasting(json.loads(line)) for line in text.splitlines()] for text in texts]
    assert lines[0] == lines[1]


def test_seconds_of_all_parts_count_and_checkpoints_do_not(tiny, tmp_path, monkeypatch) -> None:
    """With a clock on which every checkpoint takes a thousand seconds more."""
    now, save = time.perf_counter, Checkpoints.save
    saved: list[Position] = []
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 1000 * len(saved))
    monkeypatch.setattr(Checkpoints, "save", lambda self, *words: (saved.append(words[0]), save(self, *words)))
    results = stop_and_go_on(tiny("digits/simsiam/ptlf"), tmp_path / "run", 5, 3)
    spent = results["cost"]
    assert spent["checkpoint_seconds"] > 1000 * (len(saved) - 3)  # the one at a stop cannot count itself
    assert all(0 < line["seconds"] < 1000 for line in epoch_lines(results))
    assert spent["train_seconds"] == pytest.approx(sum(line["seconds"] for line in epoch_lines(results)))
    for purpose in ("train_seconds", "correlation_seconds", "rebuild_seconds"):
        assert spent[purpose] == pytest.approx(sum(task[purpose] for task in spent["per_task"]))
    assert [task["correlation_seconds"] > 0 for task in spent["per_task"]] == [False, True]


def test_an_epoch_may_go_on_with_a_step_more_or_less() -> None:
    """With another number of processes the last, smaller batch may be used or dropped."""
    progress = EpochState(torch.zeros(1), steps=2, losses={"ssl": torch.tensor([1.0, 2.0, 0.0])})
    progress.resize(4)
    progress.add({"ssl": torch.tensor(3.0)}, 2, of=4)
    progress.add({"ssl": torch.tensor(4.0)}, 2, of=4)
    assert progress.losses["ssl"].tolist() == [1, 2, 3, 4]
    progress.resize(2)
    assert progress.losses["ssl"].tolist() == [1, 2]
