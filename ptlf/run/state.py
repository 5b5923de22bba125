"""What changes while a run goes, as one dictionary of plain values and tensors: a checkpoint, and `results.json`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ptlf
from ptlf.core import processes
from ptlf.core.randomness import global_state, set_global_state
from ptlf.core.reading import NUMBER
from ptlf.core.settings import as_dict
from ptlf.integrations.trackers import Trackers
from ptlf.run.config import Config, resume_command
from ptlf.run.environment import environment, source_commit
from ptlf.run.parts import Parts
from ptlf.run.recipes import name_of
from ptlf.run.record import Record
from ptlf.run.results import ACCURACY, COUNT, EPOCH, FEATURES, FROZEN, SCHEMA, Json
from ptlf.run.watcher import Watcher
from ptlf.stream.task import digest
from ptlf.training.checkpoint import (
    Checkpoints,
    Position,
    group_state,
    load_group_state,
    load_optimizer_state,
    optimizer_state,
)
from ptlf.training.cost import Stopwatch
from ptlf.training.process import StopSignals
from ptlf.training.trainer import EpochState, MeasuredStep

NAMED: Json = {"*": dict}
# Of a checkpoint, as far as it is used before or beside loading: its tensors are checked where they are loaded.
STATE: Json = {
    "position": dict.fromkeys(("task", "epoch", "step"), COUNT),
    "optimizer": NAMED,
    "optimizer_groups?": [dict],
    "freezing": {
        "active": bool,
        "frozen?": [str],
        "log": [FROZEN],
        "savings": NAMED,
        "ratios?": {"*": NUMBER},
        "stays?": [str],
    },
    "clock": {"*": NUMBER},
    "looks": {"*": {"neighbours": [[COUNT]], "points": [[NUMBER]]}},
    "record": {
        "per_epoch": [EPOCH],
        "matrices": {"*": [[ACCURACY]]},
        "untrained": {"*": [ACCURACY]},
        "future": {"*": [ACCURACY]},
        "untrained_future?": {"*": [ACCURACY]},
        "used?": {"*": [{"*": (str, *NUMBER)}]},
        "newly_frozen": [str],
        "spent_before": {"*": NUMBER},
        "warned": bool,
        "features?": [FEATURES],
        "untrained_features?": [FEATURES],
        "memory_images?": dict,
        "reference?": {"*": [NUMBER]},
    },
    "ended?": bool,
    "looks_sha256?": str,
    "settings?": dict,
    "threads?": COUNT,
}
# What goes with `settings`, to compare.
COMPARED: Json = {"tasks": COUNT, "images": [{"name": str, "count": int, "sha256": str}]}


class State(Parts):
    """The parts of a run, and how far it has come."""

    def __init__(self, config: Config, out: Path | str | None = None, **given: Any) -> None:
        """given: an `encoder` or a `stream` in place of those the configuration names."""
        super().__init__(config, out, **given)
        self.task, self.epoch = 0, 0  # finished tasks, finished epochs of the next one
        self.epoch_state: EpochState | None = None  # of the epoch that runs
        self.ended = False  # the task that runs: it is learnt, and to be tested
        self.clock = Stopwatch(self.device)
        self.record = Record()
        self.prepared = False  # `train` has found the folder as it should be
        self.compiles = False  # the next step, since its operations changed
        self.variant = ""  # key of the step's operations as units are frozen now
        self.step_costs: dict[str, MeasuredStep] = {}  # by variant
        self.begun: list[list[dict[str, Any]]] = []  # by task, see `images_begun`
        self.encoder_sha256: str | None = None  # of the file, once it is written
        self.commit, self.status = source_commit(), "running"
        self.resumable = self.folder is not None and config.checkpoint.enabled
        self.checkpoints: Checkpoints | None = None
        if self.out and self.resumable:
            self.checkpoints = Checkpoints(self.out, config.checkpoint, self.go_on(self.out))
        self.signals = StopSignals(self.resumable, tell=processes.is_first())
        self.watcher = Watcher()
        self.trackers = Trackers(config.log if self.out else ())

    def go_on(self, folder: Path) -> str:
        """What to type to go on with this run."""
        arrived = self.stream.arrived > 0
        return resume_command(folder, self.config, module=self.encoder_given, arrived=arrived)

    @property
    def position(self) -> Position:
        return Position(self.task, self.epoch, self.epoch_state.steps if self.epoch_state else 0)

    def state_dict(self) -> dict[str, Any]:
        """All that has changed since the constructor, for a checkpoint."""
        return {
            "position": vars(self.position),
            "ended": self.ended,
            "tasks": len(self.stream.tasks),
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": optimizer_state(self.trainer.optimizer, self.parameter_names()),
            "optimizer_groups": group_state(self.trainer.optimizer),
            "freezing": self.freezing.state_dict(),
            "random": self.random.state_dict(),
            "torch_random": global_state(self.device),
            "epoch_state": vars(self.epoch_state) if self.epoch_state else None,
            "clock": self.clock.state_dict(),
            "looks": self.gallery.looks if self.gallery else {},
            "looks_sha256": self.gallery.sha256 if self.gallery else None,
            "record": vars(self.record),
            "settings": as_dict(self.config),
            "threads": torch.get_num_threads(),
            "images": self.images_begun(self.task),
        }

    def images_begun(self, task: int) -> list[dict[str, Any]]:
        """What identifies the images of the tasks up to this one (from 0), and of the splits tested by then."""
        stream = self.stream
        for number in range(len(self.begun), min(task + 1, len(stream.tasks))):
            new, splits = stream.tasks[number], [split for split in stream.eval_splits if split.since == number]
            parts = [(f"task {number + 1}, {new.name}", new.images, new.train)]
            parts += [(f"the test images of {split.name}", split.test_images, split.test) for split in splits]
            made = [{"name": name, "count": len(rows), "sha256": digest(images, rows)} for name, images, rows in parts]
            self.begun.append(made)
        return [entry for made in self.begun[: task + 1] for entry in made]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into a run as the constructor made it, with the same settings, and maybe more tasks. Looks at the gallery
        that are there stay."""
        self.task, self.epoch = state["position"]["task"], state["position"]["epoch"]
        self.ended = state.get("ended", False)
        if self.task > len(self.stream.tasks) or self.epoch > self.config.training.epochs:
            raise ValueError(f"its position, {self.position}, is beyond the run's end")
        missing, unknown = self.model.load_state_dict(state["model"], strict=False)
        if unknown or (missing and not self.method.grows):
            raise RuntimeError(f"it lacks {missing[:3]} and has {unknown[:3]}")
        self.method.load_state_dict(state["method"])
        load_optimizer_state(self.trainer.optimizer, state["optimizer"], self.parameter_names())
        load_group_state(self.trainer.optimizer, state.get("optimizer_groups", []))
        self.freezing.load_state_dict(state["freezing"])
        self.random.load_state_dict(state["random"])
        set_global_state(state["torch_random"], self.device)
        if state["epoch_state"] is not None:
            self.epoch_state = EpochState(**state["epoch_state"])
            self.epoch_state.losses = {k: values.to(self.device) for k, values in self.epoch_state.losses.items()}
        self.clock.load_state_dict(state["clock"])
        if self.gallery and not self.gallery.looks:
            self.gallery.looks = state["looks"]
        self.record = Record(**state["record"])
        self.record.widen(len(self.stream.eval_splits))
        self.variant = self.trainer.rebuild()

    def parameter_names(self) -> dict[Tensor, str]:
        parts = {"model": self.model, "method": self.method}
        return {parameter: name for part in parts for name, parameter in parts[part].named_parameters(part)}

    def results(self) -> dict[str, Any]:
        """What `results.json` holds."""
        arrived = self.stream.arrived
        return {
            "schema": SCHEMA,
            "ptlf_version": ptlf.__version__,
            "commit": self.commit,
            "name": name_of(as_dict(self.config)),
            "baseline": type(self.method).baseline and not self.freezing.policy.freezes,
            "uses_labels": self.model.objective.needs_labels,
            "status": self.status,
            "config": as_dict(self.config),
            "environment": environment(self.device) | self.trainer.arithmetic() | {"processes": processes.world_size()},
            "encoder_weights": self.weights.as_dict() if self.weights else None,
            "seed": self.config.seed,
            "class_order": list(self.stream.class_order),
            "tasks": [task.name for task in self.stream.tasks],
            "arrived": arrived,
            "arrived_sha256": [task.images.sha256 for task in self.stream.tasks[-arrived:]] if arrived else [],
            "eval_splits": [split.name for split in self.stream.eval_splits],
            "test_images": [len(split.test) for split in self.stream.eval_splits],
            "own_encoder": self.own_encoder,
            "encoder_sha256": self.encoder_sha256,
            "units": [unit.name for unit in self.freezing.freezer.units],
            "probes": self.record.probes(self.prober.settings() if self.prober else {}),
            "reference": self.reference_results(),
            "memory_images": self.record.memory_images,
            "features": self.record.features,
            "untrained_features": self.record.untrained_features,
            "freezing": self.freezing.log,
            "cost": self.record.cost(self.clock.seconds),
        }

    def reference_results(self) -> dict[str, Any] | None:
        if self.reference is None:
            return None
        stream = self.reference.stream
        images = {"bank": len(stream.eval_splits[0].bank), "test": len(stream.eval_splits[0].test)}
        probes = self.record.reference_probes(self.reference.settings())
        return {
            "path": self.config.evaluation.reference,
            "classes": list(stream.data.names),
            **images,
            "probes": probes,
        }
