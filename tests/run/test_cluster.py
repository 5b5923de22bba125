"""Sweeps whose runs are jobs: the same results, what is done is skipped, failures are named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from faults import lasting

from ptlf.cli import main

pytestmark = pytest.mark.slow

QUICK = [
    "--stream.groups", "[[0, 1], [2, 3]]", "--encoder.name", "conftest:tiny_encoder", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--evaluation.gallery", "false",
]  # fmt: skip
RECIPES = ["digits/simsiam/finetune", "digits/simsiam/lump"]


@pytest.fixture
def jobs_find_us(monkeypatch) -> None:
    """Jobs are processes of their own: they import from where this one does."""
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def results(folder: Path) -> dict:
    found = json.loads((folder / "results.json").read_text())
    found["environment"].pop("threads")
    return lasting(found)


def test_jobs_give_what_a_plain_sweep_gives(tmp_path, capsys, jobs_find_us) -> None:
    assert main(["sweep", *RECIPES, "--out", str(tmp_path / "plain"), *QUICK]) == 0
    words = ["sweep", *RECIPES, "--out", str(tmp_path / "jobs"), "--cluster", "local", "--jobs", "2", *QUICK]
    capsys.readouterr()
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    for recipe in RECIPES:
        name = f"{recipe.replace('/', '-')}-seed0"
        assert results(tmp_path / "plain" / name) == results(tmp_path / "jobs" / name)
        assert f"{recipe}: finished" in told
    assert (tmp_path / "jobs" / "report.html").exists()
    before = sorted((tmp_path / "jobs" / "jobs").iterdir())
    assert main(words) == 0
    assert capsys.readouterr().out.count("already finished") == 2
    assert sorted((tmp_path / "jobs" / "jobs").iterdir()) == before  # no new job


def test_a_job_that_fails_is_named(tmp_path, capsys, jobs_find_us) -> None:
    hopeless = ["--training.lr", "1e6", "--training.optimizer.weight_decay", "1000"]
    words = ["sweep", RECIPES[0], "--out", str(tmp_path), "--cluster", "local", *QUICK, *hopeless]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "digits/simsiam/finetune failed (" in told
    assert "became" in told
    assert "the same command continues with what is not finished" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "2"], "--jobs and --job-options are for --cluster"),
        (["--cluster", "local", "--job-options", "fast"], "--job-options takes KEY=VALUE"),
        (["--cluster", "local", "--job-options", "speed=9"], "--job-options: "),
    ],
)
def test_what_is_refused(tmp_path, capsys, jobs_find_us, words: list[str], message: str) -> None:
    assert main(["sweep", RECIPES[0], "--out", str(tmp_path), *words, *QUICK]) == 2
    assert message in capsys.readouterr().err


def test_without_submitit(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["sweep", RECIPES[0], "--out", str(tmp_path), "--cluster", "local", *QUICK]) == 2
    assert "--cluster needs submitit, which is not installed: pip install 'ptlf[cluster]'" in capsys.readouterr().err


def test_a_sweep_under_torchrun(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sweep", RECIPES[0], "--out", str(tmp_path), *QUICK]) == 2
    assert "start `ptlf train` with it, not `ptlf sweep`" in capsys.readouterr().err
