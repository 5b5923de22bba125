"""Every run that is kept can be read and drawn; what a record may lack, and what is wrong in it."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ptlf.core.errors import UserError
from ptlf.report.page import page, write_report
from ptlf.report.runs import read_comparison, read_run

pytestmark = pytest.mark.usefixtures("no_pictures")

RESULTS = Path(__file__).parents[2] / "results"


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
