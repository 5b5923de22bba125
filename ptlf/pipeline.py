"""A run from beginning to end: stream in; encoder, accuracy matrices, cost and record out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

import ptlf
from ptlf import evaluation
from ptlf.config import Config, to_yaml
from ptlf.encoders import ENCODERS, feature_dim
from ptlf.errors import UserError, unknown
from ptlf.evaluation import Gallery, Prober
from ptlf.freezing import POLICIES, Freezer, ProgressiveFreezing, correlation_ratios
from ptlf.freezing.policies import measure_savings
from ptlf.methods import METHODS, Memory
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.randomness import Randomness, derived_seed
from ptlf.report import record
from ptlf.report.live import Watcher
from ptlf.settings import as_dict
from ptlf.stream import STREAMS, Stream, open_stream
from ptlf.stream.fetch import data_root
from ptlf.stream.loading import ImageSource
from ptlf.training.cost import Stopwatch, peak_memory_bytes, reset_peak_memory
from ptlf.training.optimizer import make_optimizer
from ptlf.training.trainer import EpochResult, Trainer, check_batch
from ptlf.views import normalise, recipe


class Run:
    """Everything is built and checked in the constructor; nothing is written before `train`."""

    def __init__(self, config: Config, out: Path | None = None, *, encoder: nn.Module | None = None) -> None:
        self.config, self.out = config, out
        self.device = choose_device(config.device)
        self.random = Randomness(config.seed)
        self.stream = make_stream(config)
        self.view_size = config.views.size or self.stream.size
        self.recipe = recipe(config.views.name, self.view_size)
        check_combination(config)
        check_batch(config.training, [len(task.train) for task in self.stream.tasks])
        self.prober = make_prober(self.stream, config, self.prepare, self.device)
        self.gallery = make_gallery(self.stream, config, self.prepare, self.device) if out else None
        self.model = make_model(config, self.stream, self.view_size, encoder).to(self.device)
        if config.training.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.method = self.make_method().to(self.device)
        parameters = [*self.model.parameters(), *self.method.parameters()]
        self.trainer = Trainer(
            model=self.model,
            method=self.method,
            optimizer=make_optimizer(config.training, [p for p in parameters if p.requires_grad]),
            source=ImageSource(self.stream.data.train, self.device, config.stream.resident),
            recipe=self.recipe,
            view_size=self.view_size,
            config=config.training,
            random=self.random,
            device=self.device,
        )
        self.freezing = self.make_freezing()
        self.clock = Stopwatch(self.device)
        self.per_epoch: list[dict[str, Any]] = []
        self.matrices: dict[str, list[list[float | None]]] = {}
        self.untrained: dict[str, list[float | None]] = {}
        self.future: list[float | None] = []
        self.status = "running"

    def train(self, watcher: Watcher | None = None) -> dict[str, Any]:
        """The whole stream. Returns what `results.json` holds."""
        watcher = watcher or Watcher()
        claim_folder(self.out)
        self.save_text("config.yaml", to_yaml(self.config))
        watcher.begin(self)
        try:
            self.train_stream(watcher)
        finally:
            watcher.end()
        self.status = "finished"
        self.save_encoder()
        self.save_results()
        return self.results()

    def train_stream(self, watcher: Watcher) -> None:
        if self.prober:
            with self.clock("evaluation"):
                self.untrained = self.prober.rows(self.model.encoder, len(self.stream.tasks))
        self.look("before")
        self.save_results()
        for index in range(len(self.stream.tasks)):
            self.model.objective.begin_task(self.trainer.steps(self.stream.tasks[index].train))
            self.method.begin_task(index, self.model)
            self.freezing.begin_task(index)
            for epoch in range(self.config.training.epochs):
                self.train_epoch(index, epoch, watcher)
            self.method.end_task(index, self.model)
            watcher.end_task(index, self.evaluate(index))
            self.save_results()
        self.freezing.freezer.thaw()
        self.look("after")

    def train_epoch(self, index: int, epoch: int, watcher: Watcher) -> None:
        indices = self.stream.tasks[index].train
        with self.clock("rebuild"):
            changed = self.freezing.begin_epoch(epoch, lambda: self.correlation(indices))
        if changed or epoch == 0:
            self.step_cost = self.trainer.cost_of_step(indices, self.freezing.freezer.folded)
        frozen = self.freezing.freezer.frozen
        watcher.begin_epoch(index, epoch, math.ceil(len(indices) / self.config.training.batch), len(frozen))
        self.trainer.on_step = watcher.step
        reset_peak_memory(self.device)
        with self.clock("training"):
            result = self.trainer.epoch(indices, epoch)
        watcher.end_epoch(result)
        self.note_epoch(index, epoch, result, len(frozen), changed)

    def correlation(self, indices) -> dict[str, float]:  # type: ignore[no-untyped-def]
        """Ratios of the units not yet frozen: the past is the memory, the gradient the new task's."""
        with self.clock("correlation"):
            memory = self.method.memory
            frozen = set(self.freezing.freezer.frozen)
            self.model.train()
            return correlation_ratios(
                self.model.encoder,
                self.prepare(memory.stored()),
                lambda: self.trainer.sample_loss(indices, self.random["correlation"]),
                self.config.freezing.threshold,
                batches=self.config.freezing.batches,
                units=[unit for unit in self.freezing.freezer.units if unit.name not in frozen],
                keep=[self.model],
            )

    def evaluate(self, index: int) -> dict[str, list[float | None]]:
        if not self.prober:
            return {}
        with self.clock("evaluation"):
            rows = self.prober.rows(self.model.encoder, index)
            self.future += self.prober.future(self.model.encoder, index)
        for probe, row in rows.items():
            self.matrices.setdefault(probe, []).append(row)
        return rows

    def look(self, moment: str) -> None:
        """The gallery of the encoder as it is now, into gallery.json."""
        if self.gallery and self.out:
            with self.clock("evaluation"):
                self.gallery.look(moment, self.model.encoder)
                record.write_json(self.out / "gallery.json", self.gallery.as_dict())

    def prepare(self, images: Tensor) -> Tensor:
        """Stored images as the encoder's input, without augmentation."""
        view = self.recipe[0]
        x = normalise(images, view.mean, view.std, self.view_size)
        return x.contiguous(memory_format=torch.channels_last) if self.config.training.channels_last else x

    def note_epoch(self, index: int, epoch: int, result: EpochResult, frozen: int, newly_frozen: list[str]) -> None:
        line = {
            "task": index + 1,
            "epoch": epoch + 1,
            "loss": {name: value if math.isfinite(value) else str(value) for name, value in result.losses.items()},
            "seconds": result.seconds,
            "views_per_second": result.views / result.seconds,
            "frozen": frozen,
            "newly_frozen": newly_frozen,
            "steps": result.steps,
            "saved_activation_bytes": self.step_cost.kept_bytes,
            "backward_flops": round(self.step_cost.backward_flops_per_view * result.views),
            "peak_memory_bytes": peak_memory_bytes(self.device),
        }
        self.per_epoch.append(line)
        if self.out:
            record.append_line(self.out / "metrics.jsonl", line)
        bad = {name: value for name, value in result.losses.items() if not math.isfinite(value)}
        if bad:
            self.status = "failed"
            self.save_results()
            raise UserError(
                f"the loss became {next(iter(bad.values()))} in task {index + 1}, epoch {epoch + 1}; "
                "try a lower --training.lr or --training.precision fp32"
            )

    def results(self) -> dict[str, Any]:
        return {
            "schema": record.SCHEMA,
            "ptlf_version": ptlf.__version__,
            "commit": record.commit(),
            "status": self.status,
            "config": as_dict(self.config),
            "environment": record.environment(self.device),
            "seed": self.config.seed,
            "class_order": list(self.stream.class_order),
            "tasks": [task.name for task in self.stream.tasks],
            "exams": [exam.name for exam in self.stream.exams],
            "units": [unit.name for unit in self.freezing.freezer.units],
            "probes": self.probe_results(),
            "freezing": self.freezing.log,
            "cost": self.cost(),
        }

    def probe_results(self) -> dict[str, Any]:
        if not self.prober:
            return {}
        found = {}
        for probe, settings in self.prober.settings().items():
            values: dict[str, Any] = {"settings": settings, "untrained": self.untrained[probe]}
            values["untrained_accuracy"] = evaluation.accuracy([self.untrained[probe]])
            values |= matrix_summary(self.matrices.get(probe, []))
            if probe == "knn_task" and self.future:
                values["forward_transfer"] = evaluation.forward_transfer(
                    self.future, self.untrained[probe][1 : 1 + len(self.future)]
                )
            found[probe] = values
        return found

    def cost(self) -> dict[str, Any]:
        epochs, seconds = self.per_epoch, self.clock.seconds
        per_task = []
        for number in range(1, len(self.stream.tasks) + 1):
            mine = [line for line in epochs if line["task"] == number]
            if mine:
                per_task.append(
                    {
                        "task": number,
                        "train_seconds": sum(line["seconds"] for line in mine),
                        "backward_flops": sum(line["backward_flops"] for line in mine),
                        "saved_activation_bytes": mine[-1]["saved_activation_bytes"],
                        "peak_memory_bytes": mine[-1]["peak_memory_bytes"],
                    }
                )
        peaks = [line["peak_memory_bytes"] for line in epochs if line["peak_memory_bytes"] is not None]
        return {
            "train_seconds": seconds.get("training", 0.0),
            "correlation_seconds": seconds.get("correlation", 0.0),
            "rebuild_seconds": seconds.get("rebuild", 0.0),
            "eval_seconds": seconds.get("evaluation", 0.0),
            "backward_flops": sum(line["backward_flops"] for line in epochs),
            "saved_activation_bytes": epochs[-1]["saved_activation_bytes"] if epochs else None,
            "peak_memory_bytes": max(peaks) if peaks else None,
            "per_task": per_task,
            "per_epoch": epochs,
        }

    def save_results(self) -> None:
        if self.out:
            record.write_json(self.out / "results.json", self.results())

    def save_text(self, name: str, text: str) -> None:
        if self.out:
            record.write_whole(self.out / name, text)

    def save_encoder(self) -> None:
        if self.out:
            state = {name: value.contiguous().cpu() for name, value in self.model.encoder.state_dict().items()}
            record.write_whole(self.out / "encoder.safetensors", save(state))

    def make_method(self):  # type: ignore[no-untyped-def]
        config = self.config
        kind = METHODS[config.method.name]
        memory = None
        if kind.needs_memory or POLICIES[config.freezing.policy].needs_ratios:
            (fresh, *_) = recipe(config.views.memory, self.view_size)
            outputs = self.model.objective.feature_dim if kind.needs_outputs else 0
            memory = Memory(config.memory.size, self.stream.size, self.view_size, fresh, outputs)
        with seeded(config.seed, "method"):
            return kind(config.method, self.model, memory, self.random["method"])

    def make_freezing(self) -> ProgressiveFreezing:
        config = self.config
        example = torch.zeros(2, 3, self.view_size, self.view_size, device=self.device)
        freezer = Freezer(
            self.model.encoder,
            self.trainer.optimizer,
            example=example,
            batch_statistics=config.freezing.batch_statistics,
            save_memory=config.freezing.save_memory,
        )
        savings = None
        if POLICIES[config.freezing.policy].needs_savings:
            savings = measure_savings(self.model.encoder, freezer.units, example)
        return ProgressiveFreezing(config.freezing, freezer, config.training.epochs, self.random["policy"], savings)


def matrix_summary(matrix: list[list[float | None]]) -> dict[str, Any]:
    if not matrix:
        return {"matrix": [], "accuracy": None, "forgetting": None}
    return {
        "matrix": matrix,
        "accuracy": evaluation.accuracy(matrix),
        "forgetting": evaluation.forgetting(matrix),
        "forgetting_just_learned": evaluation.forgetting_just_learned(matrix),
        "backward_transfer": evaluation.backward_transfer(matrix),
        "accuracy_by_task": [evaluation.accuracy(matrix[:rows]) for rows in range(1, len(matrix) + 1)],
        "forgetting_by_task": [evaluation.forgetting(matrix[:rows]) for rows in range(1, len(matrix) + 1)],
    }


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be auto, cpu or cuda, not {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but torch sees no GPU here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {name!r}, but there are {torch.cuda.device_count()} GPUs here, counted from cuda:0")
    return device


def make_stream(config: Config) -> Stream:
    if config.stream.name not in STREAMS:
        raise unknown("stream", config.stream.name, STREAMS)
    stream = open_stream(config.stream, STREAMS, data_root(config.data_root), config.seed)
    return stream.joint() if METHODS[config.method.name].joint else stream


def make_prober(
    stream: Stream, config: Config, prepare: Callable[[Tensor], Tensor], device: torch.device
) -> Prober | None:
    if not config.evaluation.enabled or not stream.exams:
        return None
    return Prober(stream, config.evaluation, prepare, device)


def make_gallery(
    stream: Stream, config: Config, prepare: Callable[[Tensor], Tensor], device: torch.device
) -> Gallery | None:
    if not config.evaluation.enabled or not config.evaluation.gallery:
        return None
    seed = derived_seed(config.seed, "gallery")
    return Gallery(stream, prepare, device, batch=config.evaluation.batch, seed=seed)


def make_encoder(name: str, seed: int) -> nn.Module:
    """An encoder of ours by name, or anybody's as "package.module:function". Its weights follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "encoder"))
        if name in ENCODERS:
            return ENCODERS[name]()
        if ":" not in name:
            raise unknown("encoder", name, ENCODERS)
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise UserError(f"encoder.name is {name!r}, which cannot be imported: {error}") from None


def make_model(config: Config, stream: Stream, size: int, encoder: nn.Module | None) -> Model:
    encoder = encoder or make_encoder(config.encoder.name, config.seed)
    objective = OBJECTIVES[config.objective.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "objective"))
        heads = objective(config.objective, encoder, feature_dim(encoder, size), len(stream.data.names))
    return Model(encoder, heads, {"fp32": torch.float32, "bf16": torch.bfloat16}[config.training.precision])


def check_combination(config: Config) -> None:
    if config.freezing.policy not in POLICIES:
        raise unknown("freezing policy", config.freezing.policy, POLICIES)
    if config.freezing.initial > config.freezing.final:
        raise UserError(
            f"freezing.initial is {config.freezing.initial}, more than freezing.final, {config.freezing.final}; "
            "what is frozen stays frozen, so the share can only rise"
        )
    if OBJECTIVES[config.objective.name].needs_labels:
        if config.method.name == "lump":
            raise UserError(
                "objective 'supervised' cannot be mixed by method 'lump': its labels are not mixed; use finetune"
            )
        if config.stream.labelled is not None:
            raise UserError(
                "objective 'supervised' needs labels, and a folder per task has none; choose another objective"
            )


def claim_folder(out: Path | None) -> None:
    """Make the output folder; refuse one that already holds a run."""
    if out is None:
        return
    if any((out / name).exists() for name in ("results.json", "config.yaml", "metrics.jsonl")):
        raise UserError(f"{out} already holds a run; choose another --out, or remove that folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise record.write_error(out, error) from error


def load_encoder(folder: Path, config: Config, encoder: nn.Module | None = None) -> nn.Module:
    """The trained encoder of a finished run."""
    path = folder / "encoder.safetensors"
    if not path.exists():
        raise UserError(f"{folder} holds no encoder.safetensors; the run there has not finished")
    encoder = encoder or make_encoder(config.encoder.name, config.seed)
    encoder.load_state_dict(load_file(path))
    return encoder


def evaluate_run(folder: Path, config: Config) -> tuple[dict[str, Any], list[str]]:
    """The probes on a finished run's encoder, with the settings in `config`; and the exams' names."""
    encoder = load_encoder(folder, config)
    run = Run(config, encoder=encoder)
    if run.prober is None:
        raise UserError(f"the run in {folder} has no labelled test images to evaluate on")
    rows = run.prober.rows(run.model.encoder, len(run.stream.tasks))
    settings = run.prober.settings()
    probes = {probe: {"settings": settings[probe], **matrix_summary([row])} for probe, row in rows.items()}
    return probes, [exam.name for exam in run.stream.exams]


def finished(folder: Path, config: Config) -> bool:
    """Whether this very run already lies finished in the folder; another run there is refused."""
    if not (folder / "results.json").exists():
        return False
    results = record.read_results(folder)
    if results["config"] != as_dict(config):
        raise UserError(f"{folder} holds a run with other settings; choose another --out")
    return results["status"] == "finished"
