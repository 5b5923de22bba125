"""The loop of a run: task after task, epoch after epoch, evaluated after every task, saved so that it can go on."""

import contextlib
import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.files import write_whole
from ptlf.core.randomness import seeded
from ptlf.core.reading import DAMAGE, check, damaged, reason
from ptlf.core.settings import as_dict
from ptlf.core.words import short_repr
from ptlf.encoders.weights import KEY
from ptlf.run.compat import describe_changes
from ptlf.run.config import from_dict, read_yaml, to_yaml
from ptlf.run.folder import ENCODER, START, claimed, save_encoder
from ptlf.run.inference import card_of
from ptlf.run.looks import Looks
from ptlf.run.results import append_line, keep_lines, write_json
from ptlf.run.start import fill_memory, save_start
from ptlf.run.state import COMPARED, STATE
from ptlf.run.watcher import Watcher
from ptlf.stream import STREAMS
from ptlf.training.checkpoint import Position
from ptlf.training.engine import why_not_captured
from ptlf.training.process import Stopped
from ptlf.training.trainer import EpochState


class Run(Looks):
    """Everything is built and checked in the constructor; nothing is written before `train`."""

    def train(self, watcher: Watcher | None = None, *, resume: bool = False, claim: bool = True) -> dict[str, Any]:
        """The whole stream, or with `resume` what the run in the folder has left. Returns what `results.json` holds.

        claim: lock the folder; False where the caller has.
        """
        self.watcher = watcher if watcher and processes.is_first() else Watcher()
        global_randomness = seeded(self.config.seed, "torch", self.device)  # for encoders with dropout and the like
        folder = claimed(self.out, resume) if self.out and claim else contextlib.nullcontext()
        with folder, global_randomness, self.signals:
            with self.undone():
                self.prepare_folder(resume)
            self.prepared = True
            if self.out:
                self.trackers.begin(self.out, as_dict(self.config), self.record.per_epoch)
            if why := why_not_captured(self.config.training.engine, self.device):
                processes.warn(f"ptlf: {why}: the step runs eagerly, not captured")
            self.tell_start()
            try:
                self.train_stream()
                self.finish_saving()
                if self.out:
                    card = json.dumps(card_of(self))
                    self.encoder_sha256 = save_encoder(self.out, self.model.encoder, ENCODER, {KEY: card})
                self.status = "finished"
            except BaseException as error:
                with contextlib.suppress(Exception):  # the error that is told is the first
                    self.finish_saving()
                if last := self.checkpoints.last if self.checkpoints else None:
                    command = self.go_on(last.parent.parent)
                    error.add_note(f"the last checkpoint is {last}; `{command}` goes on from it")
                self.status = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
                with contextlib.suppress(Exception):  # best effort: the original error is re-raised
                    self.save_results()
                if not isinstance(error, RuntimeError):  # else the graphs may be waiting for a process that has died
                    self.leave_graphs()
                if isinstance(error, KeyboardInterrupt) and self.folder and self.signals.asked:
                    raise Stopped(self.folder, signal.SIGINT, self.advice(self.folder), self.lost()) from None
                raise
            finally:
                self.watcher.end()
                self.trackers.end(self.status)
            self.leave_graphs()
            self.save_results()
        return self.results()

    def leave_graphs(self) -> None:
        """Before the process group ends, which the graphs hold on to."""
        if processes.joined():
            self.trainer.engine.close()

    def train_stream(self) -> None:
        if self.position == Position():
            self.fill_memory()
            self.record.test_reference(self.test_reference())
            self.look_before()
            self.save_gallery()
            self.save_results()
        while self.task < len(self.stream.tasks):
            self.trainer.begin_task(self.stream.tasks[self.task].images)
            self.train_task(self.stream.tasks[self.task].train)
        self.freezing.freezer.thaw()
        self.look("after")
        self.save_gallery()

    def fill_memory(self) -> None:
        """With images of `memory.images`, before the first task."""
        if self.config.memory.images is None:
            return
        if self.method.memory is None:
            return processes.warn(
                f"ptlf: method {self.config.method.name!r} keeps no memory; memory.images is not used"
            )
        views = (self.view_specs, self.view_size, self.random, self.method.needs_outputs, self.stream.fit)
        self.record.memory_images = fill_memory(self.method.memory, self.model.encoder, self.config, *views)

    def train_task(self, indices: np.ndarray) -> None:
        if self.position.between_tasks:
            self.model.objective.begin_task(self.config.training.epochs * self.trainer.steps_per_epoch(indices))
            self.method.begin_task(self.task, self.model)
            if self.method.memory is not None:
                self.method.memory.begin_task()
            self.freezing.begin_task(self.task, self.has_past())
        while self.epoch < self.config.training.epochs:
            self.train_epoch(indices)
            self.epoch, self.epoch_state = self.epoch + 1, None
            self.pause()
        if not self.ended:
            self.method.end_task(self.task, self.model)
            self.ended = True
        # Nothing is recorded before all of it is there: if the run is stopped here, the test begins anew.
        reference, features = self.test_reference(), self.measure_features(self.task)
        self.watcher.end_task(self.task, self.evaluate())
        self.record.test_reference(reference)
        self.record.features += features
        self.task, self.epoch, self.ended = self.task + 1, 0, False
        self.save_results()
        self.pause()

    def train_epoch(self, indices: np.ndarray) -> None:
        state = self.epoch_state or self.begin_epoch(indices)
        frozen = len(self.freezing.freezer.frozen)
        self.watcher.begin_epoch(self.task, self.epoch, self.trainer.steps_per_epoch(indices), frozen)
        # Closed at once if the run stops: threads may be reading ahead.
        training = contextlib.closing(self.trainer.epoch(indices, self.epoch, state))
        before = state.views  # of an epoch that was begun before the run was stopped
        with contextlib.ExitStack() as compiling, self.clock("training"), training as steps:
            if self.compiles and not state.steps:
                compiling.enter_context(self.watcher.phase("compiling the step"))
            for _ in steps:
                compiling.close()
                self.watcher.step(state.views - before)
                self.pause()
            result = state.result()
        self.watcher.end_epoch(result.losses)
        cost, sent = self.cost_of_step(indices), self.trainer.sent_bytes()
        line = self.record.end_epoch(self.position, result, self.clock.seconds, cost, frozen, sent)
        if self.out:
            append_line(self.out / "metrics.jsonl", line)
            self.trackers.epoch(len(self.record.per_epoch), line)
        self.check_numbers()
        self.check_processes()
        self.check_spread(indices)

    def begin_epoch(self, indices: np.ndarray) -> EpochState:
        self.record.begin_epoch(self.clock.seconds)
        with self.clock("rebuild"):
            self.record.newly_frozen = self.freezing.begin_epoch(self.epoch, lambda: self.correlate(indices))
            changed = bool(self.record.newly_frozen) or self.epoch == 0
            self.compiles = changed and self.trainer.engine_kind != "eager"
            if changed:
                self.variant = self.trainer.rebuild()
        self.epoch_state = self.trainer.begin_epoch()
        return self.epoch_state

    def pause(self) -> None:
        """A moment at which the run can be left: it saves itself if it is time to, and stops if it was asked to."""
        if self.folder is None or not self.resumable:
            return
        due_here = self.checkpoints is not None and self.checkpoints.due(self.position)
        # All processes stop and save at the same step.
        asked, due = processes.all_reduce_max([self.signals.asked or 0, int(due_here)])
        if asked or due:
            self.save()
        if asked:
            self.finish_saving()
            raise Stopped(self.folder, asked, self.advice(self.folder))

    def heed(self) -> None:
        """Stop in the middle of a test, a look at the gallery or a task's first correlation, if asked to. After a task
        the run is saved, and tested when it goes on; elsewhere nothing was learnt since the last checkpoint. Several
        processes finish what they do: they have to stop at the same place."""
        if self.folder and self.signals.asked and processes.world_size() == 1:
            if self.ended:
                self.save()
            self.finish_saving()
            lost = "" if self.ended else self.lost()
            raise Stopped(self.folder, self.signals.asked, self.advice(self.folder), lost)

    def save(self) -> None:
        with self.clock("checkpoint"):
            self.check_numbers()
            if self.checkpoints:
                self.checkpoints.save(self.position, self.state_dict())

    def advice(self, folder: Path) -> str:
        return f"go on with `{self.go_on(folder)}`"

    def lost(self) -> str:
        """What is lost if the run stops without saving."""
        if last := self.checkpoints.last if self.checkpoints else None:
            return f"what was done since the last checkpoint, {last.name}, is repeated"
        return "this run has no checkpoint and begins anew"

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self.checkpoints:
            with self.clock("checkpoint"):
                self.checkpoints.finish()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """If the block raises, and the folder held no run before, it holds none after it."""
        written = [self.out / name for name in ("config.yaml", START)] if self.out else []
        new = not any(path.exists() for path in written[:1])
        try:
            yield
        except BaseException:
            for path in written if new else ():
                with contextlib.suppress(OSError):  # the error that is told is the first
                    path.unlink()
            raise

    def prepare_folder(self, resume: bool) -> None:
        """The folder as a run that has come this far would have left it. If its checkpoint is refused, its files stay
        as they were."""
        if self.out and not (self.out / "config.yaml").exists():
            write_whole(self.out / "config.yaml", to_yaml(self.config))
        if self.out and self.weights:
            save_start(self.out, self.model.encoder, self.weights)
        if resume and self.resumable:
            self.load_checkpoint()
        if self.out:
            self.update_config(self.out / "config.yaml")
        if resume and self.out:
            keep_lines(self.out / "metrics.jsonl", self.record.per_epoch)

    def update_config(self, path: Path) -> None:
        """What may have been given anew: where the run is tested, and who tracks it."""
        stored, own = read_yaml(path), as_dict(self.config)
        changed = {name: own[name] for name in ("evaluation", "log") if own[name] != stored.get(name, [])}
        if changed:
            write_whole(path, yaml.safe_dump({**stored, **changed}, sort_keys=False))

    def load_checkpoint(self) -> None:
        state = processes.broadcast_object(self.checkpoints.load() if self.checkpoints else None)
        if state is None:
            return
        last = (self.checkpoints.last if self.checkpoints else None) or "the checkpoint"
        try:
            check(state, STATE if state.get("settings") is None else STATE | COMPARED)
        except (ValueError, AttributeError) as error:
            raise damaged(last, error, "remove that file to go on from the one before it") from None
        self.check_resumed(state)
        self.check_threads(state.get("threads"))
        known = state.get("tasks", len(self.stream.tasks))
        grown = known < len(self.stream.tasks)
        if grown:  # here the model is still untrained
            self.look_before(known)
        elif self.gallery and self.gallery.sha256 != state.get("looks_sha256"):  # the looks are of other images
            self.look("before")
        before, spent, looked = self.record, self.clock.seconds, bool(self.gallery and self.gallery.looks)
        try:
            self.load_state_dict(state)
            self.results(), self.gallery and self.gallery.looks and self.gallery.as_dict()  # all they need is there
        except (RuntimeError, *DAMAGE) as error:
            why = reason(error)
            raise UserError(f"{last} does not fit the settings in {self.folder}/config.yaml: {why}") from error
        self.clock.add(spent)
        if grown:
            self.record.begin(before.untrained, before.untrained_future)
            self.record.untrained_features += before.untrained_features
            if self.task >= known:
                self.look_ahead()
        if looked:
            self.save_gallery()
        self.save_results()

    def check_resumed(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other settings, or other images of the tasks begun, than the checkpoint was made with:
        the record would be false of what is already learnt."""
        file = shlex.quote(f"{self.folder}/config.yaml")
        begin = f"begin anew with `ptlf train --config {file} --out OTHER`"
        if self.encoder_given:
            begin = "begin anew in another folder"
        elif STREAMS.find(self.config.stream.name).arriving:
            begin = f"begin anew with `ptlf learn OTHER IMAGES --config {file}`"
        if (before := state.get("settings")) is None:
            processes.warn(
                f"ptlf: warning: the checkpoint in {self.folder} does not say its settings; nothing is compared"
            )
            return
        with contextlib.suppress(UserError):  # settings that this version does not know differ
            before = as_dict(from_dict(before))  # those that are newer than the checkpoint had their defaults' effect
        if changed := describe_changes(before, as_dict(self.config)):
            raise UserError(
                f"the settings in {self.folder}/config.yaml have changed: {changed}; put them back, or {begin}"
            )
        begun = min(state["position"]["task"], state["tasks"] - 1)
        images, now = state["images"], self.images_begun(begun)
        for old, new in zip(images, now, strict=False):
            if old != new:
                what = ", ".join(
                    f"{key} was {short_repr(old[key])} and is {short_repr(new[key])}"
                    for key in new
                    if old[key] != new[key]
                )
                raise UserError(
                    f"the images of {short_repr(new['name'])} have changed: {what}; put them back, or {begin}"
                )
        arrived = len(self.stream.tasks) - state["tasks"]  # since the checkpoint was written
        if len(images) != len(now) or not 0 <= arrived <= self.stream.arrived:
            put_back = "put back what is missing, or " if arrived < 0 else ""
            tasks = f"the stream had {state['tasks']} tasks and now has {len(self.stream.tasks)}"
            raise UserError(f"{tasks}; {put_back}{begin}")

    def check_threads(self, before: int | None) -> None:
        """Threads of the CPU share a sum among them: another number of them adds in another order."""
        now = torch.get_num_threads()
        if self.device.type == "cpu" and before not in (None, now):
            differ = "results may differ in the last bits from those of a run that was not stopped"
            processes.warn(
                f"ptlf: warning: the checkpoint is of {before} CPU threads, and now there are {now}: "
                f"{differ}; set OMP_NUM_THREADS={before} for the same bits"
            )

    def save_results(self) -> None:
        if self.out:  # else nobody needs them
            write_json(self.out / "results.json", self.results())

    def tell_start(self) -> None:
        tasks, epochs, freezer = self.stream.tasks, self.config.training.epochs, self.freezing.freezer
        units, frozen = len(freezer.units), len(freezer.frozen)
        images = sum(len(task.train) for task in tasks)
        many, each = "s" * (len(tasks) != 1), "s" * (epochs != 1)
        data = f"{len(tasks)} task{many}, {images} images of {self.stream.size} px, {epochs} epoch{each} each"
        about = [f"{data}, {self.config.encoder.name} with {units} units, on {self.device}"]
        if self.weights and self.position == Position():
            about += self.weights.lines()
        if self.trainer.engine_kind != "eager":
            about.append("compiling the step: some seconds, for encoders other than our ResNets up to a minute")
        if self.position != Position():
            place = str(self.position) if self.epoch < epochs else f"testing after task {self.task + 1}"
            about.append(f"going on with {place}" if self.task < len(tasks) else "all tasks are learnt")
        self.watcher.begin(about, len(tasks), epochs, units, frozen, self.task * epochs + self.epoch)
