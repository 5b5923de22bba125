"""What a run writes down, by hand; the files of a record, what is refused, and where a record came from."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from ptlf.core.errors import UserError
from ptlf.report.measures import COSTS
from ptlf.report.runs import LATER_KEPT, LATER_PEAK
from ptlf.run import record
from ptlf.run.record import Record
from ptlf.run.results import EPOCH, RESULTS, compiling_seconds, epoch_lines, read_results, to_columns, to_json
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochState, MeasuredStep


def test_a_changed_tree_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptlf").mkdir()
    module = tmp_path / "ptlf" / "__init__.py"
    module.write_text("")
    monkeypatch.setattr(record.ptlf, "__file__", str(module))
    assert record.source_commit() is None
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    clean = record.source_commit()
    assert clean is not None
    assert len(clean) == 40
    module.write_text("changed = True")
    assert record.source_commit() == f"{clean}-dirty"


def test_a_record_becomes_text_and_columns_and_comes_back() -> None:
    value = {"a": [1, None, "x, [y]"], "b": [[1.5, True], []], "c": {"d": {}, 3: {"e": "ü"}}, "f": []}
    text = to_json(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    first, second = '{\n "a": [1, null, "x, [y]"],\n "b": [\n  [1.5, true],\n  []\n ],\n', ' "c": {\n  "d": {},\n'
    assert text == f'{first}{second}  "3": {{\n   "e": "\\u00fc"\n  }}\n }},\n "f": []\n}}'
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json({"a": [float("nan")]})
    lines = [
        {"task": 1, "peak": None, "loss": {"ssl": 0.5}},
        {"task": 2, "peak": 7, "loss": {"ssl": "nan", "distill": 0.25}},
        {"task": 2, "peak": 8, "loss": {}},
    ]
    columns = to_columns(lines)
    losses = {"ssl": [0.5, "nan", None], "distill": [None, 0.25, None]}
    assert columns == {"task": [1, 2, 2], "peak": [None, 7, 8], "loss": losses}
    for some in (lines, [], [{"task": 1, "loss": {}}]):
        assert epoch_lines({"cost": {"per_epoch": to_columns(some)}}) == some
    with pytest.raises(ValueError, match="shorter"):
        epoch_lines({"cost": {"per_epoch": {"task": [1, 2], "epoch": [1]}}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 1}', "has schema 1, this version reads schema 2; use an older ptlf"),
        ('{"schema": 3}', "has schema 3, this version reads schema 2; use a newer ptlf"),
        ("[]", "is damaged: it names no schema"),
        ('{"schema": 2', "is damaged: Expecting"),
        ('{"schema": 2}', "is damaged: status is missing"),
        ("[" * 100_000, "is damaged: it is nested too deeply"),
    ],
)
def test_a_file_of_another_schema_is_refused_with_the_way_out(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_results(tmp_path)
    assert str(caught.value).startswith(f"{path} {reason.format(path)}")


@pytest.mark.parametrize(("tasks", "seconds", "wait"), [
    ([1, 1, 2], [9.0, 2.0, 1.0], 7.0),
    ([1, 1], [2.0, 2.5], 0.0),  # the first epoch is the faster one
    ([1, 2], [9.0, 2.0], 0.0),  # of another task, which may have fewer images
    ([1], [9.0], 0.0),
    ([], [], 0.0),
])  # fmt: skip
def test_the_wait_for_the_compiler(tasks: list[int], seconds: list[float], wait: float) -> None:
    lines = [{"task": task, "seconds": took} for task, took in zip(tasks, seconds, strict=True)]
    assert compiling_seconds({"cost": {"per_epoch": to_columns(lines)}}) == wait


def recorded(costs: list[tuple[int, float, int | None]]) -> Record:
    """Tasks of two epochs with these bytes kept, FLOPs per view and peaks; every epoch takes a second more."""
    record, spent = Record(), 0.0
    for number, cost in enumerate(costs):
        record.begin_epoch({"training": spent, "correlation": spent / 10})
        spent += number + 1
        at, seconds = Position(*divmod(number, 2)), {"training": spent, "correlation": spent / 10}
        state = EpochState(torch.zeros(0), steps=3, views=100)
        record.end_epoch(at, state, {"ssl": 0.5}, seconds, MeasuredStep(*cost), frozen=0, sent=0)
    return record


def test_cost_by_hand() -> None:
    record = recorded([(800, 5.0, 90), (700, 4.0, 70), (600, 3.0, 80), (100, 2.0, 60)])
    cost = record.cost({"training": 10.0, "correlation": 1.0, "rebuild": 0.5, "evaluation": 4.0})
    assert cost["learning_seconds"] == 11.5
    assert cost["backward_flops"] == 1400
    assert cost["kept_bytes"] == 100
    assert cost["mean_kept_bytes"] == 550
    assert cost["peak_memory_bytes"] == 90
    assert cost["last_peak_memory_bytes"] == 60
    first, second = cost["per_task"]
    assert (first["task"], second["task"]) == (1, 2)
    assert (first["train_seconds"], second["train_seconds"]) == (3.0, 7.0)
    assert second["correlation_seconds"] == pytest.approx(0.7)
    assert (first["backward_flops"], second["backward_flops"]) == (900, 500)
    assert (first["kept_bytes"], second["kept_bytes"]) == (700, 100)
    assert (first["peak_memory_bytes"], second["peak_memory_bytes"]) == (70, 60)
    columns = cost["per_epoch"]
    assert columns["kept_bytes"] == [800, 700, 600, 100]
    assert columns["seconds"] == [1.0, 2.0, 3.0, 4.0]
    assert columns["loss"] == {"ssl": [0.5] * 4}
    assert "newly_frozen" not in columns
    assert all("newly_frozen" in line for line in record.per_epoch)
    for key in ("kept_bytes", "peak_memory_bytes", "backward_flops"):  # the line of a version that lacks them
        del record.per_epoch[0][key]
    cost = record.cost({})
    assert (cost["mean_kept_bytes"], cost["peak_memory_bytes"], cost["backward_flops"]) == (1400 / 3, 80, 900)
    cost = Record().cost({})
    assert (cost["kept_bytes"], cost["mean_kept_bytes"]) == (None, None)
    assert (cost["learning_seconds"], cost["backward_flops"], cost["per_task"], cost["per_epoch"]) == (0, 0, [], {})


def test_rows_and_forward_transfer_by_hand() -> None:
    record = Record(untrained={"knn_task": [50.0, 60.0, 75.0], "knn_class": [20.0, 20.0, 20.0]})
    settings = {"knn_task": {}, "knn_class": {}}
    record.end_task(0, {"knn_task": [80.0, None, None], "knn_class": [70.0, None, None]}, {"knn_task": [64.0]}, {})
    assert record.probes(settings)["knn_task"]["forward_transfer"] == 4.0
    record.end_task(1, {"knn_task": [80.0, 90.0, None], "knn_class": [70.0, 60.0, None]}, {"knn_task": [85.0]}, {})
    found = record.probes(settings)
    assert found["knn_task"]["forward_transfer"] == 7.0
    assert "forward_transfer" not in found["knn_class"]
    record, row = Record(), {"k": 2}
    record.end_task(2, {"knn_task": [80.0]}, {}, {"knn_task": row})
    record.widen(2)
    record.end_task(3, {"knn_task": [70.0, 90.0]}, {}, {"knn_task": row})
    found = record.probes({"knn_task": {}})["knn_task"]
    assert found["matrix"] == [[None, None], [None, None], [80.0, None], [70.0, 90.0]]
    assert found["used_by_task"] == [{}, {}, row, row]
    assert found["accuracy_by_task"] == [None, None, 80.0, 80.0]
    assert found["forgetting"] == found["forgetting_by_task"][-1] == 10.0


def test_what_is_recorded_is_shown() -> None:
    cost = recorded([(800, 5.0, 90)]).cost({"training": 1.0})
    shown = {measure.path for measure in COSTS}
    known = {("cost", key) for key in cost}
    assert known - shown == {("cost", "per_task"), ("cost", "per_epoch")}, "show it by a line in COSTS"
    assert shown - known == {LATER_KEPT, LATER_PEAK}, "sum it in Record.cost"  # these two are computed from the epochs
    assert {*cost} <= {key.rstrip("?") for key in RESULTS["cost"]}, "declare it in SECONDS or BYTES of run/results.py"
    assert {*cost["per_epoch"]} <= {key.rstrip("?") for key in EPOCH}, "declare it in EPOCH of run/results.py"
    assert {measure.epoch for measure in COSTS} - {""} <= set(cost["per_epoch"])
