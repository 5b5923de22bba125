"""What a run's notes come to: the `probes` and `cost` of its results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ptlf import evaluation

Row = list[float | None]


def probes_of(
    settings: Mapping[str, Any], matrices: Mapping[str, list[Row]], untrained: Mapping[str, Row], future: Row
) -> dict[str, Any]:
    """By probe. `untrained` has a row of each before training; `future` the accuracies on tasks yet to come."""
    found = {}
    for probe in settings:
        before = untrained.get(probe, [])
        values: dict[str, Any] = {"settings": settings[probe], "untrained": before}
        values["untrained_accuracy"] = evaluation.accuracy([before]) if before else None
        values |= evaluation.summary(matrices.get(probe, []))
        if probe == "knn_task" and future:
            values["forward_transfer"] = evaluation.forward_transfer(future, before[1 : 1 + len(future)])
        found[probe] = values
    return found


def cost_of(epochs: Sequence[dict[str, Any]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """From the lines of all epochs and the seconds by purpose."""
    peaks = [line["peak_memory_bytes"] for line in epochs if line["peak_memory_bytes"] is not None]
    return {
        # The price of learning: the steps, and what freezing adds to them.
        "learning_seconds": sum(seconds.get(name, 0.0) for name in ("training", "correlation", "rebuild")),
        "train_seconds": seconds.get("training", 0.0),
        "correlation_seconds": seconds.get("correlation", 0.0),
        "rebuild_seconds": seconds.get("rebuild", 0.0),
        "eval_seconds": seconds.get("evaluation", 0.0),
        "checkpoint_seconds": seconds.get("checkpoint", 0.0),
        "backward_flops": sum(line["backward_flops"] for line in epochs),
        "saved_activation_bytes": epochs[-1]["saved_activation_bytes"] if epochs else None,
        "peak_memory_bytes": max(peaks) if peaks else None,
        "last_peak_memory_bytes": epochs[-1]["peak_memory_bytes"] if epochs else None,
        "per_task": [cost_of_task(task, epochs) for task in sorted({line["task"] for line in epochs})],
        "per_epoch": epochs,
    }


def cost_of_task(task: int, epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the task's epochs; bytes as in its last one."""
    mine = [line for line in epochs if line["task"] == task]
    return {
        "task": task,
        "train_seconds": sum(line["seconds"] for line in mine),
        "correlation_seconds": sum(line["correlation_seconds"] for line in mine),
        "rebuild_seconds": sum(line["rebuild_seconds"] for line in mine),
        "backward_flops": sum(line["backward_flops"] for line in mine),
        "saved_activation_bytes": mine[-1]["saved_activation_bytes"],
        "peak_memory_bytes": mine[-1]["peak_memory_bytes"],
    }
