"""A run: task after task, epoch after epoch, tested after every task, saved so that it can be resumed."""

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ptlf.core import processes
from ptlf.core.errors import UserError, warn
from ptlf.core.phases import Watcher
from ptlf.core.randomness import seeded
from ptlf.core.settings import as_dict
from ptlf.evaluation.metrics import COLLAPSED
from ptlf.integrations.trackers import Trackers
from ptlf.run.build import Components, fill_memory
from ptlf.run.config import Config
from ptlf.run.evaluator import Evaluator
from ptlf.run.folder import claim_folder, encoder_digest, forget_images
from ptlf.run.record import Progress, Record
from ptlf.run.results import append_line, keep_lines
from ptlf.run.snapshots import Snapshots
from ptlf.run.verdict import verdicts
from ptlf.stream import Stream, Task
from ptlf.training.checkpoint import Position
from ptlf.training.cost import Stopwatch
from ptlf.training.engine import why_not_captured
from ptlf.training.process import Stopped, StopSignals


class Run:
    """Everything is built and checked in the constructor; nothing is written before `train`."""

    def __init__(
        self,
        config: Config,
        out: Path | str | None = None,
        encoder: nn.Module | None = None,
        stream: Stream | None = None,
    ) -> None:
        """`encoder` and `stream` take the place of those the configuration names."""
        self.components = parts = Components(config, Path(out) if out else None, encoder, stream)
        self.config, self.folder, self.device = config, parts.folder, parts.device
        self.stream, self.model, self.method = parts.stream, parts.model, parts.method
        self.trainer, self.freezing = parts.trainer, parts.freezing
        self.clock, self.record, self.progress = Stopwatch(parts.device), Record(), Progress()
        self.evaluator = Evaluator(parts, self.clock, lambda *work: self.watcher.phase(*work), self.stop_if_requested)
        self.snapshots = Snapshots(parts, self.progress, self.record, self.clock)
        self.signals = StopSignals(self.snapshots.enabled, tell=processes.is_first())
        self.watcher = Watcher()
        self.trackers = Trackers(config.log if parts.out else ())

    @property
    def begun(self) -> bool:
        """Whether training has begun. An error before that leaves the folder as it was."""
        return self.progress.status != "new"

    @property
    def stop_signal(self) -> int | None:
        """The number of the signal that asked the run to stop."""
        return self.signals.stop_signal

    def results(self) -> dict[str, Any]:
        """What `results.json` holds."""
        return self.snapshots.results()

    def train(self, watcher: Watcher | None = None, *, resume: bool = False, claim: bool = True) -> dict[str, Any]:
        """The whole stream, or with `resume` what the run in the folder has left. Returns what `results.json` holds.

        claim: lock the folder; False where the caller has.
        """
        self.watcher = watcher if watcher and processes.is_first() else Watcher()
        global_randomness = seeded(self.config.seed, "torch", self.device)  # for encoders with dropout and the like
        out = self.components.out if claim else None
        lock, threads = claim_folder(out, resume) if out else contextlib.nullcontext(), contextlib.ExitStack()
        threads.callback(torch.set_num_threads, torch.get_num_threads())  # a run that resumes has those of before
        with lock, global_randomness, threads, self.signals:
            with self.snapshots.settings_written():
                if resume and self.snapshots.enabled:
                    self.resume()
                if resume and self.components.out:
                    keep_lines(self.components.out / "metrics.jsonl", self.record.per_epoch)
            self.progress.status = "running"
            self.begin()
            try:
                self.train_stream()
                self.snapshots.wait()
                self.snapshots.save_encoder()
                self.progress.status = "finished"
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self.watcher.end()
                self.trackers.end(self.progress.status)
            self.close_engine()
            if self.components.out:
                keep_lines(self.components.out / "metrics.jsonl", self.record.per_epoch)
                if not self.config.checkpoint.keep_images:
                    forget_images(self.components.out)
            self.snapshots.save_results()
            if not self.components.encoder_given:
                self.judge()
        return self.results()

    def judge(self, make_module: Callable[[], nn.Module | None] = lambda: None) -> None:
        """The encoder beside the one before training, for the report. make_module: as before training."""
        if (out := self.components.out) and self.config.evaluation.enabled:
            with self.watcher.phase("comparing with the encoder before training"):
                try:
                    verdicts(out, self.config, self.stream, make_module)
                except UserError as error:  # the run is saved
                    warn(f"not compared with the encoder before training: {error}")

    def resume(self) -> None:
        """Load the newest checkpoint, if there is one. Tasks that came since are tested on first: here the encoder is
        still untrained."""
        state = self.snapshots.read()
        if state is None:
            return
        known, gallery = state["tasks"], self.components.gallery
        untrained, features = None, []
        if known < len(self.stream.tasks):
            untrained, features = self.evaluator.test_untrained(known), self.evaluator.measure_untrained(known)
            self.evaluator.look("before")
        elif gallery and gallery.sha256 != state.get("looks_sha256"):  # its looks are of other images
            self.evaluator.look("before")
        looked = bool(gallery and gallery.looks)
        self.snapshots.load_state_dict(state)
        self.rebuild_step()
        if untrained is not None:
            self.record.set_untrained(*untrained)
            self.record.untrained_features += features
            if 0 < known <= self.progress.task < len(self.stream.tasks):  # it was not there when the last one ended
                self.record.add_to(self.record.future, self.evaluator.test_next(self.progress.task))
        if looked:
            self.snapshots.save_gallery()
        self.snapshots.save_results()

    def begin(self) -> None:
        if self.components.out:
            self.trackers.begin(self.components.out, as_dict(self.config), self.record.per_epoch)
        why = why_not_captured(self.device)
        if why and self.config.training.engine == "auto" and self.device.type == "cuda":
            warn(f"{why}: the step runs eagerly, not captured")
        tasks, epochs, freezer = self.stream.tasks, self.config.training.epochs, self.freezing.freezer
        at, images, units = self.progress.position, sum(len(task.train) for task in tasks), len(freezer.units)
        many, each = "s" * (len(tasks) != 1), "s" * (epochs != 1)
        data = f"{len(tasks)} task{many}, {images} images of {self.stream.size} px, {epochs} epoch{each} each"
        about = [f"{data}, {self.config.encoder.name} with {units} units, on {self.device}"]
        about += [chosen] if (chosen := str(self.trainer.arithmetic)) else []
        if self.components.own_encoder and getattr(self.model.encoder, "normalisation", None) is None:
            view = self.components.view_specs[0]
            own = f"the views' mean {[*view.mean]} and std {[*view.std]}; --encoder.mean and --encoder.std give others"
            about.append(f"the encoder does not say how its inputs are normalised: by {own}")
        if self.components.weights and at == Position():
            about += self.components.weights.lines()
        if at != Position():
            place = str(at) if at.epoch < epochs else f"testing after task {at.task + 1}"
            about.append(f"continuing with {place}" if at.task < len(tasks) else "all tasks are learnt")
        self.watcher.begin(about, len(tasks), epochs, units, len(freezer.frozen), at.task * epochs + at.epoch)

    def train_stream(self) -> None:
        if self.progress.position == Position():
            if self.config.memory.images is not None and self.method.memory is None:
                warn(f"method {self.config.method.name!r} keeps no memory; memory.images is not used")
            elif self.config.memory.images is not None:
                self.record.memory_images = fill_memory(self.components)
            self.record.add_reference(self.evaluator.test_reference())
            self.record.set_untrained(*self.evaluator.test_untrained())
            self.record.untrained_features += self.evaluator.measure_untrained()
            self.evaluator.look("before")
            self.snapshots.save_gallery()
            self.snapshots.save_results()
        while self.progress.task < len(self.stream.tasks):
            self.train_task(self.stream.tasks[self.progress.task])
        self.freezing.freezer.thaw()
        self.evaluator.look("after")
        self.snapshots.save_gallery()

    def train_task(self, task: Task) -> None:
        progress, epochs = self.progress, self.config.training.epochs
        self.trainer.images = task.images
        if progress.position.between_tasks:
            self.begin_task(epochs * self.trainer.steps_per_epoch(task.train))
        while progress.epoch < epochs:
            self.train_epoch(task.train)
            progress.epoch, progress.epoch_state = progress.epoch + 1, None
            self.save_or_stop()
        if not progress.task_learnt:
            self.method.end_task(progress.task, self.model)
            progress.task_learnt = True
        self.test_task()
        if progress.before:
            self.snapshots.save_step(self.evaluator.paired_features(progress.task))
        progress.task, progress.epoch, progress.task_learnt, progress.before = progress.task + 1, 0, False, None
        self.snapshots.save_results()
        self.save_or_stop()

    def begin_task(self, steps: int) -> None:
        task, memory = self.progress.task, self.method.memory
        self.model.objective.begin_task(steps)
        self.method.begin_task(task, self.model, steps)
        if memory is not None:
            memory.begin_task()
        remembers = memory is not None and memory.old_count > 0
        given = self.components.weights is not None or self.method.starts_from_given
        knows = given and not self.freezing.policy.needs_ratios
        self.freezing.begin_task(task, past=task > 0 or remembers or knows)
        if task and task >= len(self.stream.tasks) - self.stream.arrived and not self.method.grows:
            encoder = encoder_digest(self.model.encoder.state_dict())
            self.progress.before = {"encoder": encoder, "features": self.evaluator.paired_features(task)}

    def test_task(self) -> None:
        """Nothing is recorded before all of it is there: if the run is stopped here, the test begins anew."""
        task = self.progress.task
        reference, features = self.evaluator.test_reference(), self.evaluator.measure_features(task)
        rows, future, used = self.evaluator.test_task(task)
        self.record.end_task(task, rows, future, used)
        self.watcher.end_task(task, rows)
        self.record.add_reference(reference)
        self.record.features += features

    def train_epoch(self, indices: np.ndarray) -> None:
        progress, state, changed = self.progress, self.progress.epoch_state, False
        if state is None:
            changed = self.freeze(indices)
            state = progress.epoch_state = self.trainer.new_epoch_state()
        frozen = len(self.freezing.freezer.frozen)
        self.watcher.begin_epoch(progress.task, progress.epoch, self.trainer.steps_per_epoch(indices), frozen)
        with self.clock("training"):
            self.trainer.keep_views(indices, self.watcher.phase)
        # Closed at once if the run stops: threads may be reading ahead.
        training = contextlib.closing(self.trainer.epoch(indices, progress.epoch, state))
        before = state.views  # of an epoch that was begun before the run was stopped
        with contextlib.ExitStack() as compiling, self.clock("training"), training as steps:
            if changed and self.trainer.engine_kind != "eager":
                compiling.enter_context(self.watcher.phase("compiling the step"))
            for _ in steps:
                compiling.close()
                self.clock.now()  # should the machine's clock jump back, one step's time is lost
                self.watcher.step(state.views - before)
                self.save_or_stop()
            losses = state.mean_losses()
        self.watcher.end_epoch(losses)
        cost, sent = self.evaluator.step_cost(self.trainer.variant, indices), self.trainer.sent_bytes()
        line = self.record.end_epoch(progress.position, state, losses, self.clock.seconds, cost, frozen, sent)
        if self.components.out:
            append_line(self.components.out / "metrics.jsonl", self.record.per_epoch)
            self.trackers.epoch(len(self.record.per_epoch), line)
        self.snapshots.check_finite()
        if not processes.all_equal(self.model.parameters()):
            raise RuntimeError("the processes' weights differ; a parameter's gradient was not averaged over them")
        self.warn_of_harm(indices)

    def freeze(self, indices: np.ndarray) -> bool:
        """What the schedule asks for in this epoch. Whether the step's operations are others than before."""
        at, record, freezing = self.progress.position, self.record, self.freezing
        record.begin_epoch(self.clock.seconds)
        with self.clock("rebuild"):
            needed = freezing.needs_ratios(at.epoch)
            ratios, correlation = self.evaluator.correlate(at, indices) if needed else (None, None)
            record.newly_frozen = freezing.begin_epoch(at.epoch, ratios)
            if correlation is not None:
                freezing.log_directions(correlation.directions)
            if changed := bool(record.newly_frozen) or at.epoch == 0:
                self.rebuild_step()
        return changed

    def rebuild_step(self) -> None:
        """The step's operations are others than before."""
        for teacher in self.trainer.teachers():
            teacher.freeze_like(self.freezing.freezer)
        self.trainer.rebuild()

    def warn_of_harm(self, indices: np.ndarray) -> None:
        """Once, if features collapse or the encoder forgets what it knew. Looked for after 1, 2, 4, 8... epochs of a
        task and after its last: on a GPU an epoch may take less than a second."""
        done = self.progress.epoch + 1
        if self.record.warned or (done & (done - 1) and done < self.config.training.epochs):
            return
        place = f"in task {self.progress.task + 1}, epoch {done}"
        spread, images = self.evaluator.spread(indices)
        if spread < COLLAPSED:
            differ = f"features of {images} images differ by {spread:.1e} (1 = spread evenly, 0 = all the same)"
            hint = "try a lower --training.lr or another objective"
            warn(f"the representation has collapsed {place}: normalised {differ}; {hint}")
            self.record.warned = True
        elif done < self.config.training.epochs:  # after the last one the test tells
            for probe, before, now, images in self.evaluator.recheck_reference(self.record.reference):
                what = f"{probe} on {images} images of what it knew fell from {before:.1f} to {now:.1f} %"
                hint = "try a lower --training.lr, or freeze more by --freezing.initial and --freezing.final"
                warn(f"the encoder is worse than before training {place}: {what}; {hint}")
                self.record.warned = True
                return

    def save_or_stop(self) -> None:
        """A moment at which the run can be left: it saves itself if it is time to, and stops if it was asked to."""
        if not self.snapshots.enabled:
            return
        # All processes stop and save at the same step.
        number, due = processes.all_reduce_max([self.stop_signal or 0, int(self.snapshots.due())])
        if number or due:
            self.snapshots.save()
        if number:
            self.snapshots.wait()
            raise self.stopped(number)

    def stop_if_requested(self) -> None:
        """In the middle of a test, a look at the gallery or a task's first correlation. After a task the run is saved,
        and tested when it is resumed; elsewhere nothing was learnt since the last checkpoint. Several processes finish
        what they do: they have to stop at the same place."""
        if self.folder and self.stop_signal and processes.world_size() == 1:
            if self.progress.task_learnt:
                self.snapshots.save()
            self.snapshots.wait()
            raise self.stopped(self.stop_signal, "" if self.progress.task_learnt else self.lost())

    def stopped(self, number: int, lost: str = "") -> Stopped:
        assert self.folder is not None
        return Stopped(self.folder, number, f"continue with `{self.snapshots.command(self.folder)}`", lost)

    def lost(self) -> str:
        """What is lost if the run stops without saving."""
        if last := self.snapshots.last:
            return f"what was done since the last checkpoint, {last.name}, is repeated"
        return "this run has no checkpoint and begins anew"

    def fail(self, error: BaseException) -> None:
        """Record that the run ends with this error, which the caller raises."""
        with contextlib.suppress(Exception):  # the first error is the one to report
            self.snapshots.wait()
        if last := self.snapshots.last:
            command = self.snapshots.command(last.parent.parent)
            error.add_note(f"the last checkpoint is {last}; `{command}` continues from it")
        self.progress.status = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
        with contextlib.suppress(Exception):
            self.snapshots.save_results()
        if not isinstance(error, RuntimeError):  # else the graphs may be waiting for a process that has died
            self.close_engine()
        if isinstance(error, KeyboardInterrupt) and self.folder and self.stop_signal:
            raise self.stopped(signal.SIGINT, self.lost()) from None

    def close_engine(self) -> None:
        """Before the process group ends, which the captured graphs hold on to."""
        if processes.joined():
            self.trainer.engine.close()
