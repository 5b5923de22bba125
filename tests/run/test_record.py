import pytest
import torch

from ptlf.report.measures import COSTS
from ptlf.report.runs import LATER_KEPT, LATER_PEAK
from ptlf.run.record import Record
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochState, MeasuredStep


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
    assert known - shown == {("cost", "per_task"), ("cost", "per_epoch")}
    assert shown - known == {LATER_KEPT, LATER_PEAK}  # computed from the epochs
    assert {measure.epoch for measure in COSTS} - {""} <= set(cost["per_epoch"])
