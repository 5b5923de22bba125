"""A stream that goes on: `learn` three times against `train` on all three, kills, watching a folder, bad input."""

import functools
import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Done, StopsAt, StopsIn, StopsInItsLastMoments, paint, run_cli, tiny_config, tiny_encoder
from faults import before_call, lasting, same
from PIL import Image
from safetensors.torch import load_file

import ptlf
from ptlf import learner as learner_module
from ptlf.cli import main
from ptlf.core.errors import UserError, printable, quoted
from ptlf.core.phases import Watcher
from ptlf.evaluation import EvaluationConfig
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.report.runs import read_comparison
from ptlf.run import loop, snapshots
from ptlf.run.config import POLICIES, Config
from ptlf.run.evaluator import Evaluator
from ptlf.run.folder import lock_of_run
from ptlf.run.loop import Run
from ptlf.run.snapshots import Snapshots
from ptlf.stream import packing
from ptlf.stream.arrivals import arrivals, settled
from ptlf.stream.packing import pack_folder
from ptlf.training.checkpoint import HostCopy, read_checkpoint, write_checkpoint
from ptlf.training.process import Stopped
from ptlf.training.trainer import MeasuredStep, Trainer

DAYS = {"day1": "ab", "day2": "cd", "day3": "ef"}
TRAIN, TEST, SIZE = 10, 4, 8  # images per class and their side
QUIET = Watcher()
SMALL: dict[str, Any] = {
    "stream__groups": None,
    "training__epochs": 2,
    "training__batch": 8,
    "memory__size": 12,
    "probes__knn_class__k": 5,
    "freezing__final": 0.67,
    "evaluation__gallery": False,
    "checkpoint__every_epochs": 0,
    "checkpoint__keep_tasks": 2,
}
FAST: dict[str, Any] = {"training.epochs": 1, "training.batch": 8, "objective.projection": 16, "device": "cpu"}
FAST |= {"evaluation.gallery": False, "memory.size": 12}
DIGITS = {"stream__groups": [[0, 1], [2, 3]]}
WORDS = [
    "--recipe", "digits/simsiam/ptlf", "--size", str(SIZE), "--encoder.name", "conftest:tiny_encoder",
    "--device", "cpu", "--training.epochs", "2", "--training.batch", "8", "--memory.size", "12",
    "--probes.knn_class.k", "5", "--evaluation.gallery", "false", "--freezing.final", "0.67",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pictures/DAY/{train,test}/CLASS`; and packed: each day, all of them with a folder per class (`all`), and the
    training images with a folder per day (`days`)."""
    root = tmp_path_factory.mktemp("data")
    for seed, (day, classes) in enumerate(DAYS.items()):
        for place, name in enumerate(classes):
            for count, split in ((TRAIN, "train"), (TEST, "test")):
                own = root / "pictures" / day / split / name
                paint(own, count, 10 * seed + 2 * place + (split == "test"))
                shutil.copytree(own, root / "all-pictures" / split / name)
                if split == "train":
                    shutil.copytree(own, root / "plain" / day / name)
        pack_folder(root / "pictures" / day, root, day, size=SIZE, progress=False)
    pack_folder(root / "all-pictures", root, "all", size=SIZE, progress=False)
    pack_folder(root / "plain", root, "days", size=SIZE, folders="tasks", progress=False)
    return root


@pytest.fixture(autouse=True)
def data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTLF_DATA", str(root))
    monkeypatch.setattr("ptlf.commands.train.write_page", lambda *words: None)  # takes longer than these runs


def config(name: str = "digits/simsiam/finetune", **settings: Any) -> Config:
    return tiny_config(name, **{**SMALL, **settings})


def trained(folder: Path, settings: Config, pack: str = "all") -> Path:
    """`train` on the three days, known in advance."""
    settings.stream.name, settings.stream.pack = "folder", pack
    settings.stream.groups = [list(classes) for classes in DAYS.values()] if pack == "all" else None
    Run(settings, folder).train()
    return folder


def learnt(folder: Path, settings: Config, days: list[Any] | None = None) -> Path:
    """`learn` day after day, each time from the files that the last call left."""
    for day in days or DAYS:
        learner = ptlf.Learner.load(folder, trust_code=True) if folder.exists() else ptlf.Learner.new(settings, folder)
        learner.learn(day, watcher=QUIET)
    return folder


def learn(run: Path | str, *words: object, code: int = 0, watcher: Watcher | None = None) -> Done:
    """`ptlf learn RUN WORDS`, which must end with this code."""
    with pytest.MonkeyPatch.context() as patch:
        if watcher:
            patch.setattr("ptlf.learner.Live", lambda name: watcher)
        return run_cli("learn", "--trust-code", run, *words, code=code)


def resume(run: Path, code: int = 0) -> Done:
    return run_cli("train", "--trust-code", "--resume", run, code=code)


def results_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def check_same(one: Path, other: Path) -> None:
    states = [read_checkpoint(folder / "checkpoints" / "after-task03.ckpt") for folder in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name in ("position", "tasks", "model", "method", "optimizer", "freezing", "random", "torch_random", "looks"):
        assert same(states[0][name], states[1][name]), name
    records = [{**found["record"], "spent_before": None} for found in states]  # seconds
    assert lasting(records[0]) == lasting(records[1])
    assert same(*(load_file(folder / "encoder.safetensors") for folder in (one, other)))  # its card names the stream
    results = [results_of(folder) for folder in (one, other)]
    for name in ("probes", "freezing", "cost", "status", "class_order", "units"):
        assert lasting(results[0][name]) == lasting(results[1][name]), name


GROWING = [name for name, method in METHODS.items() if not method.joint]
UNLABELLED = [name for name, objective in OBJECTIVES.items() if not objective.needs_labels]
CASES = [
    *(("simsiam", method, "correlation" if METHODS[method].freezable else "none") for method in GROWING),
    *(("simsiam", "lump", policy) for policy in POLICIES if policy != "correlation"),
    *((objective, "cassle", "correlation") for objective in UNLABELLED if objective != "simsiam"),
    *((objective, "pnn", "none") for objective in ("byol", "mocov2plus")),
]
QUICK = [("simsiam", "lump", "correlation"), ("simsiam", "cassle", "correlation"), ("byol", "pnn", "none")]


@pytest.mark.parametrize(
    ("objective", "method", "policy"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_three_days_learnt_one_by_one_end_as_if_trained_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, method: str, policy: str
) -> None:
    if (objective, method, policy) not in QUICK:  # measuring takes as long as the steps
        monkeypatch.setattr(Trainer, "cost_of_step", lambda trainer, indices: MeasuredStep(0, 0.0, None))
    encoder = "conftest:tiny_resnet" if method == "pnn" else "conftest:dropping_encoder"
    settings = {"method__name": method, "freezing__policy": policy, "encoder__name": encoder}
    name = f"digits/{objective}/finetune"
    one = learnt(tmp_path / "learnt", config(name, **settings))
    check_same(one, trained(tmp_path / "trained", config(name, **settings)))
    found = results_of(one)["probes"]
    assert [len(row) for row in found["knn_task"]["matrix"]] == [3, 3, 3]
    assert found["knn_task"]["forward_transfer"] is not None


def test_folders_without_labels_are_as_a_pack_with_a_folder_per_task(root: Path, tmp_path: Path) -> None:
    """With a gallery, tested on a set of its own."""
    settings = {"freezing__policy": "correlation", "stream__labelled": "day1", "evaluation__gallery": True}
    learner = ptlf.Learner.new(config("digits/simsiam/lump", **settings), tmp_path / "learnt", size=SIZE)
    for day in DAYS:
        learner.learn(root / "plain" / day, watcher=QUIET)
    check_same(learner.folder, trained(tmp_path / "trained", config("digits/simsiam/lump", **settings), pack="days"))
    assert (tmp_path / "learnt/gallery.json").read_bytes() == (tmp_path / "trained/gallery.json").read_bytes()
    assert learner.results["tasks"] == list(DAYS) and learner.results["eval_splits"] == ["day1"]


def test_a_run_that_ptlf_train_finished_goes_on(tmp_path: Path) -> None:
    pnn = {"method__name": "pnn", "encoder__name": "conftest:tiny_resnet"}
    settings = config(**pnn)
    settings.stream.name, settings.stream.pack, settings.stream.groups = "folder", "all", [["a", "b"], ["c", "d"]]
    Run(settings, tmp_path / "run").train()
    learnt(tmp_path / "run", settings, ["day3"])
    check_same(tmp_path / "run", trained(tmp_path / "trained", config(**pnn)))
    resume(tmp_path / "run")


def test_tests_may_be_limited_to_some_tasks(tmp_path: Path) -> None:
    """And then old tasks' images are not opened, unless a probe compares with all classes seen: here they are gone."""
    settings = {"evaluation__tasks": "last:1", "evaluation__gallery": True}
    one = learnt(tmp_path / "learnt", config(**settings))
    check_same(one, trained(tmp_path / "trained", config(**settings)))
    found = results_of(one)["probes"]["knn_class"]
    assert found["settings"]["tasks"] == "last:1"
    assert row_marks(found) == ["x..", ".x.", "..x"]
    limited = config(**settings)
    limited.probes["knn_class"].enabled = False
    other = learnt(tmp_path / "other", limited, ["day1", "day2"])
    for file in other.glob("tasks/0001-day1/*.npy"):
        file.unlink()
    learnt(other, config(), ["day3"])
    assert (other / "encoder.safetensors").read_bytes() == (one / "encoder.safetensors").read_bytes()


def row_marks(probe: dict[str, Any]) -> list[str]:
    """Of each row of the accuracy matrix, where it has a value."""
    return ["".join(".x"[value is not None] for value in row) for row in probe["matrix"]]


def noise(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (count, SIZE, SIZE, 3), dtype=np.uint8)


def test_the_gallery_may_become_smaller_with_a_new_task(tmp_path: Path) -> None:
    settings = {"evaluation__gallery": True}
    ptlf.Learner.new(config(**settings), tmp_path / "run").learn(noise(120, 0), "monday", watcher=QUIET)
    learner = ptlf.Learner.load(tmp_path / "run", trust_code=True, evaluation={"tasks": "last:1"})
    learner.learn(noise(20, 1), "tuesday", watcher=QUIET)
    found = json.loads((tmp_path / "run" / "gallery.json").read_text())
    assert found["groups"] == ["tuesday"]
    assert [len(found["looks"][moment]["points"]) for moment in ("before", "after")] == [20, 20]


def test_looks_at_other_images_are_made_again(tmp_path: Path) -> None:
    """After evaluation.tasks changed in the middle of a task."""
    settings = {"evaluation__gallery": True}
    for name in ("run", "alone"):
        ptlf.Learner.new(config(**settings), tmp_path / name).learn(noise(40, 0), "monday", watcher=QUIET)
    with pytest.raises(Stopped):
        ptlf.Learner.load(tmp_path / "run", trust_code=True).learn(noise(40, 1), "tuesday", watcher=StopsAt(2))
    limited = {"evaluation": {"tasks": "last:1"}}
    ptlf.Learner.load(tmp_path / "run", trust_code=True, **limited).learn(watcher=QUIET)
    alone = ptlf.Learner.load(tmp_path / "alone", trust_code=True, **limited)
    alone.learn(noise(40, 1), "tuesday", watcher=QUIET)
    assert (tmp_path / "run/gallery.json").read_bytes() == (tmp_path / "alone/gallery.json").read_bytes()


def test_a_checkpoint_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ptlf.Learner.new(config(evaluation__gallery=True), run).learn(noise(40, 0), "monday", watcher=QUIET)
    newest = run / "checkpoints" / "after-task01.ckpt"
    stored = read_checkpoint(newest)
    stored["model"].clear()
    write_checkpoint(newest, HostCopy(stored))
    before = files_in(run)
    learner = ptlf.Learner.load(run, trust_code=True, evaluation={"tasks": "last:1"})
    with pytest.raises(UserError, match="does not fit the encoder"):
        learner.learn(noise(40, 1), "tuesday", watcher=QUIET)
    assert files_in(run) == before


class Forked:
    """`ptlf WORDS` in a process of its own, which kills itself at the count-th call of a function."""

    def __init__(self, target: Any, name: str, count: int = 1, late: bool = False) -> None:
        self.target, self.name, self.count, self.late = target, name, count, late

    def __call__(self, *words: str) -> None:
        pid = os.fork()
        if pid == 0:
            before_call(self.target, self.name, self.count, late=self.late)
            os._exit(main(list(words)))
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


KILLS = [Forked(learner_module, "accept", late=True), Forked(Evaluator, "test_untrained")]
KILLS += [Forked(Trainer, "step", 3), Forked(Evaluator, "test_task")]
MORE_KILLS = [Forked(packing, "write_images"), Forked(learner_module, "accept"), Forked(Snapshots, "save_results", 3)]


@pytest.mark.parametrize("kill", [*KILLS, *(pytest.param(kill, marks=pytest.mark.slow) for kill in MORE_KILLS)])
def test_killed_anywhere_the_same_command_goes_on(root: Path, run: Path, kill: Forked) -> None:
    pictures = root / "pictures"
    kill("learn", "--trust-code", str(run), str(pictures / "day2"))
    learn(run, pictures / "day2")
    assert [found.name for found in arrivals(run)] == ["0001-day1", "0002-day2"]
    learn(run, "day3")
    check_same(run, whole(root))
    assert not (run / "tasks" / ".incoming").exists()


@functools.cache
def whole(root: Path) -> Path:
    """`train` with the settings of WORDS."""
    settings = {"freezing__policy": "correlation", "checkpoint__every_epochs": 1}
    return trained(root / "whole", config("digits/simsiam/ptlf", **settings))


def test_a_signal_stops_it_and_any_way_to_go_on_is_right(root: Path, run: Path, tmp_path: Path, monkeypatch) -> None:
    day2, day3 = (root / "pictures" / day for day in ("day2", "day3"))
    told = learn(run, day2, code=143, watcher=StopsAt(4)).err
    assert f"continue with `ptlf learn {run} --trust-code`" in told
    learn(run, code=143, watcher=StopsAt(1))
    with monkeypatch.context() as patch:
        patch.setattr("ptlf.commands.train.Live", lambda name: StopsAt(1))
        resume(run, code=143)
    shutil.copytree(run, tmp_path / "other")
    learn(run)
    assert "nothing to finish" in learn(run).out
    learn(run, day3)
    learn(tmp_path / "other", day3)  # in this folder day 2 is finished first
    for folder in (run, tmp_path / "other"):
        check_same(folder, whole(root))


BEFORE_TRAINING = "testing the encoder before training, features"


def test_a_signal_before_the_next_task_begins_leaves_the_run_as_it_was(root: Path, run: Path) -> None:
    before = files_in(run)
    told = learn(run, "day2", code=143, watcher=StopsIn(BEFORE_TRAINING)).err.splitlines()[-1]
    again = f"`ptlf learn --trust-code {run} day2` continues from here"
    assert told.endswith(f"; day2 is not learnt, and will be packed again; {again}")
    assert files_in(run) == before
    for day in ("day2", "day3"):
        learn(run, day)
    check_same(run, whole(root))


def test_ctrl_c_before_the_run_begins_says_that_the_same_command_is_needed(root: Path, tmp_path, monkeypatch) -> None:
    """Its settings and images are not in the folder yet, so that `ptlf learn RUN` alone could not go on."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(learner_module, "accept", interrupted)
    told = learn(tmp_path / "run", root / "pictures" / "day1", *WORDS, code=130).err.splitlines()[-1]
    assert told == "ptlf: stopped; nothing more is saved; give the same command again"
    assert not (tmp_path / "run" / "config.yaml").exists()


class LeavesAt(StopsAt):
    """Asks to stop at the n-th step, and leaves at once."""

    def step(self, views: int) -> None:
        super().step(views)
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_left_at_once_in_a_second_task_it_goes_on_after_the_first(root: Path, run: Path) -> None:
    told = learn(run, root / "pictures" / "day2", code=130, watcher=LeavesAt(1)).err
    lost = "what was done since the last checkpoint, after-task01.ckpt, is repeated"
    assert f"stopped without saving: {lost}; continue with `ptlf learn {run} --trust-code`" in told
    assert "continuing with task 2, epoch 1, step 1" in resume(run).out
    assert len(results_of(run)["tasks"]) == 2


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def one_day(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    learn(folder, root / "pictures" / "day1", *WORDS)
    return folder


@pytest.fixture
def run(one_day: Path, tmp_path: Path) -> Path:
    """A run that has learnt day 1."""
    return shutil.copytree(one_day, tmp_path / "run")


def broken(folder: Path) -> Path:
    paint(folder, 8, seed=7)
    (folder / "05.png").write_bytes(b"no picture")
    return folder


def other_size(folder: Path) -> Path:
    paint(folder / "pictures" / "x", 8, seed=7)
    pack_folder(folder / "pictures", folder, "large", size=16, progress=False)
    return folder / "large"


def npz(folder: Path, **arrays: Any) -> Path:
    folder.mkdir()
    np.savez(folder / "images.npz", **arrays)
    return folder / "images.npz"


BAD = [
    (lambda folder: paint(folder / "below", 0).parent, [], "holds no images"),
    (lambda folder: folder, [], "there is no folder or file"),
    (broken, [], "05.png cannot be used: not an image in a known format; repair or remove it, or"),
    (other_size, [], "large has images of 16 px, not 8"),
    (lambda folder: npz(folder, images=np.full((4, 8, 8, 3), 9.0)), [], "floating-point pixels lie in 9..9"),
    (lambda folder: paint(folder, 1, seed=7), [], "task 2 has 1 image; a batch needs at least 2"),
    (broken, ["--training.epochs", "5"], "epochs and batch were chosen with its first task and hold for all"),
    (broken, ["--size", "16"], "leave out --size"),
    (broken, ["--evaluation.tasks", "some"], "evaluation.tasks must be all, last:N or sample:N"),
    (broken, ["--probes.knn_class.k", "7"], "leave out probes.knn_class.k"),
    (broken, ["--once"], "--once is for --watch"),
    (broken, ["--watch", "somewhere"], "leave out SOURCE"),
    (broken, ["day5"], "takes one folder of images per call, and 'day5' is a second one; call it once for each, or"),
]


@pytest.mark.parametrize(("make", "words", "told"), BAD)
def test_what_cannot_be_learnt_leaves_the_run_as_it_was(run: Path, tmp_path, make, words, told) -> None:
    before, source = files_in(run), make(tmp_path / "source")
    error = learn(run, source, *words, code=2).err
    assert told in error and error.count("ptlf:") == 1
    assert files_in(run) == before
    assert {path.name for path in (run / "tasks").iterdir()} == {"0001-day1"}


def test_another_run_does_not_begin_in_its_folder(run: Path) -> None:
    before = files_in(run)
    told = run_cli("train", "--recipe", "digits/simsiam/ptlf", "--out", run, "--device", "cpu", code=2).err
    assert told == f"ptlf: {run} already holds a run; choose another --out, or remove that folder\n"
    assert files_in(run) == before


def test_another_version_a_lock_and_a_lost_checkpoint(run: Path, root: Path) -> None:
    newest = run / "checkpoints" / "after-task01.ckpt"

    def refused() -> str:
        before = files_in(run)
        told = learn(run, root / "pictures" / "day2", code=2).err
        assert files_in(run) == before
        return told

    with lock_of_run(run):
        told = refused()
    assert f"is in use by process {os.getpid()}" in told and "; wait for it, or choose another folder" in told
    newest.write_bytes(newest.read_bytes().replace(b"ptlf checkpoint 1 ", b"ptlf checkpoint 9 ", 1))
    assert "after-task01.ckpt is a checkpoint of another version of ptlf" in refused()
    shutil.rmtree(run / "checkpoints")
    assert "holds no checkpoint of its last task" in refused()
    (run / "results.json").write_text(json.dumps({**results_of(run), "schema": 99}))
    assert "has schema 99" in refused()
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "magic: 1\n")
    assert "unknown key 'magic'" in refused()


def test_a_run_that_cannot_begin_leaves_no_folder(root: Path, tmp_path) -> None:
    for words, told in {
        "--objective supervised": "objective 'supervised' needs the classes of the whole stream",
        "--method multitask --freezing.policy none": "method 'multitask' trains on all tasks at once",
        "--checkpoint.enabled false": "without a checkpoint a run cannot continue",
        "--stream.tasks 2": "leave out --stream.tasks",
        "--stream.labelled nothing": "no folder or file nothing, and no packed set of that name",
    }.items():
        assert told in learn(tmp_path / "run", root / "pictures" / "day1", *WORDS, *words.split(), code=2).err
        assert not (tmp_path / "run").exists(), words


@pytest.mark.parametrize("place", ["day1", "."])
def test_no_run_begins_among_other_files(root: Path, tmp_path: Path, monkeypatch, place: str) -> None:
    monkeypatch.chdir(shutil.copytree(root / "pictures", tmp_path / "photos"))
    before, named = files_in(Path()), {"day1": "'test'", ".": "'day1'"}[place]
    for words in (["day2"], ["--watch", "..", "--settle", "0", "--once"]):
        told = learn(place, *words, *WORDS, code=2).err
        assert told == f"ptlf: {place} holds files and no run, such as {named}; give a new folder\n"
    with pytest.raises(UserError, match="holds files and no run"):
        ptlf.Learner.new(config(), place).learn("day2", watcher=QUIET)
    with pytest.raises(UserError, match="holds files and no run"):
        Run(config("digits/simsiam/lump", **DIGITS), place).train(resume=True)  # as a sweep does
    assert files_in(Path()) == before


def test_what_is_hidden_logs_and_what_a_killed_run_left_is_no_hindrance(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(root / "day2", run / "tasks" / "0001-day2")
    (run / "tasks" / ".incoming").mkdir()
    for name in (".DS_Store", "slurm-17.out", "train.log", "start.safetensors"):
        (run / name).write_text("")
    assert ptlf.Learner.new(config(), run).learn("day1", watcher=QUIET)["tasks"] == ["day1"]
    (tmp_path / "other" / "tasks" / "photographs").mkdir(parents=True)
    with pytest.raises(UserError, match="other holds files and no run, such as 'tasks'"):
        ptlf.Learner.new(config(), tmp_path / "other").learn("day1", watcher=QUIET)


@pytest.mark.parametrize("given", ["module", "weights"])
def test_an_error_before_the_first_step_leaves_no_run(root: Path, tmp_path: Path, monkeypatch, given: str) -> None:
    """As a disk that is full when the settings are written, and the start is not."""
    torch.manual_seed(0)
    module = tiny_encoder()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    more = {"encoder.weights": str(tmp_path / "weights.pt")} if given == "weights" else {}
    encoder = module if given == "module" else "conftest:tiny_encoder"
    learner = ptlf.Learner(encoder, out=tmp_path / "run", size=SIZE, **FAST, **more)

    def full(*words: object) -> None:
        raise UserError("no space left")

    place = (snapshots, "save_encoder") if given == "weights" else (loop, "keep_lines")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no space left"):
        patch.setattr(*place, full)
        learner.learn("day1", watcher=QUIET)
    assert not (tmp_path / "run").exists()
    assert learner.learn("day1", watcher=QUIET)["tasks"] == ["day1"]
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no space left"):
        patch.setattr(loop, "keep_lines", full)
        learner.learn("day2", watcher=QUIET)
    assert learner.learn("day2", watcher=QUIET)["tasks"] == ["day1", "day2"]  # the run that was there still is


def test_a_stop_while_a_task_is_finished_first_names_the_next_and_holds_for_it(root: Path, run: Path) -> None:
    day2, day3 = (root / "pictures" / day for day in ("day2", "day3"))
    learn(run, day2, code=143, watcher=StopsAt(4))
    waits = f"day3 is not learnt, and will be packed again; `ptlf learn --trust-code {run} {day3}` continues from here"
    for watcher in (StopsAt(1), StopsInItsLastMoments()):  # while day 2 is finished, and when it is
        assert learn(run, day3, code=143, watcher=watcher).err.splitlines()[-1] == f"ptlf: stopped; {waits}"
    assert results_of(run)["status"] == "finished"
    assert [found.name for found in arrivals(run)] == ["0001-day1", "0002-day2"]
    with pytest.raises(Stopped, match="day3 is not learnt, and will be packed again; give it again"):
        ptlf.Learner.load(run, trust_code=True).learn("day3", watcher=StopsIn(BEFORE_TRAINING))
    learn(run, day3)
    check_same(run, whole(root))


def test_a_full_disk_while_packing(run: Path, root: Path, monkeypatch) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "full", "here")

    before = files_in(run)
    monkeypatch.setattr(packing, "write_images", full)
    assert "no space left on here" in learn(run, root / "pictures" / "day2", code=2).err
    assert files_in(run) == before


@pytest.mark.parametrize(("gone", "name"), [(1, "day1"), (2, "day2")])
def test_a_task_whose_folder_is_gone_is_named(run: Path, root: Path, gone: int, name: str) -> None:
    learn(run, "day2")
    lost = run / "tasks" / f"{gone:04}-{name}"
    shutil.move(lost, run.parent / "kept")
    before, missing = files_in(run), f"task {gone} of those that arrived is missing"
    for words in (["day3"], []):
        assert learn(run, *words, code=2).err == f"ptlf: {missing}: there is no {lost}; put it back\n"
    assert (missing if gone == 1 else "had 2 tasks and now has 1; put them back") in resume(run, code=2).err
    assert files_in(run) == before
    shutil.move(run.parent / "kept", lost)
    learn(run, "day3")
    check_same(run, whole(root))


def test_other_settings_say_how_to_begin_anew_and_that_works(run: Path, tmp_path) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("epochs: 2", "epochs: 1"))
    assert "put them back, or begin anew in another folder" in learn(run, "day2", code=2).err
    learn(tmp_path / "other", "day2", "--config", file)
    results = results_of(tmp_path / "other")
    assert results["tasks"] == ["day2"] and results["config"]["training"]["epochs"] == 1


def test_a_stopped_run_of_a_module_says_how_to_go_on_and_that_works(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = tiny_encoder()
    learner = ptlf.Learner(module, out=tmp_path / "run", size=SIZE, **FAST)
    with pytest.raises(Stopped) as stopped:
        learner.learn("day1", watcher=StopsAt(1))
    command = f"ptlf.Learner.load('{tmp_path / 'run'}', encoder=MODULE).learn()"
    assert str(stopped.value) == f"stopped; continue with `{command}`"
    assert eval(command, {"ptlf": ptlf, "MODULE": module})["status"] == "finished"


def test_seconds_that_are_none(tmp_path: Path) -> None:
    for bad in (-1, float("nan"), float("inf")):
        for word in ("settle", "every"):
            told = f"{word} must be a number of seconds from 0 to 1e+09, not {bad}"
            assert learn(tmp_path / "run", "--watch", tmp_path, f"--{word}", bad, code=2).err == f"ptlf: {told}\n"


def test_the_same_images_twice(run: Path, root: Path) -> None:
    before, words = files_in(run), [root / "pictures/day1", "--name", "again"]
    assert "again holds the very images of task day1" in learn(run, *words, code=2).err
    assert files_in(run) == before
    learn(run, *words, "--again")
    assert results_of(run)["tasks"] == ["day1", "again"]


def test_a_folder_that_has_grown(root: Path, tmp_path: Path) -> None:
    """It is learnt again with a note, or only what is new; of names that repeat, the later ones are numbered."""
    day, run = shutil.copytree(root / "plain" / "day1", tmp_path / "day"), tmp_path / "run"
    learn(run, day, *WORDS, "--new-only")
    for number in range(3):
        shutil.copy(root / "plain" / "day2" / "c" / f"0{number}.png", day / "a" / f"new{number}.png")
    assert "note: 20 of the 23 images of day were learnt before, left out\n" in learn(run, day, "--new-only").err
    new = [np.asarray(Image.open(day / "a" / f"new{number}.png")) for number in range(3)]
    assert np.array_equal(arrivals(run)[1].images("train"), new)
    before = files_in(run)
    assert "note: nothing new in day: all 23 images were learnt before\n" in learn(run, day, "--new-only").err
    tasks = "task day, number 1 of those that arrived; task day-2, number 2 of those that arrived"
    for words, told in (
        ([day], f"23 of the 23 images of day were learnt before: {tasks}; give --again"),
        ([day, "--again", "--new-only"], "give one of them"),
        (["--watch", tmp_path, "--new-only"], "leave out --new-only"),
    ):
        assert told in learn(run, *words, code=2).err
    assert files_in(run) == before
    shutil.copy(root / "plain" / "day2" / "c" / "05.png", day / "a" / "new5.png")
    assert f"note: 23 of the 24 images of day were learnt before: {tasks}; they are" in learn(run, day).err
    assert results_of(run)["tasks"] == ["day", "day-2", "day-3"]
    assert [found.split("train").count for found in arrivals(run)] == [20, 3, 24]


def test_of_a_labelled_folder_that_has_grown_only_the_new_classes_are_tested(run: Path, root: Path, tmp_path) -> None:
    day = shutil.copytree(root / "pictures" / "day1", tmp_path / "day")
    first = ptlf.Learner.load(run, trust_code=True)
    first.learn(day, again=True, watcher=QUIET)
    for number in range(3):
        shutil.copy(root / "plain" / "day2" / "c" / f"0{number}.png", day / "train" / "b" / f"new{number}.png")
    first.learn(day, new_only=True, watcher=QUIET)
    new = arrivals(run)[2]
    assert {split: new.labels(split).tolist() for split in new.splits} == {"train": [1] * 3, "test": [1] * TEST}


def test_classes_are_known_by_name_and_broken_images_may_be_skipped(run: Path, tmp_path) -> None:
    for split, count in (("train", 6), ("test", 3)):
        for name in ("b", "z"):
            paint(tmp_path / "more" / split / name, count, seed=ord(name))
    (tmp_path / "more" / "train" / "z" / "broken.png").write_bytes(b"")
    learn(run, tmp_path / "more", "--on-error", "skip")
    assert results_of(run)["class_order"] == ["a", "b", "z"]
    stream = Run(ptlf.Learner.load(run, trust_code=True).config, run).stream
    assert [task.classes for task in stream.tasks] == [(0, 1), (1, 2)]
    assert set(stream.tasks[1].images.labels) == {1, 2}
    assert [len(task.train) for task in stream.tasks] == [2 * TRAIN, 12]


def test_a_folder_is_watched(root: Path, tmp_path: Path) -> None:
    run, inbox = tmp_path / "run", tmp_path / "inbox"
    once = ["--watch", inbox, "--once", "--settle", "0"]
    inbox.mkdir()
    assert learn(run, *once, *WORDS).out == f"nothing new in {inbox}: it has no subfolders to learn\n"
    assert not run.exists()
    for age, day in ((1000, "day2"), (5000, "day1")):
        shutil.copytree(root / "pictures" / day, inbox / day)
        for path in (inbox / day).rglob("*.png"):
            os.utime(path, (1e9 - age, 1e9 - age))
    learn(run, *once, *WORDS, "--settle", "1e9")
    assert not run.exists()  # too young
    told = learn(run, *once, *WORDS, code=143, watcher=StopsAt(4)).err
    assert f"`ptlf learn {run} --watch {inbox}` continues from here" in told
    assert "Summary" in learn(run, *once).out
    (inbox / "empty").mkdir()
    assert learn(run, *once).out == f"nothing new in {inbox}: its subfolders were learnt or hold no images\n"
    shutil.copytree(root / "pictures" / "day1", inbox / "copy")
    shutil.copytree(root / "pictures" / "day3", inbox / "day3")
    broken(inbox / "broken")
    told = learn(run, *once, code=2).err
    assert "nothing new in copy: all 20 images were learnt before" in told
    assert "broken is left out: " in told and f"1 left out: broken; repair, or move out of {inbox}\n" in told
    assert [found.name for found in arrivals(run)] == ["0001-day1", "0002-day2", "0003-day3"]
    check_same(run, whole(root))
    before = files_in(run)
    shutil.rmtree(inbox)
    assert f"the folder to watch, {inbox}, is not there" in learn(run, *once, code=2).err
    assert files_in(run) == before


def other_images(day: Path) -> None:
    """Under the same names, of the same dates."""
    for file in day.iterdir():
        dates = file.stat()
        Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
        os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))


def emptied_and_filled(day: Path) -> None:
    shutil.rmtree(day)
    paint(day, 7, seed=80)


def names_swapped(day: Path) -> None:
    for number, file in enumerate(sorted(day.iterdir(), reverse=True)):
        file.rename(day / f"x{number}.png")


def some_new(day: Path) -> None:
    paint(day / "more", 2, seed=81)


DAY_NAMES = ["monday", "\u200emonday", os.fsdecode(b"mond\xe4y"), "a\x1b[31mb", "new\nline  '", "-x"]
CHANGES = [(other_images, [8, 8]), (emptied_and_filled, [8, 7]), (names_swapped, [8]), (some_new, [8, 2])]


@pytest.mark.parametrize(("change", "counts"), CHANGES)
@pytest.mark.parametrize("name", DAY_NAMES)
def test_a_watched_day_is_known_by_its_images(tmp_path: Path, monkeypatch, name: str, change, counts) -> None:
    run, inbox = tmp_path / "run", tmp_path / "inbox"
    paint(inbox / name, 8)
    once = ["--watch", inbox, "--once", "--settle", "0"]
    learn(run, *once, *WORDS)
    change(inbox / name)
    learn(run, *once)
    assert [task.split("train").count for task in arrivals(run)] == counts
    monkeypatch.setattr(learner_module, "pack_incoming", None)  # it is not looked at again
    assert learn(run, *once).out == f"nothing new in {inbox}: its subfolders were learnt or hold no images\n"


PATHS = [*DAY_NAMES, "two  spaces", "q'uo\"te", "$(touch x)", "`x`", "~", "a\u00a0b", "ü", "[red]"]


@pytest.mark.parametrize("name", PATHS)
def test_a_printed_command_works_as_it_is_typed(tmp_path: Path, name: str) -> None:
    typed = " ".join(printable(f"ptlf learn {quoted(Path(name))}").split())
    made = subprocess.run(["bash", "-c", f"printf '%s\\0' {typed}"], capture_output=True, cwd=tmp_path).stdout
    assert [Path(os.fsdecode(word)) for word in made.split(b"\0")[2:-1]] == [Path(name)]
    assert not list(tmp_path.iterdir())


def test_a_date_in_the_future_is_no_reason_to_wait(tmp_path: Path) -> None:
    file, now = paint(tmp_path / "monday", 1) / "00.png", time.time()
    os.utime(file, (now + 1e6, now + 1e6))
    for later, there in ((5, 0), (100, 1), (-1e5, 1)):  # the last: the machine's clock was wrong
        assert len(settled(tmp_path, 30, now + later)) == there


def test_images_are_known_by_any_name_in_any_order_and_counted(run: Path, root: Path, tmp_path: Path) -> None:
    files = sorted((root / "plain" / "day1").rglob("*.png"))
    for number, file in enumerate(reversed(files)):
        (tmp_path / "again").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "again" / f"{number}.png")
    told = "{0} of the {1} images of again were learnt before: task day1, number 1 of those that arrived; "
    assert told.format(20, 20) + "give --again" in learn(run, tmp_path / "again", code=2).err
    paint(tmp_path / "again" / "x", 1, seed=90)
    for image in run.glob("tasks/*/*.npy"):  # known nevertheless
        image.unlink()
    assert told.format(20, 21) + "they are learnt again" in learn(run, tmp_path / "again").err


def test_old_images_may_be_deleted(root: Path, tmp_path: Path) -> None:
    """The run goes on, with the bits that it would have without tests of old tasks, and says what is not tested."""
    run = learnt(tmp_path / "run", config(evaluation__gallery=True), ["day1", "day2"])
    shutil.copytree(run, tmp_path / "whole")
    for name in ("train", "test_labels"):
        (run / "tasks" / "0001-day1" / f"{name}.npy").unlink()
    gone = "the images of ['day1'] were deleted: these tasks stay learnt, and are tested no more"
    assert gone in learn(run, "day3").err
    learn(tmp_path / "whole", "day3")
    assert same(*(load_file(folder / "encoder.safetensors") for folder in (run, tmp_path / "whole")))
    assert row_marks(results_of(run)["probes"]["knn_task"]) == ["x..", "xx.", ".xx"]
    assert gone in run_cli("evaluate", "--trust-code", run).err
    assert "(1 run)" in run_cli("report", run).out


def test_two_calls_from_two_folders_and_two_threads(tmp_path: Path, monkeypatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    learner = ptlf.Learner.new(config(), "run")
    learner.learn(noise(16, 0), "monday", watcher=QUIET)
    monkeypatch.chdir(tmp_path / "two")
    assert learner.learn(noise(16, 1), "tuesday", watcher=QUIET)["tasks"] == ["monday", "tuesday"]
    assert not list((tmp_path / "two").iterdir())

    class Another(Watcher):
        def step(self, views: int) -> None:
            other = ptlf.Learner.new(config(), tmp_path / "other")
            with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="another thread trains"):
                pool.submit(other.learn, noise(16, 2), "monday", watcher=QUIET).result()

    learner.learn(noise(16, 3), "wednesday", watcher=Another())


def test_without_a_whole_checkpoint_nothing_begins_anew(run: Path, root: Path) -> None:
    learn(run, "day2")
    for file in (run / "checkpoints").iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    before = {name: data for name, data in files_in(run).items() if "checkpoints" not in name}
    for told in ("is whole; put one back", "holds no checkpoint of its last task"):
        assert told in learn(run, "day3", code=2).err
        assert {name: data for name, data in files_in(run).items() if "checkpoints" not in name} == before


def test_a_folder_is_as_old_as_its_oldest_image(tmp_path: Path) -> None:
    for seed, day in enumerate(("monday", "thursday", "tuesday")):
        paint(tmp_path / day, 2, seed)
        (tmp_path / day / "notes.txt").write_text("sun")
    dates = {"monday/00.png": 100, "tuesday/00.png": 200, "tuesday/01.png": 300, "thursday/00.png": 400}
    dates |= {"monday/01.png": 900, "thursday/01.png": 500, "thursday/notes.txt": 1}  # one came into monday later
    for name, date in dates.items():
        os.utime(tmp_path / name, (date, date))
    (tmp_path / "empty").mkdir()
    assert [path.name for path, _ in settled(tmp_path, 0, 1000)] == ["monday", "tuesday", "thursday"]


def test_a_watched_folder_that_vanishes(root: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(root / "pictures" / "day1", tmp_path / "inbox" / "day1")
    settings = config(encoder__name="conftest:tiny_encoder")
    watching = ptlf.Learner.new(settings, tmp_path / "run", SIZE).watch(tmp_path / "inbox", settle=0, watcher=QUIET)
    assert next(watching)["tasks"] == ["day1"]
    monkeypatch.setattr("time.sleep", lambda seconds: shutil.rmtree(tmp_path / "inbox"))
    with pytest.raises(UserError, match="is not there"):
        next(watching)


def test_from_python_with_a_module_of_ones_own(root: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = tiny_encoder()
    start = [parameter.clone() for parameter in module.parameters()]
    settings: dict[str, Any] = {**FAST, "training": {"epochs": 1, "batch": 8}, "probes.knn_class.k": 5}
    out, pictures = tmp_path / "run", root / "pictures"
    learner = ptlf.Learner(module, "simsiam", "ptlf", out, size=SIZE, **settings)
    assert learner.tasks == []
    assert repr(learner) == f"Learner('{out}', arriving/simsiam/ptlf)"
    learner.learn(pictures / "day1", watcher=QUIET)
    assert all(torch.equal(one, other) for one, other in zip(start, module.parameters(), strict=True))
    with pytest.raises(UserError, match="given as a module; load it with encoder=MODULE"):
        ptlf.Learner.load(out)
    with pytest.raises(UserError, match="already holds a run"):
        ptlf.Learner(module, out=out)
    again = ptlf.Learner.load(out, encoder=tiny_encoder())  # other weights: those of the run count
    results = again.learn(pictures / "day2", name="second day", watcher=QUIET)
    assert results["tasks"] == again.tasks == ["day1", "second-day"]
    rest = ptlf.Learner.load(out, encoder=module)
    row = {name: found["matrix"][0] for name, found in rest.evaluate().items()}
    assert row == {name: found["matrix"][-1] for name, found in results["probes"].items()}
    images = np.random.default_rng(0).integers(0, 256, (5, SIZE, SIZE, 3), dtype=np.uint8)
    view = learner.run.components.view_specs[0]
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (view.mean, view.std))
    with torch.no_grad():
        expected = rest.encoder((torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std).numpy()
    assert rest.embed(images) == pytest.approx(expected, abs=1e-5)
    assert rest.embed(pictures / "day1" / "train").shape == (2 * TRAIN, 16)
    assert again.embed(images) == pytest.approx(expected, abs=1e-5)
    assert "srcdoc" in rest._repr_html_()
    other = ptlf.Learner(module, "simsiam", "ptlf", tmp_path / "other", **settings)
    for name in ("day1", "day2"):
        other.learn(root / name, watcher=QUIET)
    assert (out / "encoder.safetensors").read_bytes() == (tmp_path / "other/encoder.safetensors").read_bytes()


def test_arrays_and_npz_are_tasks(run: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (9, 12, 10, 3), dtype=np.uint8)
    learner = ptlf.Learner.load(run, trust_code=True, evaluation={"tasks": "last:1"})
    learner.learn(images, name="array", watcher=QUIET)
    labels, tests = np.arange(9) % 2, random.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    arrays = {"images": images[:, :8, :8][::-1], "labels": labels, "test_images": tests, "test_labels": labels[:4]}
    results = learner.learn(npz(tmp_path / "source", **arrays, names=["b", "new"]), watcher=QUIET)
    assert results["tasks"] == ["day1", "array", "images"]
    assert results["eval_splits"] == ["day1", "images"]
    assert row_marks(results["probes"]["knn_class"]) == ["x.", "x.", ".x"]
    stream = Run(learner.config, run).stream
    assert stream.tasks[1].images.pixels.shape == (9, SIZE, SIZE, 3)
    assert np.array_equal(stream.tasks[2].images.pixels, arrays["images"])
    assert stream.tasks[2].images.labels.tolist() == [1 + label for label in labels]
    assert "tasks: last:1" in (run / "config.yaml").read_text()


def test_which_tasks_are_tested() -> None:
    tasks = list(range(10))
    for words, expected in {"all": tasks, "last:3": [7, 8, 9], "last:30": tasks}.items():
        assert EvaluationConfig(tasks=words).limited(tasks) == expected
    sample = EvaluationConfig(tasks="sample:4").limited(tasks)
    assert len(set(sample)) == 4 and sample[-1] == 9
    assert sample == sorted(sample) == EvaluationConfig(tasks="sample:4").limited(tasks)
    for wrong in ("last:0", "last", "some", "last:x"):
        with pytest.raises(UserError, match=r"evaluation\.tasks must be"):
            EvaluationConfig(tasks=wrong)


def test_lists_and_pairs_are_learnt_and_embedded(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (24, SIZE + 3, SIZE + 1, 3), dtype=np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    learner = ptlf.Learner(tiny_encoder(), out=tmp_path / "run", size=SIZE, **FAST, **{"probes.knn_class.k": 3})
    learner.learn(images, name="list", watcher=QUIET)
    earlier = learner.embed(images)
    pairs = [(image, "ab"[number % 2]) for number, image in enumerate(images[::-1])]
    results = learner.learn(pairs, name="pairs", test_fraction=0.25, again=True, watcher=QUIET)
    assert results["tasks"] == ["list", "pairs"] and results["eval_splits"] == ["pairs"]
    features = learner.embed(images)
    assert np.array_equal(features, learner.embed(list(pixels))) and features.shape == (24, 16)
    assert not np.allclose(features, earlier)
    module = ptlf.load_encoder(tmp_path / "run", encoder=tiny_encoder(), device="cpu")
    assert np.allclose(module.embed(pixels), features, atol=1e-6)
    np.savez(tmp_path / "later.npz", images=pixels, labels=np.arange(24) % 2)
    found = learner.evaluate(["knn_class"], labelled=tmp_path / "later.npz")
    assert 0 <= found["knn_class"]["accuracy"] <= 100


@pytest.mark.parametrize("own", [False, True], ids=["by name", "a module"])
def test_a_run_that_began_with_a_file_goes_on_without_it(tmp_path: Path, own: bool) -> None:
    """Nor does it need the images that filled its memory."""
    pixels = np.random.default_rng(2).integers(0, 256, (40, SIZE, SIZE, 3), dtype=np.uint8)
    np.save(tmp_path / "known.npy", pixels[:16])
    torch.save(tiny_encoder().state_dict(), tmp_path / "w.pt")
    settings = {**FAST, "encoder.weights": str(tmp_path / "w.pt"), "memory.images": str(tmp_path / "known.npy")}

    def new(out: Path) -> ptlf.Learner:
        encoder = tiny_encoder() if own else "conftest:tiny_encoder"
        return ptlf.Learner(encoder, "simsiam", "ptlf", out, **settings)

    whole = new(tmp_path / "whole")
    for start in (16, 28):
        whole.learn(pixels[start : start + 12], name=f"t{start}", watcher=QUIET)
    first = new(tmp_path / "first")
    first.learn(pixels[16:28], name="t16", watcher=QUIET)
    (tmp_path / "w.pt").unlink()
    (tmp_path / "known.npy").unlink()
    again = ptlf.Learner.load(tmp_path / "first", encoder=tiny_encoder() if own else None, trust_code=True)
    results = again.learn(pixels[28:], name="t28", watcher=QUIET)
    assert results["encoder_weights"]["matched"] > 0 and results["memory_images"]["images"] == 16
    assert [entry["task"] for entry in results["freezing"]] == [1, 2]
    assert same(*(load_file(tmp_path / name / "encoder.safetensors") for name in ("first", "whole")))


def test_an_argument_of_learn_given_to_the_run_is_told_its_place(tmp_path: Path) -> None:
    for name in ("name", "again", "new_only", "watcher", "test_fraction", "on_error", "workers", "fit"):
        with pytest.raises(UserError, match=rf"^{name} is no setting .*: learn\(images, {name}=\.\.\.\)"):
            ptlf.Learner(out=tmp_path / "run", **{name: "skip"})


def test_a_stream_that_waits_for_tasks_is_not_for_train(tmp_path: Path) -> None:
    told = run_cli("train", "--recipe", "arriving/simsiam/ptlf", "--out", tmp_path / "run", code=2).err
    assert "stream 'arriving' has no task yet; `ptlf learn RUN IMAGES` brings the first" in told


def test_runs_that_learnt_other_images_are_not_compared(root: Path, tmp_path: Path) -> None:
    for folder, seed, day in (("a", 0, "day1"), ("b", 1, "day1"), ("c", 0, "day2")):
        learnt(tmp_path / folder, config(seed=seed), [day])
    (both,) = read_comparison([tmp_path / "a", tmp_path / "b"]).groups
    assert len(both.runs) == 2
    with pytest.raises(UserError, match=r"number 1 of those that arrived: day2 and day1"):
        read_comparison([tmp_path / "a", tmp_path / "c"])
