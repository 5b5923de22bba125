"""A run from beginning to end: stream in; encoder, accuracy matrices, cost and record out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ptlf
from ptlf import evaluation
from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.randomness import Randomness, global_state, seeded, set_global_state
from ptlf.core.settings import as_dict
from ptlf.freezing.correlation import TaskCorrelation
from ptlf.freezing.policy import Ratios
from ptlf.run.build import (
    check_combination,
    choose_device,
    make_freezing,
    make_gallery,
    make_method,
    make_model,
    make_optimizer,
    make_prober,
    make_stream,
    on_gpu,
)
from ptlf.run.config import Config, to_yaml
from ptlf.run.environment import commit, environment
from ptlf.run.folder import RunFiles, claimed, load_encoder
from ptlf.run.recipes import name_of
from ptlf.run.record import Notes
from ptlf.run.results import SCHEMA
from ptlf.run.sanity import check_numbers, check_processes, warn_of_collapse
from ptlf.run.watcher import Watcher
from ptlf.stream import Stream
from ptlf.stream.loading import ImageSource
from ptlf.training.checkpoint import Checkpoints, Position, load_optimizer_state, optimizer_state
from ptlf.training.cost import Stopwatch
from ptlf.training.distributed import make_alike
from ptlf.training.engine import why_not_captured
from ptlf.training.process import Stopped, StopSignals
from ptlf.training.rate import check_warmup
from ptlf.training.trainer import EpochState, StepCost, Trainer, check_batch
from ptlf.views import named_views, normalise


class Run:
    """Everything is built and checked in the constructor; nothing is written before `train`.

    Where several processes share the run, every one of them makes the same `Run` and takes the same steps; the first
    one writes.
    """

    def __init__(
        self,
        config: Config,
        out: Path | str | None = None,
        *,
        encoder: nn.Module | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`encoder` and `stream` take the place of those the configuration names."""
        self.config, self.folder = config, Path(out) if out else None
        self.out = self.folder if processes.is_first() else None  # where this process writes
        self.files = RunFiles(self.out)
        self.device = processes.local_device(choose_device(config.device))
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # streams, graphs and our own kernels are the current device's
        self.random = Randomness(config.seed)
        self.stream = stream or make_stream(config)
        self.view_size = config.views.size or self.stream.size
        self.view_specs = named_views(config.views.name, self.view_size)
        check_combination(config, self.stream)
        check_warmup(config.training, config.training.epochs)
        check_batch(config.training, [len(task.train) for task in self.stream.tasks])
        source = ImageSource(self.stream.data.train, self.device, config.stream.resident)
        self.prober = make_prober(self.stream, config, self.prepare, source)
        self.gallery = make_gallery(self.stream, config, self.prepare, self.device) if self.out else None
        self.model = make_model(config, self.stream, self.view_size, self.device, encoder)
        self.channels_last = on_gpu(config.training.channels_last, self.device)
        if self.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.method = make_method(config, self.stream, self.model, self.view_size, self.random["method"]).to(
            self.device
        )
        make_alike([self.model, self.method], config.distributed, self.device)
        parameters = [*self.model.parameters(), *self.method.parameters()]
        self.trainer = Trainer(
            model=self.model,
            method=self.method,
            optimizer=make_optimizer(config.training, [p for p in parameters if p.requires_grad]),
            source=source,
            view_specs=self.view_specs,
            view_size=self.view_size,
            config=config.training,
            random=self.random,
            device=self.device,
            channels_last=self.channels_last,
        )
        self.freezing = make_freezing(config, self.trainer, self.random["policy"])
        self.clock = Stopwatch(self.device)
        self.notes = Notes()
        self.resumable = out is not None and config.checkpoint.enabled
        self.checkpoints = Checkpoints(self.out, config.checkpoint) if self.out and self.resumable else None
        self.position = Position()
        self.progress: EpochState | None = None  # of the epoch that runs
        self.variant = ""  # the name of what a step does now
        self.step_costs: dict[str, StepCost] = {}  # by such names, of the steps looked at so far
        self.commit = commit()
        self.status = "running"

    def train(self, watcher: Watcher | None = None, *, resume: bool = False) -> dict[str, Any]:
        """The whole stream, or with `resume` what the run in the folder has left. Returns what `results.json` holds."""
        watcher = watcher if watcher and processes.is_first() else Watcher()
        global_randomness = seeded(self.config.seed, "torch", self.device)  # for encoders with dropout and the like
        with (
            claimed(self.out, resume),
            global_randomness,
            StopSignals(self.resumable, tell=processes.is_first()) as self.stop,
        ):
            self.prepare_folder(resume)
            if why := why_not_captured(self.config.training.engine, self.device):
                processes.warn(f"ptlf: {why}: the step runs eagerly, not captured")
            watcher.begin(self)
            try:
                self.train_stream(watcher)
                self.files.encoder(self.model.encoder)
            except BaseException as error:
                self.give_up("stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed")
                raise
            finally:
                watcher.end()
            self.status = "finished"
            self.save_results()
        return self.results()

    def give_up(self, status: str) -> None:
        self.status = status
        with contextlib.suppress(Exception):  # the reason is on its way already
            self.save_results()

    def train_stream(self, watcher: Watcher) -> None:
        if self.position == Position():
            self.look_before()
        while self.position.task < len(self.stream.tasks):
            self.train_task(watcher)
        self.freezing.freezer.thaw()
        self.look("after")

    def train_task(self, watcher: Watcher) -> None:
        task = self.position.task
        if self.position.between_tasks:
            self.model.objective.begin_task(self.trainer.steps(self.stream.tasks[task].train))
            self.method.begin_task(task, self.model)
            if self.method.memory is not None:
                self.method.memory.begin_task()
            self.freezing.begin_task(task)
        while self.position.epoch < self.config.training.epochs:
            self.train_epoch(watcher)
            self.position = Position(task, self.position.epoch + 1)
            self.pause()
        self.method.end_task(task, self.model)
        watcher.end_task(task, self.evaluate(task))
        self.position = Position(task + 1)
        self.save_results()
        self.pause()

    def train_epoch(self, watcher: Watcher) -> None:
        task, epoch = self.position.task, self.position.epoch
        indices = self.stream.tasks[task].train
        if self.position.step == 0:
            self.begin_epoch(epoch, indices)
        frozen, steps = len(self.freezing.freezer.frozen), self.trainer.steps(indices) // self.config.training.epochs
        watcher.begin_epoch(task, epoch, steps, frozen)
        self.trainer.on_step = lambda views: self.after_step(views, watcher)
        with self.clock("training"):
            result = self.trainer.epoch(indices, epoch, self.progress)
        watcher.end_epoch(result)
        sent = self.trainer.parallel.bytes if self.trainer.parallel else 0
        cost = self.cost_of_step(indices)
        line = self.notes.end_epoch(self.position, result, self.clock.seconds, cost, frozen, sent)
        self.files.line("metrics.jsonl", line)
        self.check_numbers()
        check_processes(self.model)
        self.check_spread(indices)

    def begin_epoch(self, epoch: int, indices: np.ndarray) -> None:
        self.notes.begin_epoch(self.clock.seconds)
        with self.clock("rebuild"):
            self.notes.newly_frozen = self.freezing.begin_epoch(epoch, lambda: self.correlate(indices))
            if self.notes.newly_frozen or epoch == 0:
                self.variant = self.trainer.rebuild()
        self.progress = self.trainer.begin_epoch()

    def cost_of_step(self, indices: np.ndarray) -> StepCost:
        """Looked at when an epoch of such steps is over: what a freeze makes slow, its first step has paid for."""
        if self.variant not in self.step_costs:
            with self.clock("measuring"):
                self.step_costs[self.variant] = self.trainer.cost_of_step(indices)
        return self.step_costs[self.variant]

    def after_step(self, views: int, watcher: Watcher) -> None:
        self.position = Position(self.position.task, self.position.epoch, self.position.step + 1)
        watcher.step(views)
        self.pause()

    def pause(self) -> None:
        """A moment at which the run can be left: it saves itself if it is time to, and stops if it was asked to."""
        if self.folder is None or not self.resumable:
            return
        due_here = self.checkpoints is not None and self.checkpoints.due(self.position)
        asked, due = processes.all_reduce_max(
            [self.stop.asked or 0, int(due_here)]
        )  # the processes stop and save together
        if asked or due:
            with self.clock("checkpoint"):
                self.check_numbers()
                if self.checkpoints:
                    self.checkpoints.save(self.position, self.state_dict())
        if asked:
            raise Stopped(self.folder, asked)

    def correlate(self, indices: np.ndarray) -> Ratios:
        """Computes ratios of units not yet frozen: the past is the memory, the gradient the new task's."""
        memory, freezer, settings = self.method.memory, self.freezing.freezer, self.config.freezing
        assert memory is not None
        self.model.train()
        with self.clock("correlation"), self.trainer.engine.arithmetic():
            correlation = TaskCorrelation(
                self.model.encoder,
                self.prepare(memory.past()),
                lambda: self.trainer.sample_loss(indices, self.random["correlation"]),
                settings.threshold,
                units=[unit for unit in freezer.units if unit.name not in freezer.frozen],
                batches=settings.batches,
                keep=[self.model],
                combine=processes.all_reduce_mean_,
            )
        self.freezing.log[-1].setdefault("directions", correlation.directions)  # at the task's start

        def ratios(names: Sequence[str]) -> dict[str, float]:
            with self.clock("correlation"):
                return processes.broadcast_object(correlation(names))

        return ratios

    def evaluate(self, index: int) -> dict[str, list[float | None]]:
        if not self.prober:
            return {}
        with self.clock("evaluation"):
            rows = self.prober.rows(self.model.encoder, index)
            self.notes.end_task(rows, self.prober.future(self.model.encoder, index))
        return rows

    def look_before(self) -> None:
        if self.prober:
            with self.clock("evaluation"):
                self.notes.untrained = self.prober.rows(self.model.encoder, len(self.stream.tasks))
        self.look("before")
        self.save_results()

    def look(self, moment: str) -> None:
        """The gallery of the encoder as it is now, into gallery.json."""
        if self.gallery:
            with self.clock("evaluation"):
                self.gallery.look(moment, self.model.encoder)
                self.files.json("gallery.json", self.gallery.as_dict())

    def prepare(self, images: Tensor) -> Tensor:
        """Stored images as the encoder's input, without augmentation."""
        view = self.view_specs[0]
        x = normalise(images, view.mean, view.std, self.view_size)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def check_numbers(self) -> None:
        """Nothing goes on, and nothing is saved, with losses or weights that are not finite."""
        last = self.checkpoints.last if self.checkpoints else None
        check_numbers([self.model, self.method], self.progress, self.position, last)

    def check_spread(self, indices: np.ndarray) -> None:
        """Warn once of a collapse. Looked at after 1, 2, 4, 8... epochs of a task and after its last: on a GPU an epoch
        may take less than a second."""
        done = self.position.epoch + 1
        if self.notes.warned or (done & (done - 1) and done < self.config.training.epochs):
            return
        with self.clock("evaluation"):
            chosen = torch.from_numpy(indices[:: max(1, len(indices) // 128)][:128])
            images = self.prepare(self.trainer.source.gather(chosen))
            self.notes.warned = warn_of_collapse(self.model.encoder, images, self.position)

    def prepare_folder(self, resume: bool) -> None:
        """The folder as a run that has come this far would have left it."""
        if self.out and not (self.out / "config.yaml").exists():
            self.files.text("config.yaml", to_yaml(self.config))
        if resume:
            if self.resumable:
                self.load_checkpoint()
            self.files.text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.notes.per_epoch))

    def load_checkpoint(self) -> None:
        state = processes.broadcast_object(self.checkpoints.load() if self.checkpoints else None)
        if state is None:
            return
        try:
            self.load_state_dict(state)
        except (RuntimeError, LookupError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            last = self.checkpoints.last if self.checkpoints else "the checkpoint"
            raise UserError(f"{last} does not fit the settings in {self.folder}/config.yaml: {why}") from error
        self.save_results()

    def state_dict(self) -> dict[str, Any]:
        """All that has changed since the constructor, for a checkpoint."""
        return {
            "position": vars(self.position),
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": optimizer_state(self.trainer.optimizer),
            "freezing": self.freezing.state_dict(),
            "random": self.random.state_dict(),
            "torch_random": global_state(self.device),
            "progress": vars(self.progress) if self.progress and self.position.step else None,
            "clock": self.clock.state_dict(),
            "looks": self.gallery.looks if self.gallery else {},
            "record": vars(self.notes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into a run as the constructor made it, with the same settings."""
        self.position = Position(**state["position"])
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])
        load_optimizer_state(self.trainer.optimizer, state["optimizer"])
        self.freezing.load_state_dict(state["freezing"])
        self.random.load_state_dict(state["random"])
        set_global_state(state["torch_random"], self.device)
        if state["progress"] is not None:
            self.progress = EpochState(**state["progress"])
            self.progress.losses = {name: values.to(self.device) for name, values in self.progress.losses.items()}
        self.clock.load_state_dict(state["clock"])
        if self.gallery:
            self.gallery.looks = state["looks"]
        self.notes = Notes(**state["record"])
        self.variant = self.trainer.rebuild()

    def results(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ptlf_version": ptlf.__version__,
            "commit": self.commit,
            "name": name_of(as_dict(self.config)),
            "baseline": type(self.method).baseline and not self.freezing.policy.freezes,
            "status": self.status,
            "config": as_dict(self.config),
            "environment": environment(self.device) | self.trainer.arithmetic() | {"processes": processes.world_size()},
            "seed": self.config.seed,
            "class_order": list(self.stream.class_order),
            "tasks": [task.name for task in self.stream.tasks],
            "eval_splits": [split.name for split in self.stream.eval_splits],
            "units": [unit.name for unit in self.freezing.freezer.units],
            "probes": self.notes.probes(self.prober.settings() if self.prober else {}),
            "freezing": self.freezing.log,
            "cost": self.notes.cost(self.clock.seconds),
        }

    def save_results(self) -> None:
        if self.out:  # else nobody needs them
            self.files.json("results.json", self.results())


def train_one_of_many(run: Run, watcher: Watcher, advice: str, *, resume: bool = False) -> dict[str, Any]:
    """Train, where other runs follow: asked to stop, even in its last moments, none of them begins."""
    try:
        results = run.train(watcher, resume=resume)
    except Stopped as stopped:
        raise stopped.again(advice) from None
    if run.stop.asked and run.folder:
        raise Stopped(run.folder, run.stop.asked, advice)
    return results


def evaluate_run(folder: Path, config: Config, chosen: Sequence[str] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Accuracies of a finished run's encoder, with the settings in `config`, by probe; and the eval_splits' names.

    chosen: only these probes; without it, those the settings enable.
    """
    run = Run(replace(config, evaluation=replace(config.evaluation, enabled=True)))
    load_encoder(folder, run.model.encoder)
    if run.prober is None:
        raise UserError(f"the run in {folder} has no labelled test images to evaluate on")
    if chosen is not None:
        run.prober.choose(chosen)
    rows = run.prober.rows(run.model.encoder, len(run.stream.tasks))
    settings = run.prober.settings()
    probes = {probe: {"settings": settings[probe], **evaluation.summary([row])} for probe, row in rows.items()}
    return probes, [split.name for split in run.stream.eval_splits]
