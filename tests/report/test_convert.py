"""The converter of older records, against a record written by hand; and every run that is kept can be read."""

import functools
import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from ptlf.core.errors import UserError
from ptlf.report.page import page, write_report
from ptlf.report.runs import read_comparison, read_run

pytestmark = pytest.mark.usefixtures("no_pictures")

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", RESULTS / "convert.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def old_config(policy: str = "cost_aware", recipe: str = "s/o/ptlf-cost", method: str = "lump") -> dict[str, Any]:
    return {
        "recipe": recipe,
        "seed": 3,
        "stream": {"name": "s"},
        "objective": {"name": "o"},
        "method": {"name": method},
        "freezing": {"policy": policy, "final": 0.4, "savings": "seconds", "batches": 8},
        "training": {"optimizer": "lars", "lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4, "batch": 64},
        "evaluation": {
            "enabled": True, "gallery": False, "knn_task": {"k": None}, "knn_class": {"k": 20},
            "linear": {"enabled": False, "epochs": 100}, "ridge": {"enabled": True, "penalty": 0.001},
        },
        "checkpoint": {"keep": 2},
    }  # fmt: skip


def old_results() -> dict[str, Any]:
    def line(epoch: int, kept: int, losses: dict[str, float], frozen: list[str]) -> dict[str, Any]:
        more = {"newly_frozen": frozen, "saved_activation_bytes": kept, "peak_memory_bytes": 10 * kept}
        return {"task": 1, "epoch": epoch, "loss": losses, **more}

    return {
        "schema": 1,
        "ptlf_version": "0.1.0",
        "commit": None,
        "status": "finished",
        "config": old_config(),
        "exams": ["a", "b"],
        "probes": {"knn_task": {"settings": {"bank": "training images of the exam's own task"}}},
        "cost": {
            "saved_activation_bytes": 20,
            "per_task": [{"task": 1, "saved_activation_bytes": 20}],
            "per_epoch": [line(1, 40, {"ssl": 1.0}, []), line(2, 20, {"ssl": 0.5, "distill": 2.0}, ["x"])],
        },
    }


def test_a_record_by_hand(converter: ModuleType) -> None:
    new = converter.convert(old_results())
    config = new.pop("config")
    assert new == {
        "schema": 2,
        "ptlf_version": "0.1.0",
        "commit": None,
        "name": "s/o/ptlf-cost",
        "baseline": False,
        "status": "finished",
        "eval_splits": ["a", "b"],
        "probes": {"knn_task": {"settings": {"bank": "training images of the split's own task"}}},
        "cost": {
            "kept_bytes": 20,
            "mean_kept_bytes": 30,
            "last_peak_memory_bytes": 200,
            "per_task": [{"task": 1, "kept_bytes": 20}],
            "per_epoch": {
                "task": [1, 1],
                "epoch": [1, 2],
                "loss": {"ssl": [1.0, 0.5], "distill": [None, 2.0]},
                "kept_bytes": [40, 20],
                "peak_memory_bytes": [400, 200],
            },
        },
    }
    assert config["freezing"]["policy"] == {"name": "cost_aware", "sharpness": 8.0, "savings": "seconds"}


NAMES = [  # policy, recipe, method, name, whether it is the baseline
    ("none", "s/o/lump", "lump", "s/o/lump", True),
    ("none", "", "lump", "s/o/lump", True),
    ("none", "s/o/ptlf", "lump", "s/o/ptlf, no freezing", True),
    ("correlation", "s/o/ptlf", "lump", "s/o/ptlf", False),
    ("cost_aware", "s/o/ptlf", "lump", "s/o/ptlf + cost_aware freezing", False),
    ("correlation", "s/o/ptlf", "si", "s/o/si + correlation freezing", False),
    ("none", "t/o/si", "si", "s/o/si", False),
]


def test_names(converter: ModuleType) -> None:
    for policy, recipe, method, name, baseline in NAMES:
        new = converter.convert(old_results() | {"config": old_config(policy, recipe, method)})
        assert (new["name"], new["baseline"]) == (name, baseline)


def test_files(converter: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, plain = tmp_path / "one.json.gz", tmp_path / "two" / "results.json"
    packed.write_bytes(gzip.compress(json.dumps(old_results()).encode()))
    assert converter.main([str(packed), "--out", str(plain), "--commit", "55501cf"]) == 0
    assert json.loads(plain.read_text())["commit"] == "55501cf"
    assert converter.main([str(packed)]) == 0
    assert json.loads((tmp_path / "one.json").read_text())["commit"] is None
    assert converter.main([str(plain)]) == 2
    assert f"{plain} has schema 2; only schema 1 can be converted" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("[]")
    assert converter.main([str(tmp_path / "other.json")]) == 2
    assert "is not the results.json of a run" in capsys.readouterr().err


def test_every_run_that_is_kept_can_be_reported() -> None:
    folders = [path.parent for path in RESULTS.rglob("results.json")]
    assert len(folders) >= 24
    for folder in folders:
        run = read_run(folder)
        assert run.results["status"] == "finished"
        assert run.results["commit"]
        assert len(run.epochs) == len(run.results["tasks"]) * run.config["training"]["epochs"]


@pytest.mark.slow
def test_the_page_of_every_group_of_kept_runs_is_drawn(pictures: None) -> None:
    """Records of mixed ages stand beside each other; the oldest hold no features and no number of test images."""
    groups: dict[tuple[str, ...], list[Path]] = {}
    for path in sorted(RESULTS.rglob("results.json")):
        config = json.loads(path.read_text())["config"]
        key = str(path.parent.parent), config["stream"]["name"], config["objective"]["name"]
        groups.setdefault(key, []).append(path.parent)
    assert len(groups) >= 12
    for key, folders in groups.items():
        text = page(read_comparison(folders))
        assert text.count("<details>") == len(folders), key


def test_our_own_bugs_are_not_blamed_on_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError, LookupError, TypeError, AttributeError):
        monkeypatch.setattr("ptlf.report.page.sections", Mock(side_effect=error("ours")))
        with pytest.raises(error, match="ours"):
            write_report([RESULTS / "digits" / "lump"], tmp_path / "page.html")


def changed(folder: Path, place: str, value: Any) -> Path:
    """A folder with the record of a kept run in which the value at this place is another one."""
    results = json.loads((RESULTS / "digits" / "ptlf" / "results.json").read_text())
    *sections, last = place.split(".")
    functools.reduce(dict.__getitem__, sections, results)[last] = value
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_what_a_page_reads_of_a_record_is_checked_where_it_is_read(tmp_path: Path) -> None:
    for place, value in {
        "config.stream": {},
        "config.encoder.name": None,
        "cost.peak_memory_bytes": "x",
        "features": [{"task": 1, "effective_rank": 1.0, "spread": 1.0, "images": "x"}],
        "probes.knn_task.used_by_task": [{"k": "x"}],
    }.items():
        with pytest.raises(UserError, match=f"results.json is damaged: {place}"):
            read_run(changed(tmp_path / "run", place, value))


def test_what_a_record_may_lack_is_not_drawn(tmp_path: Path, pictures: None) -> None:
    entry = {"task": 2, "ratios": {}, "order": [], "events": [], "ratios_by_epoch": None}
    for place, value in {"freezing": [entry, entry | {"task": 3}], "features": None}.items():
        assert "<details>" in page(read_comparison([changed(tmp_path / "run", place, value)])), place
