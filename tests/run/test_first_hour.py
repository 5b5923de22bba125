"""What stops a new user in the first hour, through the command line and from Python."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import paint, run_cli, tiny_encoder

import ptlf
from ptlf.core import processes

SMALL = "--training.epochs 1 --training.batch 4 --evaluation.gallery false --encoder.name test_first_hour:silent"


def silent() -> torch.nn.Module:
    encoder = tiny_encoder()
    del encoder.normalisation
    return encoder


def folders(root: Path) -> Path:
    """Two days of 12 px, and twelve labelled images in two folders."""
    for day in (1, 2):
        paint(root / "photos" / f"day{day}", 8, seed=day, size=12)
    for name in "ab":
        paint(root / "labelled" / name, 6, seed=ord(name))
    return root


def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders(tmp_path))
    words = [*SMALL.split(), "--stream.labelled", "labelled"]
    assert "did you mean 'training.epochs'?" in run_cli("learn", "run", "photos/day1", "--epochs", 3, code=2).err
    first = run_cli("learn", "run", "photos/day1", *words)
    said = " ".join(first.err.split())
    assert "the first image has 12 x 12 px, all become squares of 32 px; --size" in said
    assert "does not say how its inputs are normalised: by the views' mean [" in " ".join(first.out.split())
    verdict = "On 12 images of labelled: "
    assert verdict in first.out and "knn_class: accuracy in %, k = 5, 2 test images" in first.out
    assert "knn_task" not in first.out  # the same test under another name
    second = run_cli("learn", "run", "photos/day2", "--trust-code")
    assert verdict in second.out and "run, all 2 tasks" in " ".join(second.out.split())
    page = Path("run/report.html").read_text()
    assert "<h1>run</h1>" in page and f"</b>: {verdict}" in page and "time of all 2 tasks" in page
    assert [test["tasks"] for test in json.loads(Path("run/evaluations.json").read_text())] == [1, 2]
    run_cli("learn", "run", "--undo", "--trust-code")
    assert [test["tasks"] for test in json.loads(Path("run/evaluations.json").read_text())] == [1]

    learner = ptlf.Learner.load("run", trust_code=True)
    for found in (learner.evaluate("labelled"), learner.evaluate(Path("labelled")), learner.evaluate("knn_class")):
        assert found["knn_class"]["accuracy"] is not None
    run_cli("embed", "run/encoder.safetensors", "photos/day1", "--out", "features.npz", "--trust-code")
    shutil.copytree("run/tasks/0001-day1", "run/tasks/0002-day2")  # as a killed run leaves it
    told = run_cli("embed", "run", "photos/day1", "--out", "features.npz", "--trust-code").err
    assert "the last task of run has not ended: its encoder is the one from before that task" in " ".join(told.split())

    for number in (1, 3, 6):
        Path(f"photos/day1/0{number}.png").write_text("no image")
    told = " ".join(run_cli("learn", "new", "photos/day1", *words, code=2).err.split())
    assert "01.png cannot be used" in told and "03.png" in told and "06.png" in told


def test_a_sweep_and_train_test_on_a_labelled_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders(tmp_path))
    run_cli("data", "pack", "photos", "--name", "cam", "--size", 8, "--folders", "tasks", "--data-root", "data")
    words = [*SMALL.split(), "--stream.pack", "cam", "--data-root", "data", "--stream.labelled", "labelled"]
    out = run_cli("sweep", "folder/simsiam/lump", "folder/simsiam/finetune", "--out", "runs", *words).out
    assert out.count("On 12 images of labelled: ") == 2
    assert "has the highest accuracy (knn_class)" in out and "is not shown to be above" in out
    run_cli("train", "--recipe", "folder/simsiam/lump", "--out", "one", *words)
    for file in Path("runs").glob("*/results.json"):  # a copy under another seed is no second seed
        copy = Path("runs") / f"second {file.parent.name}"
        shutil.copytree(file.parent, copy)
        (copy / "results.json").write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    run_cli("report", "runs")
    page = Path("runs/report.html").read_text()
    assert page.count("seed 1, is a copy of seed 0: it has the same losses") == 2 and "2 seeds" not in page


@pytest.mark.parametrize(("idle", "asked", "expected"), [(10, "", [1]), (90, "", []), (10, "2", [])])
def test_a_busy_machine_gets_as_many_threads_as_cores_are_idle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, idle: int, asked: str, expected: list[int]
) -> None:
    """Of four cores; ticks as Linux counts them."""
    ticks, chosen = tmp_path / "stat", list[int]()
    ticks.write_text("cpu  100 0 0 100 0 0 0 0 0 0")
    later = f"cpu  {200 - idle} 0 0 {100 + idle} 0 0 0 0 0 0"
    monkeypatch.setattr(processes, "Path", lambda name: ticks)
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: ticks.write_text(later))
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", asked) if asked else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    processes.use_idle_cores()
    assert chosen == expected


def test_a_table_takes_names_that_are_not_utf8(finished_run: ptlf.Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    odd = paint(tmp_path / "odd", 1) / "a\udcff.png"
    (tmp_path / "odd" / "00.png").rename(odd)
    run_cli("embed", finished_run.folder, odd.parent, "--out", tmp_path / "f.parquet")
    assert parquet.read_table(tmp_path / "f.parquet").column("name").to_pylist() == ["a\\udcff.png"]
