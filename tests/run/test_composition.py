"""The objects that a run is composed of, each made and used without a run."""

from __future__ import annotations

import pytest
import torch

from ptlf.run.components import Components
from ptlf.run.evaluator import Evaluator
from ptlf.run.record import Progress, Record
from ptlf.run.snapshots import Snapshots
from ptlf.training.checkpoint import Position
from ptlf.training.cost import Stopwatch


class Left(Exception):
    pass


def test_an_evaluator_tests_components_and_may_be_left(tiny) -> None:
    parts, clock = Components(tiny(evaluation__batch=64)), Stopwatch()
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    evaluator, calls = Evaluator(parts, clock), iter(range(3))
    rows, future = evaluator.test_untrained()
    assert {name: len(row) for name, row in rows.items()} == {"knn_task": 2, "knn_class": 2}
    assert future["knn_task"] == [evaluator.test_next(1)["knn_task"][0]] and "knn_class" not in future
    assert evaluator.test_task(0).rows["knn_class"][1] is None
    (features,) = evaluator.measure_features(1)
    assert features["task"] == 2 and evaluator.measure_untrained() == []
    assert set(clock.seconds) == {"evaluation"}
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())

    def stop() -> None:
        if next(calls) == 2:
            raise Left

    with pytest.raises(Left):
        Evaluator(parts, clock, stop_if_requested=stop).test_untrained()


def test_snapshots_bring_a_state_into_other_components(tiny) -> None:
    config = tiny("digits/simsiam/lump")
    first, second = (Components(config) for _ in range(2))
    with torch.no_grad():
        next(first.model.parameters()).add_(1)
    first.random["order"].manual_seed(7)
    clock, record = Stopwatch(), Record(warned=True)
    clock.add({"training": 2.0})
    state = Snapshots(first, Progress(task=1, ended=True), record, clock).state_dict()
    progress, other_record, other_clock = Progress(), Record(), Stopwatch()
    snapshots = Snapshots(second, progress, other_record, other_clock)
    assert not snapshots.due() and snapshots.read() is None and snapshots.last is None  # it has no folder
    snapshots.load_state_dict(state)
    assert progress.position == Position(1) and progress.ended and other_record == record
    assert other_clock.seconds == {"training": 2.0}
    assert torch.equal(first.random["order"].get_state(), second.random["order"].get_state())
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    results = snapshots.results()
    assert results["status"] == "running" and results["cost"]["train_seconds"] == 2.0
