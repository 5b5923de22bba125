"""A run's folder: its settings, checkpoints and results as the run goes, and the way back into a run from them.

The checksum says that a checkpoint is as it was written: an error while it is loaded is a bug.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

import ptlf
from ptlf.core import processes
from ptlf.core.errors import UserError, quoted, short_repr, warn
from ptlf.core.files import write_whole
from ptlf.core.settings import as_dict
from ptlf.encoders import ENCODERS
from ptlf.encoders.weights import KEPT, KEY
from ptlf.run.build import Components
from ptlf.run.compat import describe_changes
from ptlf.run.config import from_dict, read_yaml, to_yaml
from ptlf.run.folder import ENCODER, START, differing_shapes, encoder_digest, keep_encoder, save_encoder
from ptlf.run.inference import card_of
from ptlf.run.recipes import name_of
from ptlf.run.record import Progress, Record, environment, source_commit
from ptlf.run.results import SCHEMA, Json, write_json
from ptlf.run.versions import write_step
from ptlf.stream import Stream
from ptlf.stream.arrivals import arrivals
from ptlf.stream.task import digest
from ptlf.training.checkpoint import Checkpoints, load_optimizer_state, optimizer_state
from ptlf.training.cost import Stopwatch
from ptlf.training.trainer import EpochState

Images = list[dict[str, Any]]  # name, count and SHA-256 of each set of images


class Snapshots:
    """Only the first process writes, and only where the run has a folder."""

    def __init__(self, components: Components, progress: Progress, record: Record, clock: Stopwatch) -> None:
        self.components, self.progress, self.record, self.clock = components, progress, record, clock
        self.out = components.out
        self.encoder_sha256: str | None = None  # of the file, once it is written
        self.commit = source_commit()
        self.enabled = components.folder is not None and components.config.checkpoint.enabled
        self.checkpoints: Checkpoints | None = None
        if self.out and self.enabled:
            self.checkpoints = Checkpoints(self.out, components.config.checkpoint, self.command(self.out))
        self.images_of_task = functools.cache(functools.partial(images_of_task, components.stream))

    @property
    def last(self) -> Path | None:
        """The checkpoint that was written or loaded last."""
        return self.checkpoints.last if self.checkpoints else None

    def command(self, folder: Path) -> str:
        """What to type to resume the run."""
        config = self.components.config
        names = [config.stream.name, config.objective.name, config.method.name, *config.probes, *config.log]
        names += [config.freezing.policy.name, config.training.optimizer.name]
        code = ENCODERS.names_code(config.encoder.name) or any(":" in name for name in names)
        if self.components.encoder_given:
            return f"ptlf.Learner.load({str(folder)!r}, encoder=MODULE{', trust_code=True' if code else ''}).learn()"
        verb = "learn" if self.components.stream.arrived else "train --resume"
        return f"ptlf {verb} {quoted(folder)}{' --trust-code' if code else ''}"

    def due(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.due(self.progress.position)

    def save(self) -> None:
        with self.clock("checkpoint"):
            self.check_finite()
            if self.checkpoints:
                self.checkpoints.save(self.progress.position, self.state_dict())

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self.checkpoints:
            with self.clock("checkpoint"):
                self.checkpoints.wait()

    def check_finite(self) -> None:
        """Nothing continues or is saved with losses or weights that are not finite, or that no record may hold."""
        at, state = self.progress.position, self.progress.epoch_state
        bad = state.first_bad() if state else None
        if bad is None and are_finite([self.components.model, self.components.method]):
            return
        step, what = (bad[0] + 1, f"loss became {bad[1]}") if bad else (at.step, "weights are no longer finite")
        if self.checkpoints:
            self.checkpoints.wait()
        where = f"the {what} in task {at.task + 1}, epoch {at.epoch + 1}, step {step}"
        last = f"the last good checkpoint is {self.last}" if self.last else "there is no checkpoint yet"
        raise UserError(f"{where}; {last}; try a lower --training.lr or --training.precision fp32")

    def state_dict(self) -> dict[str, Any]:
        """All that has changed since the run was built, as plain values and tensors."""
        parts, progress = self.components, self.progress
        drawn = {"cpu": torch.get_rng_state()}  # from which dropout and the like draw
        if parts.device.type == "cuda":
            drawn["cuda"] = torch.cuda.get_rng_state(parts.device)
        return {
            "position": vars(progress.position),
            "ended": progress.task_learnt,
            "tasks": len(parts.stream.tasks),
            "model": parts.model.state_dict(),
            "method": parts.method.state_dict(),
            **optimizer_state(parts.trainer.optimizer, self.parameter_names()),
            "freezing": parts.freezing.state_dict(),
            "random": parts.random.state_dict(),
            "torch_random": drawn,
            "epoch_state": vars(progress.epoch_state) if progress.epoch_state else None,
            "before": progress.before,
            "clock": dict(self.clock.seconds),
            "looks": parts.gallery.looks if parts.gallery else {},
            "looks_sha256": parts.gallery.sha256 if parts.gallery else None,
            "record": vars(self.record),
            "settings": as_dict(parts.config),
            "threads": torch.get_num_threads(),
            "images": self.images_begun(progress.task),
        }

    def load_state_dict(self, state: Json) -> None:
        """Into components as they were built, maybe with more tasks. Looks at the gallery that are there stay."""
        parts, progress, epoch = self.components, self.progress, state["epoch_state"]
        parts.model.load_state_dict(state["model"], strict=False)  # methods that grow lack what comes later
        parts.method.load_state_dict(state["method"])
        load_optimizer_state(parts.trainer.optimizer, state, self.parameter_names())
        parts.freezing.load_state_dict(state["freezing"])
        parts.random.load_state_dict(state["random"])
        torch.set_rng_state(state["torch_random"]["cpu"])
        if parts.device.type == "cuda" and "cuda" in state["torch_random"]:
            torch.cuda.set_rng_state(state["torch_random"]["cuda"], parts.device)
        if epoch is not None:
            losses = {name: values.to(parts.device) for name, values in epoch["losses"].items()}
            progress.epoch_state = EpochState(**{**epoch, "losses": losses})
        progress.task, progress.epoch = state["position"]["task"], state["position"]["epoch"]
        progress.task_learnt, progress.before = state["ended"], state.get("before")  # older ones lack it
        self.clock.add(state["clock"])
        if parts.gallery:
            parts.gallery.looks = parts.gallery.looks or state["looks"]
        vars(self.record).update(state["record"])
        self.record.widen(len(parts.stream.eval_splits))

    def read(self) -> Json | None:
        """The newest checkpoint, if there is one: of this run. On all processes."""
        parts = self.components
        state = processes.broadcast_object(self.checkpoints.load() if self.checkpoints else None)
        if state is None:
            return None
        check_same_run(state, parts, self.images_begun(min(state["position"]["task"], state["tasks"] - 1)))
        threads, now = state["threads"], torch.get_num_threads()
        if threads <= (os.cpu_count() or 1) and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads)
        elif parts.device.type == "cpu" and threads != now:  # they share a sum among them
            differ = f"the checkpoint is of {threads} CPU threads, and now there are {now}: the last bits may differ"
            warn(f"{differ} from a run that was not stopped; set OMP_NUM_THREADS={threads} for the same bits")
        return state

    def images_begun(self, task: int) -> Images:
        """What identifies the images of the tasks up to this one (from 0)."""
        count = min(task + 1, len(self.components.stream.tasks))
        return [entry for number in range(count) for entry in self.images_of_task(number)]

    def parameter_names(self) -> dict[Tensor, str]:
        modules: dict[str, nn.Module] = {"model": self.components.model, "method": self.components.method}
        return {parameter: name for part in modules for name, parameter in modules[part].named_parameters(part)}

    @contextlib.contextmanager
    def settings_written(self) -> Iterator[None]:
        """Settings and starting weights are in the folder: in the block as they were, if the run is there, and after it
        with the tests and trackers that are given now. If the block raises, a folder without a run holds none again."""
        if self.out is None:
            yield
            return
        config, weights, file = self.components.config, self.components.weights, self.out / "config.yaml"
        new = not file.exists()
        try:
            if new:
                write_whole(file, to_yaml(config))
            if weights and not (self.out / START).exists():  # the run needs their file no more
                encoder = self.components.model.encoder
                save_encoder(self.out, encoder, START, {"weights": json.dumps(asdict(weights))})
            yield
            stored, own = read_yaml(file), as_dict(config)
            changed = {name: own[name] for name in ("evaluation", "log") if own[name] != stored.get(name, [])}
            if changed:
                write_whole(file, yaml.safe_dump({**stored, **changed}, sort_keys=False))
        except BaseException:
            for path in (file, self.out / START) if new else ():
                path.unlink(missing_ok=True)
            raise

    def save_encoder(self) -> None:
        if self.out:
            metadata = {KEY: json.dumps(card_of(self.components))}
            encoder = self.components.model.encoder
            self.encoder_sha256 = save_encoder(self.out, encoder, ENCODER, metadata)
            if (self.out / KEPT).is_dir():
                keep_encoder(self.out, self.components.stream.tasks[-1].name)

    def save_step(self, features: Tensor) -> None:
        """Maps between the versions of before and after the task, from features of the same images."""
        before, number = self.progress.before, self.progress.task + 1
        if before and self.out and len(features) == len(before["features"]):  # images may have gone in between
            previous, task = (task.name for task in self.components.stream.tasks[number - 2 : number])
            digests = {"before": before["encoder"], "after": encoder_digest(self.components.model.encoder.state_dict())}
            vectors = (each.cpu().numpy() for each in (before["features"], features))
            write_step(self.out, number, {"previous": previous, "task": task, **digests}, *vectors)

    def save_gallery(self) -> None:
        if self.out and self.components.gallery:
            with self.clock("evaluation"):
                write_json(self.out / "gallery.json", self.components.gallery.as_dict())

    def save_results(self) -> None:
        if self.out:  # else nobody needs them
            write_json(self.out / "results.json", self.results())

    def images_held(self) -> Json:
        """How many images are in the run's folder, packed and in the memory, and whether a gallery shows some."""
        arrived, memory = arrivals(self.out) if self.out else [], self.components.method.memory
        packed = [split.count for p in arrived for split in p.splits.values() if (p.path / split.images).is_file()]
        shown = self.components.gallery is not None
        return {"tasks": sum(packed), "memory": len(memory) if memory is not None else 0, "gallery": shown}

    def results(self) -> Json:
        """What `results.json` holds."""
        parts, record, stream = self.components, self.record, self.components.stream
        arrived, config = stream.arrived, as_dict(parts.config)
        trainer = parts.trainer
        here = {"engine": trainer.engine_kind, **trainer.arithmetic.record(), "processes": processes.world_size()}
        return {
            "schema": SCHEMA,
            "ptlf_version": ptlf.__version__,
            "commit": self.commit,
            "name": name_of(config),
            "baseline": type(parts.method).baseline and not parts.freezing.policy.freezes,
            "uses_labels": parts.model.objective.needs_labels,
            "status": "running" if self.progress.status == "new" else self.progress.status,
            "config": config,
            "environment": environment(parts.device) | here,
            "encoder_weights": as_dict(parts.weights) if parts.weights else None,
            "seed": parts.config.seed,
            "class_order": list(stream.class_order),
            "tasks": [task.name for task in stream.tasks],
            "arrived": arrived,
            "arrived_sha256": [task.images.sha256 for task in stream.tasks[-arrived:]] if arrived else [],
            "eval_splits": [split.name for split in stream.eval_splits],
            "test_images": [len(split.test) for split in stream.eval_splits],
            "own_encoder": parts.own_encoder,
            "encoder_sha256": self.encoder_sha256,
            "units": [unit.name for unit in parts.freezing.freezer.units],
            "probes": record.probes(parts.prober.settings() if parts.prober else {}),
            "reference": record.reference_results(parts.reference) if parts.reference else None,
            "memory_images": record.memory_images,
            "holds_images": self.images_held(),
            "features": record.features,
            "untrained_features": record.untrained_features,
            "freezing": parts.freezing.log,
            "cost": record.cost(self.clock.seconds),
        }


def are_finite(modules: Iterable[nn.Module]) -> bool:
    """Whether parameters and running statistics are finite and other buffers, such as masks with -inf, have no NaN."""
    modules = list(modules)
    tensors = [(name, t) for module in modules for name, t in module.named_buffers() if t.is_floating_point()]
    trained = [p for module in modules for p in module.parameters()] + [t for name, t in tensors if "running_" in name]
    others = [t for name, t in tensors if "running_" not in name]
    # L1 norms are finite if all values are; one of all is NaN if a value is.
    return bool(get_total_norm(trained, 1).isfinite()) and not bool(get_total_norm(others, 1).isnan())


def check_same_run(state: Json, components: Components, images: Images) -> None:
    """Refuse other settings, or other images of the tasks begun, than the checkpoint was made with. images: as now."""
    folder, stream, hint = components.folder, components.stream, "put them back, or begin anew in another folder"
    before = state["settings"]
    with contextlib.suppress(UserError):  # settings that this version does not know differ
        before = as_dict(from_dict(before))  # those that are newer than the checkpoint had their defaults' effect
    if changed := describe_changes(before, as_dict(components.config)):
        raise UserError(f"the settings in {folder}/config.yaml have changed: {changed}; {hint}")
    for old, new in zip(state["images"], images, strict=False):
        if changed := describe_changes(old, new, ()):
            raise UserError(f"the images of {short_repr(new['name'])} have changed: {changed}; {hint}")
    arrived = len(stream.tasks) - state["tasks"]  # since the checkpoint was written
    if len(state["images"]) != len(images) or not 0 <= arrived <= stream.arrived:
        raise UserError(f"the stream had {state['tasks']} tasks and now has {len(stream.tasks)}; {hint}")
    for name, there, now in differing_shapes(state["model"], components.model.state_dict()):
        if there is not None or not components.method.grows:
            what = f"{short_repr(name)} has the shape {there} there and {now} now"
            raise UserError(f"the checkpoint in {folder} does not fit the encoder: {what}; {hint}")


def images_of_task(stream: Stream, task: int) -> Images:
    """What identifies the images of a task (from 0), and of the splits that are tested from it on."""
    new, splits = stream.tasks[task], [split for split in stream.eval_splits if split.since == task]
    parts = [(f"task {task + 1}, {new.name}", new.images, new.train)]
    parts += [(f"the test images of {split.name}", split.test_images, split.test) for split in splits]
    return [{"name": name, "count": len(rows), "sha256": digest(images, rows)} for name, images, rows in parts]
