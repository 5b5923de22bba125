"""Sweeps whose runs are jobs: the same results, what is done is skipped, failures are named."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import QUICK, run_cli
from faults import lasting

pytestmark = pytest.mark.slow

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


def test_jobs_give_what_a_plain_sweep_gives(tmp_path, jobs_find_us) -> None:
    run_cli("sweep", *RECIPES, "--out", tmp_path / "plain", *QUICK)
    words = ["sweep", *RECIPES, "--out", tmp_path / "jobs", "--cluster", "local", "--jobs", "2", *QUICK]
    told = " ".join(run_cli(*words).out.split())
    for recipe in RECIPES:
        name = f"{recipe.replace('/', '-')}-seed0"
        assert results(tmp_path / "plain" / name) == results(tmp_path / "jobs" / name)
        assert f"{recipe}: finished" in told
    assert (tmp_path / "jobs" / "report.html").exists()
    before = sorted((tmp_path / "jobs" / "jobs").iterdir())
    assert run_cli(*words).out.count("already finished") == 2
    assert sorted((tmp_path / "jobs" / "jobs").iterdir()) == before  # no new job


def refused(folder: Path, *words: str) -> str:
    return run_cli("sweep", RECIPES[0], "--out", folder, *words, *QUICK, code=2).err


def test_a_job_that_fails_is_named(tmp_path, jobs_find_us) -> None:
    hopeless = ["--training.lr", "1e6", "--training.optimizer.weight_decay", "1000"]
    told = refused(tmp_path, "--cluster", "local", *hopeless)
    assert "digits/simsiam/finetune failed (" in told and "became" in told
    assert "the same command continues with what is not finished" in told


def test_what_is_refused(tmp_path, jobs_find_us, monkeypatch) -> None:
    for words, message in {
        "--jobs 2": "--jobs and --job-options are for --cluster",
        "--cluster local --job-options fast": "--job-options takes KEY=VALUE",
        "--cluster local --job-options speed=9": "--job-options: ",
    }.items():
        assert message in refused(tmp_path, *words.split())
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert "start `ptlf train` with it, not `ptlf sweep`" in refused(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "--cluster needs submitit, which cannot be" in refused(tmp_path, "--cluster", "local")
