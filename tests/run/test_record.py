from __future__ import annotations

import pytest

from ptlf.run.record import Notes
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochResult, StepCost


def noted(costs: list[tuple[int, float, int | None]]) -> Notes:
    """Tasks of two epochs with these bytes kept, FLOPs per view and peaks; every epoch takes a second more."""
    notes, spent = Notes(), 0.0
    for number, cost in enumerate(costs):
        notes.begin_epoch({"training": spent, "correlation": spent / 10})
        spent += number + 1
        at, seconds = Position(*divmod(number, 2)), {"training": spent, "correlation": spent / 10}
        notes.end_epoch(at, EpochResult({"ssl": 0.5}, steps=3, views=100), seconds, StepCost(*cost), frozen=0, sent=0)
    return notes


def test_cost_by_hand() -> None:
    notes = noted([(800, 5.0, 90), (700, 4.0, 70), (600, 3.0, 80), (100, 2.0, 60)])
    cost = notes.cost({"training": 10.0, "correlation": 1.0, "rebuild": 0.5, "evaluation": 4.0})
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


def test_before_the_first_epoch_there_are_no_bytes() -> None:
    cost = Notes().cost({})
    assert (cost["kept_bytes"], cost["mean_kept_bytes"]) == (None, None)
    assert (cost["learning_seconds"], cost["backward_flops"], cost["per_task"]) == (0, 0, [])


def test_forward_transfer_is_against_the_untrained_encoder_on_the_same_exams() -> None:
    notes = Notes(untrained={"knn_task": [50.0, 60.0, 75.0], "knn_class": [20.0, 20.0, 20.0]})
    settings = {"knn_task": {}, "knn_class": {}}
    notes.end_task({"knn_task": [80.0, None, None], "knn_class": [70.0, None, None]}, {"knn_task": [64.0]})
    assert notes.probes(settings)["knn_task"]["forward_transfer"] == 4.0
    notes.end_task({"knn_task": [80.0, 90.0, None], "knn_class": [70.0, 60.0, None]}, {"knn_task": [85.0]})
    found = notes.probes(settings)
    assert found["knn_task"]["forward_transfer"] == 7.0
    assert "forward_transfer" not in found["knn_class"]
