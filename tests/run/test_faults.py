"""What can go wrong while a run goes: kills, signals, two runs in one folder, bad numbers; and the command to go on."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import QUICK, Done, StopsIn, StopsInItsLastMoments, run_cli, tiny_config
from faults import lasting
from PIL import Image
from torch import nn

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.evaluation import Gallery
from ptlf.freezing import ProgressiveFreezing
from ptlf.methods.si import SI
from ptlf.report.live import Watcher
from ptlf.run.config import Config
from ptlf.run.folder import lock_of_run
from ptlf.run.loop import Run
from ptlf.run.results import read_lines, read_results
from ptlf.stream import Dataset, Images, Stream, Task
from ptlf.training.checkpoint import read_checkpoint
from ptlf.training.process import Stopped, StopSignals
from ptlf.training.trainer import EpochState, Trainer

QUICK = [*QUICK, "--training.epochs", "2"]


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened() -> None:
    """`make faults` is the long version."""
    words = [sys.executable, str(Path(__file__).parent.parent / "faults.py"), "--runs", "2", "--seed", "100"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same") == 2
    assert "killed []" not in done.stdout


def test_the_table_of_faults_names_tests_that_exist() -> None:
    tests = Path(__file__).parent.parent
    code = "".join(path.read_text() for path in tests.rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", (tests.parent / "docs" / "faults.md").read_text()))
    assert len(names) > 10
    assert [name for name in sorted(names) if f"def {name}(" not in code] == []


class Signals(Watcher):
    """Sends this process a signal at its n-th step, as often as said."""

    def __init__(self, number: int, step: int, times: int = 1) -> None:
        self.number, self.left, self.times = number, step, times

    def step(self, views: int) -> None:
        self.left -= 1
        if self.left == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def watched(watcher: Watcher, *words: object, code: int = 0) -> Done:
    """`ptlf WORDS` with this watcher of its runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.commands.train.Live", lambda name: watcher)
        return run_cli(*words, code=code)


def resume(folder: Path, *words: str, code: int = 0) -> Done:
    return run_cli("train", "--resume", folder, "--trust-code", *words, code=code)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, capfd, number: int, code: int) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    folder = tmp_path / "run"
    told = watched(
        Signals(number, 8), "train", "--recipe", "digits/simsiam/lump", "--out", folder, *QUICK, code=code
    ).err
    assert "finishing what is under way, then saving" in capfd.readouterr().err
    assert f"continue with `ptlf train --resume {folder} --trust-code`" in told  # its encoder is code of our own
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (folder / "checkpoints" / "task02-epoch000-step00002.ckpt").exists()
    assert read_results(folder)["status"] == "stopped"
    assert "continuing with task 2, epoch 1, step 3" in " ".join(resume(folder).out.split())
    run_cli("train", "--trust-code", "-c", folder / "config.yaml", "--out", tmp_path / "alone")
    assert lasting(read_results(folder)) == lasting(read_results(tmp_path / "alone"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled images of two classes."""
    folder = tmp_path_factory.mktemp("known")
    for label, pixels in enumerate(np.random.default_rng(0).integers(0, 255, (2, 10, 16, 16, 3), np.uint8)):
        (folder / str(label)).mkdir()
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(folder / str(label) / f"{number}.png")
    return folder


def interruptible(known: Path) -> Config:
    """A method that does something at the end of a task, and no checkpoint between that and the test."""
    settings = {"method__name": "si", "training__epochs": 1, "evaluation__reference": str(known)}
    settings["evaluation__gallery"] = True
    return tiny_config(**settings, evaluation__batch=64, checkpoint__every_epochs=0)


@pytest.fixture(scope="module")
def uninterrupted(known: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    Run(interruptible(known), folder).train()
    return folder


NOTHING = "without saving: this run has no checkpoint and begins anew; "
LOOK = "without saving: what was done since the last checkpoint, after-task02.ckpt, is repeated; "


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        ("testing what the encoder knew before, features", NOTHING),
        ("gallery before training, features", NOTHING),
        ("testing after task 1 of 2, features", ""),
        ("testing after task 2 of 2, probes", ""),
        ("gallery after training, features", LOOK),
    ],
)
def test_a_signal_in_a_test_is_heeded_and_the_run_goes_on_to_the_same_bits(
    tmp_path: Path, known: Path, uninterrupted: Path, monkeypatch, place: str, lost: str
) -> None:
    folder, ended, end_task = tmp_path / "run", [], SI.end_task
    monkeypatch.setattr(SI, "end_task", lambda self, *task: (ended.append(task[0]), end_task(self, *task)))
    with pytest.raises(Stopped) as stopped:
        Run(interruptible(known), folder).train(StopsIn(place))
    assert str(stopped.value).startswith(f"stopped {lost}".strip().rstrip(";") + "; continue with `ptlf train --resume")
    assert read_results(folder)["status"] == "stopped"
    Run(interruptible(known), folder).train(resume=True)
    assert ended == [0, 1]
    assert lasting(read_results(folder)) == lasting(read_results(uninterrupted))
    for name in ("encoder.safetensors", "gallery.json"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()


@pytest.mark.parametrize(
    ("update", "call", "lost"),
    [
        ("one-shot", 2, "without saving: what was done since the last checkpoint, after-task01.ckpt, is repeated"),
        ("per-epoch", 5, ""),  # in a later epoch: the run goes on to its first step, and saves itself
    ],
)
def test_a_signal_in_a_correlation_loses_nothing_learnt(
    tiny, tmp_path, monkeypatch, update: str, call: int, lost: str
) -> None:
    small = {"freezing__batches": 3, "freezing__final": 0.67, "stream__per_class": 64}
    config = tiny("digits/simsiam/ptlf", freezing__update=update, checkpoint__every_epochs=0, **small)
    alone, calls, sample = Run(config, tmp_path / "alone").train(), [], Trainer.sample_gradients

    def signals(*given):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(*given)

    monkeypatch.setattr(Trainer, "sample_gradients", signals)
    with pytest.raises(Stopped) as stopped:
        Run(config, tmp_path / "run").train()
    assert str(stopped.value).startswith(f"stopped {lost}".strip() + "; continue with `ptlf train --resume")
    assert len(calls) == (call if lost else 6)
    assert read_results(tmp_path / "run")["status"] == "stopped"
    assert lasting(Run(config, tmp_path / "run").train(resume=True)) == lasting(alone)
    assert (tmp_path / "run/encoder.safetensors").read_bytes() == (tmp_path / "alone/encoder.safetensors").read_bytes()


def test_a_second_ctrl_c_leaves_at_once(tmp_path) -> None:
    run = tmp_path / "run"
    told = watched(Signals(signal.SIGINT, 8, times=2), "train", "--out", run, *QUICK, code=130).err
    names = {path.name for path in (run / "checkpoints").iterdir()}
    last = "what was done since the last checkpoint, after-task01.ckpt, is repeated"
    again = f"`ptlf train --resume {run} --trust-code`"
    assert f"ptlf: stopped without saving: {last}; continue with {again}" in told
    assert "after-task01.ckpt" in names
    assert not any(name.startswith("task02") for name in names)
    assert not (run / ".lock").exists()


@pytest.mark.parametrize(
    ("times", "settings", "lost"),
    [
        (2, [], "what was done since the last checkpoint, after-task01.ckpt, is repeated"),
        (1, ["--checkpoint.enabled", "false"], "this run has no checkpoint and begins anew"),
    ],
)
def test_a_sweep_left_at_once_says_what_is_lost(tmp_path, times: int, settings: list[str], lost: str) -> None:
    words = ["sweep", "digits/simsiam/lump", "--out", str(tmp_path), *QUICK, "--training.epochs", "1", *settings]
    told = watched(Signals(signal.SIGINT, 5, times), *words, code=130).err.splitlines()[-1]
    assert told == f"ptlf: stopped without saving: {lost}; `ptlf {shlex.join(words)}` continues from here"
    shown = run_cli(*words).out
    assert "1 run: 1 to resume\nrun 1 of 1: digits/simsiam/lump, seed 0\n" in shown
    assert ("continuing with task 2, epoch 1, step 1" in shown) == ("after-task01" in lost)


def test_ctrl_c_while_a_run_is_built_says_that_the_sweep_goes_on(tmp_path, capsys, monkeypatch) -> None:
    def build(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def planned(*arguments: object, **how: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ptlf.run.sweep.plan", planned)  # before any run is built
        assert main(["sweep", "digits/simsiam/lump", "--out", str(tmp_path)]) == 130
    assert "continues from here" in capsys.readouterr().err
    monkeypatch.setattr("ptlf.run.sweep.Run", build)
    words = ["sweep", "digits/simsiam/lump", "--out", str(tmp_path / "a b"), *QUICK]
    assert main(words) == 130
    assert capsys.readouterr().err == f"ptlf: stopped; `ptlf {shlex.join(words)}` continues from here\n"


def test_a_run_that_is_finished_goes_on_with_no_task(tmp_path) -> None:
    class Told(Watcher):
        def begin(self, about: list[str], *numbers: int) -> None:
            self.about = about

    config = tiny_config("digits/simsiam/lump", training__epochs=1)
    Run(config, tmp_path / "run").train()
    told = Told()
    Run(config, tmp_path / "run").train(told, resume=True)
    assert told.about[1:] == ["all tasks are learnt"]


def test_a_second_sigterm_changes_nothing_and_a_signal_that_is_ignored_stays_ignored() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.stop_signal == signal.SIGTERM
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.stop_signal is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_a_thread_leaves_signals_alone(tiny, tmp_path) -> None:
    done: list[dict] = []
    config = tiny(evaluation__gallery=False)
    thread = threading.Thread(target=lambda: done.append(Run(config, tmp_path / "run").train()))
    thread.start()
    thread.join()
    assert done[0]["status"] == "finished"


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, capsys) -> None:
    code = (
        "import os, signal, sys, pathlib; from ptlf.run.folder import lock_of_run\n"
        "held = lock_of_run(pathlib.Path(sys.argv[1])); held.__enter__()\n"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        pid = other.stdout.readline().strip()
        with pytest.raises(UserError, match=f"in use by process {pid} on "), lock_of_run(tmp_path):
            pass
        other.kill()
    assert (tmp_path / ".lock").read_text().startswith(pid)
    with lock_of_run(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")
    assert not (tmp_path / ".lock").exists()


class Poisons(Watcher):
    """Puts NaN into the weights at the n-th step."""

    def __init__(self, run: Run, left: int) -> None:
        self.run, self.left = run, left

    def step(self, views: int) -> None:
        self.left -= 1
        if self.left == 0:
            with torch.no_grad():
                next(self.run.model.encoder.parameters()).fill_(float("nan"))


@pytest.mark.parametrize(
    ("step", "every", "told"),
    [
        (7, 0, "loss became nan in task 2, epoch 1, step 2; the last good checkpoint is .*after-task01.ckpt; try a"),
        (8, 2, "weights are no longer finite in task 2, epoch 1, step 2; the last good checkpoint is .*after-task01"),
        (1, 0, "loss became nan in task 1, epoch 1, step 2; there is no checkpoint yet; try a lower --training.lr"),
    ],
)
def test_bad_numbers_stop_the_run_and_are_never_saved(tiny, tmp_path, step: int, every: int, told: str) -> None:
    config = tiny(checkpoint__every_steps=every, evaluation__gallery=False)
    with pytest.raises(UserError, match=told):
        run = Run(config, tmp_path / "run")
        run.train(Poisons(run, step))
    assert read_results(tmp_path / "run")["status"] == "failed"
    for path in (tmp_path / "run").glob("checkpoints/*.ckpt"):
        assert all(tensor.isfinite().all() for tensor in read_checkpoint(path)["model"].values())
    assert Run(config, tmp_path / "run").train(resume=True)["status"] == "finished"


def test_a_loss_too_large_for_a_record_stops_the_run(tiny, tmp_path) -> None:
    run = Run(tiny(evaluation__gallery=False), tmp_path / "run")
    losses = run.method.losses
    run.method.losses = lambda *given: {name: loss + 1e35 for name, loss in losses(*given).items()}
    with pytest.raises(
        UserError, match=r"the loss became 1\.0+\d*e\+35 in task 1, epoch 1, step 1; there is no checkpoint"
    ):
        run.train()
    assert read_results(tmp_path / "run")["status"] == "failed"  # and is not called damaged
    file = tmp_path / "run" / "metrics.jsonl"
    assert len(read_lines(file)) == len(file.read_text().splitlines()) > 0


def test_a_gradient_that_is_not_finite_ends_the_correlation_in_one_sentence(tiny, tmp_path) -> None:
    run = Run(tiny("digits/simsiam/ptlf", training__epochs=1, evaluation__gallery=False), tmp_path / "run")
    run.trainer.sample_gradients = lambda indices, generator, weights: [w * float("nan") for w in weights]
    place = "in the correlation of task 2 with those before; try a lower --training.lr or --training.precision fp32"
    with pytest.raises(UserError, match=f"^the new task's gradient for unit '0' is not finite, {place}") as told:
        run.train()
    assert "after-task01.ckpt" in told.value.__notes__[0]
    assert read_results(tmp_path / "run")["status"] == "failed"


def test_a_collapse_is_warned_about_once(tiny, capsys) -> None:
    encoder = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 5))
    nn.init.constant_(encoder[2].weight, 1e-6)
    Run(tiny(training__lr=1e-9), encoder=encoder).train()
    told = capsys.readouterr().err
    assert told.count("the representation has collapsed in task 1, epoch 1") == told.count("ptlf:") == 1
    Run(tiny()).train()
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def unfinished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    words = ["train", "--recipe", "digits/simsiam/lump", "--out", folder, *QUICK]
    watched(Signals(signal.SIGINT, 4), *words, code=130)
    return folder


@pytest.fixture
def unfinished(unfinished_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unfinished_run, tmp_path / "run")


def test_what_would_overwrite_an_unfinished_run_is_refused(unfinished_run: Path, tmp_path: Path) -> None:
    told = run_cli("train", "--out", unfinished_run, *QUICK, code=2).err
    assert f"already holds a run that has not finished; resume it with `ptlf train --resume {unfinished_run}`" in told
    for words in (["--seed=3"], ["--recipe", "digits/simsiam/lump"], ["--out", "x"], ["-c", "x"]):
        told = run_cli("train", "--resume", unfinished_run, *words, code=2).err
        file, word = unfinished_run / "config.yaml", words[0].partition("=")[0]
        assert f"--resume takes the settings of {file}; leave out {word}" in told
    told = run_cli("train", "--resume", tmp_path, code=2).err
    assert f"there is no configuration file {tmp_path / 'config.yaml'}" in told
    assert "needs --out DIR" in run_cli("train", code=2).err


def test_without_a_checkpoint_it_starts_from_the_beginning(unfinished: Path) -> None:
    shutil.rmtree(unfinished / "checkpoints")
    assert "continuing" not in resume(unfinished).out
    assert len((unfinished / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_checkpoint_of_other_settings_is_refused(unfinished: Path) -> None:
    file = unfinished / "config.yaml"
    text, before = file.read_text(), (unfinished / "results.json").read_bytes()
    for old, new, change in (
        ("lr: 0.3", "lr: 3.0", "training.lr was 0.3 and is 3.0"),
        ("seed: 0", "seed: 7", "seed was 0 and is 7"),
        ("  - - 2\n    - 3", "  - - 2\n    - 4", "stream.groups was [[0, 1], [2, 3]] and is [[0, 1], [2, 4]]"),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        told = resume(unfinished, code=2).err
        assert f"the settings in {file} have changed: {change}; put them back, or begin anew" in told
        assert (unfinished / "results.json").read_bytes() == before


def test_what_does_not_change_results_may_change_and_a_finished_run_says_so(unfinished: Path) -> None:
    text = (unfinished / "config.yaml").read_text()
    for old, new in (("keep: 2", "keep: 5"), ("  batch: 512", "  batch: 64"), ("device: cpu", "device: auto")):
        assert old in text
        text = text.replace(old, new)
    (unfinished / "config.yaml").write_text(text)
    resume(unfinished, "--device", "cpu")
    config = (unfinished / "config.yaml").read_text()
    resume(unfinished, "--device", "cpu")
    assert (unfinished / "config.yaml").read_text() == config
    assert "already finished" in " ".join(resume(unfinished).out.split())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """In the second task, with a frozen unit, momentum, losses of an epoch and a gallery."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    settings = {"freezing__final": 0.67, "evaluation__gallery": True, "stream__per_class": 64, "training__epochs": 3}
    config = tiny_config("digits/simsiam/ptlf-cost", **settings)
    with pytest.raises(Stopped):
        Run(config, folder).train(Signals(signal.SIGTERM, 5))
    return config, folder


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize(
    "bug", [(ProgressiveFreezing, "load_state_dict"), (EpochState, "__init__"), (Gallery, "as_dict")]
)
def test_a_bug_while_loading_is_not_blamed_on_the_checkpoint(stopped, monkeypatch, bug, error: type) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error("ours")

    monkeypatch.setattr(*bug, broken)
    with pytest.raises(error, match="ours"):
        Run(*stopped).train(resume=True)


def noise(tasks: int, seed: int, count: int = 30) -> Stream:
    """A folder per task: one array of images, with task numbers as labels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (tasks * count, 8, 8, 3), dtype=np.uint8)
    labels = np.repeat(np.arange(tasks), count)
    data = Dataset("noise", tuple(map(str, range(tasks))), Images(pixels, labels), None, "tasks")
    made = tuple(Task(f"day {n}", data.train, np.flatnonzero(labels == n)) for n in range(tasks))
    return Stream("noise", data, made, ())


class TestResumeImages:
    """Images of tasks begun must be those that were learnt."""

    def test_other_images_are_refused(self, tiny, tmp_path) -> None:
        config, folder = tiny(training__batch=10), tmp_path / "run"
        with pytest.raises(Stopped):
            Run(config, folder, stream=noise(3, seed=0)).train(Signals(signal.SIGTERM, 10))  # in task 2
        for stream, told in (
            (noise(3, seed=1), r"the images of 'task 1, day 0' have changed: sha256 was '\w+' and is '\w+'"),
            (noise(3, seed=0, count=31), "the images of 'task 1, day 0' have changed: count was 30 and is 31"),
            (noise(4, seed=0), "the stream had 3 tasks and now has 4"),  # the same numbers, and then 30 images more
        ):
            with pytest.raises(UserError, match=told):
                Run(config, folder, stream=stream).train(resume=True)
        changed, grown = noise(3, seed=0), replace(noise(4, seed=0), arrived=1)
        changed.data.train.pixels[-1] += 1  # of task 3, which has not begun
        for stream, tasks in ((noise(3, seed=0), 3), (changed, 3), (grown, 4)):
            again = shutil.copytree(folder, tmp_path / "again", dirs_exist_ok=True)
            assert len(Run(config, again, stream=stream).train(resume=True)["tasks"]) == tasks
            shutil.rmtree(again)

    def test_a_repacked_set_is_refused(self, tmp_path) -> None:
        rng, data, run = np.random.default_rng(0), tmp_path / "data", tmp_path / "run"
        for day in "ab":
            (tmp_path / "photos" / day).mkdir(parents=True)
            for n in range(12):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "photos" / day / f"{n}.png")
        pack = ["data", "pack", tmp_path / "photos", "--name", "days", "--size", "8", "--folders", "tasks"]
        pack += ["--data-root", data]
        run_cli(*pack)
        words = ["--recipe", "folder/simsiam/lump", "--stream.pack", "days", "--training.batch", "6", *QUICK[2:6]]
        words += ["--data-root", str(data), "--device", "cpu", "--evaluation.gallery", "false"]
        watched(Signals(signal.SIGINT, 2), "train", "--out", run, *words, code=130)
        run_cli(*pack, "--overwrite")  # the same photographs
        (tmp_path / "elsewhere").mkdir()
        (data / "days").rename(tmp_path / "elsewhere" / "days")
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "photos" / "a" / "3.png")
        run_cli(*pack)
        assert "the images of 'task 1, a' have changed: sha256 was" in resume(run, code=2).err
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace(str(data), str(tmp_path / "elsewhere")))
        resume(run)


def test_a_sweep_stopped_in_a_runs_last_moments_begins_no_other(tmp_path) -> None:
    words = ["sweep", "digits/simsiam/lump", "digits/simsiam/finetune", "--out", str(tmp_path), *QUICK]
    assert (
        f"stopped; `ptlf {shlex.join(words)}` continues from here"
        in watched(StopsInItsLastMoments(), *words, code=143).err
    )
    assert [folder.name for folder in tmp_path.iterdir()] == ["digits-simsiam-lump-seed0"]
    assert read_results(tmp_path / "digits-simsiam-lump-seed0")["status"] == "finished"


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path) -> None:
    words = ["sweep", "digits/simsiam/lump", "digits/simsiam/finetune", "--out", str(tmp_path), *QUICK]
    shown = watched(Signals(signal.SIGTERM, 4), *words, code=143)
    assert f"stopped; `ptlf {shlex.join(words)}` continues from here" in shown.err
    assert numbered(shown.out) == ["2 runs: 2 pending", "run 1 of 2: digits/simsiam/lump, seed 0"]
    shown = run_cli(*words)
    assert "continuing with task 1, epoch 2, step 2" in " ".join(shown.out.split())
    runs = ["run 1 of 2: digits/simsiam/lump, seed 0", "run 2 of 2: digits/simsiam/finetune, seed 0"]
    assert numbered(shown.out) == ["2 runs: 1 to resume, 1 pending", *runs]
    runs = ["run 3 of 4: digits/simsiam/lump, seed 1", "run 4 of 4: digits/simsiam/finetune, seed 1"]
    assert numbered(run_cli(*words, "--seeds", "0", "1").out) == ["4 runs: 2 done, 2 pending", *runs]


def numbered(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if re.match(r"\d+ runs?:|run \d", line)]


def test_the_second_run_in_a_folder_is_refused(tmp_path) -> None:
    with lock_of_run(tmp_path):
        told = run_cli("train", "--out", tmp_path, *QUICK, code=2).err
    assert f"{tmp_path} is in use by process {os.getpid()} on " in told
    assert list(tmp_path.iterdir()) == []
