"""How far a run has come, and what it writes down: the `probes` and `cost` of its results.json."""

import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import ptlf
from ptlf import evaluation
from ptlf.core.reading import recordable
from ptlf.evaluation import Prober
from ptlf.run.results import to_columns
from ptlf.training.checkpoint import Position
from ptlf.training.trainer import EpochState, MeasuredStep

Row = list[float | None]
LEARNING = ("training", "correlation", "rebuild")  # the steps, and what freezing adds to them
PURPOSES = (*LEARNING, "evaluation", "checkpoint", "measuring")  # of seconds; the last is of a step's bytes and FLOPs
NAMES = {"training": "train", "evaluation": "eval"}  # in the record, of those that have another there


@dataclass
class Progress:
    task: int = 0  # finished tasks
    epoch: int = 0  # finished epochs of the next task
    epoch_state: EpochState | None = None  # of the epoch under way
    task_learnt: bool = False  # the task under way, which is not tested yet
    before: dict[str, Any] | None = None  # checksum of the encoder when the task began, and features by it
    status: str = "new"  # then running, and finished, stopped or failed

    @property
    def position(self) -> Position:
        return Position(self.task, self.epoch, self.epoch_state.steps if self.epoch_state else 0)


@dataclass
class Record:
    """Plain values: a checkpoint holds them as they are."""

    per_epoch: list[dict[str, Any]] = field(default_factory=list)
    matrices: dict[str, list[Row]] = field(default_factory=dict)  # a row after every task, by probe
    untrained: dict[str, Row] = field(default_factory=dict)
    future: dict[str, Row] = field(default_factory=dict)  # accuracies on tasks yet to come, by probe
    untrained_future: dict[str, Row] = field(default_factory=dict)  # those of the untrained encoder, on all of them
    used: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # settings of each row of `matrices`
    newly_frozen: list[str] = field(default_factory=list)  # in the epoch that runs
    spent_before: dict[str, float] = field(default_factory=dict)  # seconds by purpose, when it began
    warned: bool = False  # of a collapse, or of the loss of what the encoder knew
    features: list[dict[str, Any]] = field(default_factory=list)  # spread and effective rank after each task
    untrained_features: list[dict[str, Any]] = field(default_factory=list)  # before training, where nothing is labelled
    memory_images: dict[str, Any] | None = None  # what the memory was filled with before the first task
    reference: dict[str, list[float]] = field(default_factory=dict)  # before the first task and after each, by probe

    def begin_epoch(self, spent: Mapping[str, float]) -> None:
        self.spent_before, self.newly_frozen = dict(spent), []

    def end_epoch(
        self, at: Position, state: EpochState, losses: Mapping[str, float], spent: Mapping[str, float],
        cost: MeasuredStep, frozen: int, sent: int,
    ) -> dict[str, Any]:  # fmt: skip
        """The epoch's line. `sent` are the bytes that a step exchanges with other processes."""
        took = {purpose: spent.get(purpose, 0.0) - self.spent_before.get(purpose, 0.0) for purpose in LEARNING}
        line = {
            "task": at.task + 1,
            "epoch": at.epoch + 1,
            "loss": {name: value if recordable(value) else str(value) for name, value in losses.items()},
            "seconds": took["training"],
            "correlation_seconds": took["correlation"],
            "rebuild_seconds": took["rebuild"],
            "views_per_second": state.views / took["training"],
            "frozen": frozen,
            "newly_frozen": self.newly_frozen,
            "steps": state.steps,
            "all_reduced_bytes": sent,
            "backward_flops": round(cost.backward_flops_per_view * state.views),
            **{key: value for key, value in vars(cost).items() if key != "backward_flops_per_view"},
        }
        self.per_epoch.append(line)
        return line

    def set_untrained(self, untrained: Mapping[str, Row], ahead: Mapping[str, Row]) -> None:
        """Accuracies of the untrained encoder on all splits known; `ahead` are those on tasks yet to come."""
        self.untrained = dict(untrained)
        self.add_to(self.untrained_future, ahead)

    def widen(self, splits: int) -> None:
        """Fill up the rows for splits that were not known when they were recorded."""
        for rows in self.matrices.values():
            for row in rows:
                row += [None] * (splits - len(row))

    @staticmethod
    def add_to(known: dict[str, Row], more: Mapping[str, Row]) -> None:
        for probe, row in more.items():
            known.setdefault(probe, []).extend(row)

    def end_task(
        self, task: int, rows: Mapping[str, Row], future: Mapping[str, Row], used: Mapping[str, dict[str, Any]]
    ) -> None:
        """As `Evaluator.test_task` gives them. The tasks before the first with test images have empty rows."""
        for probe, row in rows.items():
            matrix, settings = self.matrices.setdefault(probe, []), self.used.setdefault(probe, [])
            matrix[:0] = [[None] * len(row) for _ in range(task - len(matrix))]
            settings[:0] = [{} for _ in range(task - len(settings))]
            matrix.append(row)
            settings.append(used.get(probe, {}))
        self.add_to(self.future, future)

    def probes(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for probe in settings:
            before, used, future = self.untrained.get(probe, []), self.used.get(probe, []), self.future.get(probe)
            accuracy = evaluation.accuracy([before]) if before else None
            found[probe] = {"settings": settings[probe], "untrained": before, "untrained_accuracy": accuracy}
            found[probe] |= evaluation.summary(self.matrices.get(probe, []))
            if any(used):
                found[probe]["used_by_task"] = used
            if future:
                base = self.untrained_future.get(probe) or before[1:]
                found[probe]["forward_transfer"] = evaluation.forward_transfer(future, base[: len(future)])
        return found

    def add_reference(self, rows: Mapping[str, Row]) -> None:
        for probe, row in rows.items():
            self.reference.setdefault(probe, []).extend(value for value in row if value is not None)

    def reference_results(self, prober: Prober) -> dict[str, Any]:
        """Accuracies on what the encoder knew: before the first task, and after each."""
        settings, split, probes = prober.settings(), prober.stream.eval_splits[0], {}
        for probe, (before, *after) in self.reference.items():
            last = {"accuracy": after[-1], "lost": before - after[-1]} if after else {"accuracy": None, "lost": None}
            probes[probe] = {"settings": settings.get(probe, {}), "before": before, "after": after, **last}
        about = {"path": prober.config.reference, "classes": list(prober.stream.data.names)}
        return {**about, "bank": len(split.bank), "test": len(split.test), "probes": probes}

    def cost(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """With the seconds by purpose. A column that a line of an older version lacks counts without it."""
        epochs, last = self.per_epoch, self.per_epoch[-1] if self.per_epoch else {}
        flops, kept, peaks = (present(epochs, key) for key in ("backward_flops", "kept_bytes", "peak_memory_bytes"))
        return {
            "learning_seconds": sum(seconds.get(purpose, 0.0) for purpose in LEARNING),
            **{f"{NAMES.get(purpose, purpose)}_seconds": seconds.get(purpose, 0.0) for purpose in PURPOSES},
            "backward_flops": sum(flops),
            "kept_bytes": last.get("kept_bytes"),
            "mean_kept_bytes": statistics.fmean(kept) if kept else None,
            "peak_memory_bytes": max(peaks, default=None),
            "last_peak_memory_bytes": last.get("peak_memory_bytes"),
            "per_task": [cost_of_task(list(mine)) for _, mine in groupby(epochs, lambda line: line["task"])],
            "per_epoch": to_columns([{k: v for k, v in line.items() if k != "newly_frozen"} for line in epochs]),
        }


def present(lines: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """The values of those lines that have one."""
    return [value for line in lines if (value := line.get(key)) is not None]


def cost_of_task(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the task's epochs; bytes as in its last one."""
    sums = ("seconds", "correlation_seconds", "rebuild_seconds", "backward_flops")
    seconds, *others = (sum(present(epochs, key)) for key in sums)
    last = {key: epochs[-1].get(key) for key in ("kept_bytes", "peak_memory_bytes")}
    return {"task": epochs[-1]["task"], "train_seconds": seconds, **dict(zip(sums[1:], others, strict=True)), **last}


def environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def source_commit() -> str | None:
    """Commit of the source tree, with `-dirty` if files have changed; None if the package is not a checkout."""
    tree = Path(ptlf.__file__).resolve().parent.parent
    if not (tree / ".git").exists():
        return None
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
