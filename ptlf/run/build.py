"""What a run is made of, built from its settings and checked before anything is trained or written."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import Refusals, UserError, short_repr, warn
from ptlf.core.memory import check_fits
from ptlf.core.randomness import Randomness, derived_seed, seeded
from ptlf.core.settings import as_dict
from ptlf.encoders import ENCODERS, EncoderConfig, as_encoder, brings_weights, feature_dim, set_normalisation
from ptlf.encoders.encoder import SizedConfig
from ptlf.encoders.weights import Weights, check_values, load_weights
from ptlf.evaluation import Gallery, Prober
from ptlf.freezing import Freezer, FreezeSchedule, ProgressiveFreezing
from ptlf.freezing.cost import kept_bytes, measure_savings
from ptlf.freezing.recording import unchanged
from ptlf.freezing.units import trained_units
from ptlf.methods import METHODS, Memory, Method
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import POLICIES, Config
from ptlf.run.fitting import expected_sizes
from ptlf.run.folder import START, restore_encoder
from ptlf.run.recipes import conflict
from ptlf.run.results import Json, read_results
from ptlf.stream import STREAMS, Dataset, Stream, open_stream
from ptlf.stream.arrivals import arrivals, with_arrivals, without_tasks
from ptlf.stream.decode import Fit
from ptlf.stream.images import find_images, open_images
from ptlf.stream.loading import image_sources
from ptlf.stream.pack import data_root
from ptlf.stream.packing import OnError, labelled_dataset, labelled_set, sample_images
from ptlf.stream.task import single_task_stream
from ptlf.training.arithmetic import choose_arithmetic
from ptlf.training.distributed import broadcast_and_sync_bn
from ptlf.training.engine import choose_engine, make_accelerator
from ptlf.training.optimizers import OPTIMIZERS
from ptlf.training.trainer import Trainer, TrainingConfig, check_batch
from ptlf.views import View, draw, make_views, named_views, normalise

BATCH = 256  # images per forward of those that fill the memory


class Components:
    """Where several processes share the run, every one of them builds the same; the first one writes."""

    def __init__(
        self, config: Config, folder: Path | None = None, encoder: nn.Module | None = None, stream: Stream | None = None
    ) -> None:
        """`encoder` and `stream` take the place of those the configuration names."""
        self.config, self.folder = config, folder
        self.out = folder if processes.is_first() else None  # the folder, in the process that writes
        self.encoder_given = encoder is not None  # as a module, from Python
        code = ENCODERS.names_code(config.encoder.name)
        self.own_encoder = self.encoder_given or code or brings_weights(config.encoder)  # may come with weights
        self.stream = stream = make_checked_stream(config, folder, stream)
        self.device = device = processes.local_device(choose_device(config.device))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, graphs and Triton kernels use the current device
        self.random, sources = Randomness(config.seed), image_sources(device, config.stream.resident)
        self.view_size = size = config.views.size or stream.size
        if config.memory.images and not (folder and (folder / "config.yaml").exists()):
            open_images(find_images(config.memory.images, data_root(config.data_root)))  # a resumed run has them

        encoder, self.weights = starting_encoder(config, encoder, folder, size)  # the weights that it begins with
        training, batch = config.training, processes.share(config.training.batch)
        how = training.precision, training.channels_last, device, encoder, size, batch
        arithmetic = choose_arithmetic(*how, earlier=environment_before(folder))
        self.model = model = make_model(config, stream, size, device, encoder, arithmetic.dtype)
        self.view_specs = specs = views_for(model.encoder, config.views.name, size)
        check_memory(config, model.encoder, len(specs), size, device)
        if arithmetic.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.method = method = make_method(config, stream, model, size, self.random["method"]).to(device)
        broadcast_and_sync_bn([model, method], config.distributed)
        optimizer, images = make_optimizer(config.training, model, method), stream.tasks[0].images
        self.trainer = Trainer(
            model, method, optimizer, sources, images, specs, size, training, self.random, device, arithmetic
        )
        self.freezing = make_freezing(config, self.trainer, self.random["policy"])

        if not config.checkpoint.keep_images:
            check_forgets(config, method, stream)
        tests = config.evaluation
        self.prober: Prober | None = None  # on the stream's test images
        self.reference: Prober | None = None  # on `evaluation.reference`, against a bank of its own
        self.gallery: Gallery | None = None
        if not tests.enabled:
            return
        if stream.untested:
            names = short_repr(list(stream.untested))
            warn(f"there are no test images of {names}: these tasks are learnt, but not tested")
        if stream.eval_splits:
            self.prober = Prober(stream, tests, config.probes, self.prepare, device, sources)
        if tests.reference is not None:
            known = labelled_images(config, tests.reference, stream.size, stream.fit)
            self.reference = Prober(single_task_stream(known, "reference"), tests, config.probes, self.prepare, device)
        if tests.gallery and self.out:
            seed = derived_seed(config.seed, "gallery")
            self.gallery = Gallery(stream, self.prepare, device, config=tests, seed=seed)

    def prepare(self, images: Tensor) -> Tensor:
        """Stored images (B, H, W, 3) uint8 as the encoder's input, without augmentation."""
        x = normalise(images, self.view_specs[0].mean, self.view_specs[0].std, self.view_size)
        return x.contiguous(memory_format=torch.channels_last) if self.trainer.arithmetic.channels_last else x


def check_forgets(config: Config, method: Method[Any], stream: Stream) -> None:
    """Refuse what would keep images, or need them, after their task."""
    labelled = any(s.since >= len(stream.tasks) - stream.arrived and not s.always for s in stream.eval_splits)
    hint = (
        "give --method anchor --freezing.policy none --evaluation.gallery false, and folders without train/ and test/"
    )
    ways = {"the memory": method.memory is not None, "the gallery": config.evaluation.gallery, "tests": labelled}
    if needed := " and ".join(way for way, is_there in ways.items() if is_there):
        raise UserError(f"checkpoint.keep_images is false, but images are kept or needed for {needed}; {hint}")


def starting_encoder(
    config: Config, encoder: nn.Module | None, folder: Path | None, size: int
) -> tuple[nn.Module, Weights | None]:
    """The encoder, with the weights of `encoder.weights` where that is set. `size`: of the views."""
    given, weights = config.encoder.weights, None
    if given is not None and METHODS.find(config.method.name).adapt_encoder is not Method.adapt_encoder:
        why = f"method {config.method.name!r} builds an encoder of its own and cannot start from encoder.weights"
        raise UserError(f"{why}; choose another method")
    encoder = make_encoder(config.encoder, config.seed, size) if encoder is None else as_encoder(encoder)
    if given is None:
        if brings_weights(config.encoder):
            there = {name: value for name, value in encoder.state_dict().items() if isinstance(value, Tensor)}
            check_values(f"encoder {config.encoder.name!r}", there, encoder, "take it from its source again")
        return encoder, None
    if processes.is_first():  # the others get the weights from it
        if folder and (folder / START).is_file():
            restore_encoder(folder, encoder, START)
            with safe_open(folder / START, "pt") as file:
                weights = Weights(**json.loads(file.metadata()["weights"]))
        else:
            weights = load_weights(encoder, Path(given).expanduser())
    return encoder, processes.broadcast_object(weights)


def environment_before(folder: Path | None) -> Json | None:
    """Of the run in this folder, if there is one."""
    with contextlib.suppress(UserError, OSError):
        return read_results(folder)["environment"] if folder and (folder / "results.json").is_file() else None
    return None


def labelled_images(config: Config, where: str, size: int, fit: Fit, on_error: OnError | None = None) -> Dataset:
    """A labelled folder or packed set to test on."""
    path = find_images(where, data_root(config.data_root))
    return labelled_dataset(path, size, config.evaluation.reference_test, fit, on_error)


def fill_memory(parts: Components) -> dict[str, Any]:
    """Fill the memory as if the images of `memory.images` had been a task before the first: a sample of them, each with
    a second view, and with the encoder's vector of its first view if the method needs that. Returns what was done."""
    config, memory, given = parts.config, parts.method.memory, str(parts.config.memory.images)
    assert memory is not None
    device, path = memory.images.device, find_images(given, data_root(config.data_root))
    draws = np.random.default_rng(derived_seed(config.seed, "memory images"))
    count = open_images(path)["train"].count
    seen = count * config.training.epochs
    pixels, _ = sample_images(path, memory.images.shape[1], min(seen, memory.size), draws, parts.stream.fit)
    images = torch.from_numpy(pixels).to(device)
    uniforms = draw(len(images), parts.random["memory images"], len(parts.view_specs))
    views: list[Tensor] = []
    outputs: list[Tensor] = []
    encoder = parts.model.encoder
    with torch.no_grad(), unchanged(encoder):
        encoder.train()  # as in the step whose vectors DER stores
        for part, chances in zip(images.split(BATCH), uniforms.split(BATCH, dim=1), strict=True):
            made = make_views(part, chances.to(device), parts.view_specs, parts.view_size)
            views.append(made[-1])
            if parts.method.needs_outputs:
                outputs.append(encoder(made[0]).float())
    memory.fill(images, torch.cat(views), torch.cat(outputs) if outputs else None, seen)
    return {"path": given, "images": count, "taken": len(images)}


def choose_device(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise UserError(f"device must be auto, cpu, cuda or cuda:NUMBER, not {short_repr(name)}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(
            f"device is {name!r}, but torch sees {count or 'no'} GPU{'s' * (count > 1)} here; use --device cpu"
        )
    return device


def make_stream(config: Config, folder: Path | None = None) -> Stream:
    """The stream that the configuration names, and the tasks that have arrived in the run's folder."""
    entry, root = STREAMS.find(config.stream.name), data_root(config.data_root)
    packs = arrivals(folder) if folder else []
    if entry.arriving:
        return with_arrivals(without_tasks(config.stream, root, packs), packs)
    stream = with_arrivals(open_stream(config.stream, entry, root, config.seed, labelled_set), packs)
    return stream.joint() if METHODS.find(config.method.name).joint and not packs else stream


def make_method(config: Config, stream: Stream, model: Model, view_size: int, generator: torch.Generator) -> Method:
    kind, memory = METHODS.find(config.method.name), None
    if kind.needs_memory or POLICIES.find(config.freezing.policy.name).needs_ratios:
        (fresh, *_) = views_for(model.encoder, config.views.memory, view_size)
        outputs = model.objective.feature_dim if kind.needs_outputs else 0
        memory = Memory(config.memory.size, stream.size, view_size, fresh, outputs, model.accelerator)
    with seeded(config.seed, "method"):
        method = kind(config.method, model, memory, generator)
    model.accelerator.prepare(method)
    return method


def make_optimizer(config: TrainingConfig, model: Model, method: Method) -> torch.optim.Optimizer:
    """Of all that trains; where the heads have a rate of their own, they are its second group."""
    encoder = [p for p in model.encoder.parameters() if p.requires_grad]
    heads = [p for module in (model.objective, method) for p in module.parameters() if p.requires_grad]
    rate, device = config.lr * config.batch / 256, next(model.parameters()).device

    def value(rate: float) -> float | Tensor:
        return torch.tensor(rate, device=device) if device.type == "cuda" else rate  # a captured step reads it there

    make = partial(OPTIMIZERS.find(config.optimizer.name).make, config.optimizer)
    if config.head_lr is None:
        return make([*encoder, *heads], value(rate))
    scale = config.head_lr / config.lr
    groups: list[dict[str, Any]] = [{"params": encoder}, {"params": heads, "lr": value(rate * scale), "scale": scale}]
    return make(groups, value(rate))


def make_freezing(config: Config, trainer: Trainer, generator: torch.Generator) -> ProgressiveFreezing:
    encoder, settings = trainer.model.encoder, config.freezing
    policy = POLICIES.find(settings.policy.name)(settings.policy)
    example = torch.zeros(2, 3, trainer.view_size, trainer.view_size, device=trainer.device)
    how = {"batch_statistics": settings.batch_statistics, "save_memory": settings.save_memory}
    try:
        units = trained_units(encoder, example)
        freezer = Freezer(encoder, trainer.optimizer, units=units, example=example, **how)
    except ValueError as error:
        if policy.freezes:
            raise UserError(f"encoder {config.encoder.name!r} cannot freeze: {error}") from None
        freezer = Freezer(encoder, trainer.optimizer, units=[], save_memory=False)
    if policy.freezes and not freezer.units:
        lacking = f"encoder {config.encoder.name!r} has no convolution or linear layer that trains and could freeze"
        raise UserError(f"{lacking}; use --freezing.policy none")
    savings = None
    if policy.needs_savings:
        with trainer.model.autocast(trainer.device):
            savings = processes.broadcast_object(measure_savings(encoder, freezer.units, example))
    schedule = FreezeSchedule(settings.initial, settings.final, config.training.epochs, settings.shape)
    if policy.freezes and schedule.most(len(freezer.units)) == 0:
        share = f"freezing.final {settings.final} of {len(freezer.units)} units"
        warn(f"{share} is less than one: nothing will freeze")
    also = {"update": settings.update, "thaw": settings.thaw}
    return ProgressiveFreezing(freezer, policy, schedule, generator=generator, savings=savings, **also)


def make_encoder(config: EncoderConfig, seed: int, size: int | None = None) -> nn.Module:
    """Its weights follow from the seed. `size`, the side of the images, is noted in settings that leave it open."""
    entry = ENCODERS.find(config.name)
    if isinstance(config, SizedConfig) and config.image_size is None:
        config.image_size = size
    with seeded(seed, "encoder"):
        try:
            made = entry.make(config)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # code of the user's may leave the process
            raise UserError(f"encoder {config.name!r} cannot be made: {error or type(error).__name__}") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"encoder {config.name!r} gives {type(made).__name__}, not a torch module")
    return as_encoder(made)


def make_model(
    config: Config, stream: Stream, size: int, device: torch.device, encoder: nn.Module, dtype: torch.dtype
) -> Model:
    set_normalisation(encoder, config.encoder)
    with seeded(config.seed, "adapted encoder"):
        encoder = METHODS.find(config.method.name).adapt_encoder(config.method, encoder, len(stream.tasks))
    objective = OBJECTIVES.find(config.objective.name)
    with seeded(config.seed, "objective"):
        try:
            heads = objective(config.objective, encoder, feature_dim(encoder, size), len(stream.data.names))
        except UserError as error:
            raise UserError(f"encoder {config.encoder.name!r} cannot be trained: {error}") from None
        except (ValueError, RuntimeError, StopIteration) as error:
            raise UserError(f"encoder {config.encoder.name!r} does not take images of {size} px: {error}") from error
    kind = choose_engine(config.training.engine, device)
    accelerator = make_accelerator(kind, processes.share(config.training.batch), device, dtype)
    accelerator.prepare(heads)
    return Model(encoder, heads, dtype, accelerator).to(device)


def check_memory(config: Config, encoder: nn.Module, views: int, view_size: int, device: torch.device) -> None:
    """Refuse a step that cannot fit in the machine's memory: the system might kill the process without a word. A GPU
    says so itself. What the encoder keeps for backward is found by a forward of tensors without values."""
    if device.type != "cpu":
        return
    rows = processes.share(config.training.batch) * views
    images = torch.empty(rows, 3, view_size, view_size, device="meta")
    needed = 2 * images.nbytes
    with contextlib.suppress(Exception):  # an encoder that cannot be copied, or be passed such images, is not estimated
        light = copy.deepcopy(encoder).to("meta")
        needed += kept_bytes(lambda: light(images), exclude=light.parameters())
    step = f"a step of {config.training.batch} images (training.batch) with views of {view_size} px"
    check_fits(step, needed, hint="choose a smaller --training.batch or --views.size")


def views_for(encoder: nn.Module, name: str, size: int) -> tuple[View, ...]:
    """The views of that name, normalised as the encoder says, if it does."""
    views = named_views(name, size)
    if (own := getattr(encoder, "normalisation", None)) is None:
        return views
    mean, std = own
    return tuple(replace(view, mean=mean, std=std) for view in views)


def check_grows(config: Config) -> None:
    """Refuse what cannot learn a task that arrives later."""
    why = None
    if METHODS.find(config.method.name).joint:
        why = f"method {config.method.name!r} trains on all tasks at once"
    elif OBJECTIVES.find(config.objective.name).needs_labels:
        why = f"objective {config.objective.name!r} needs the classes of the whole stream from the start"
    elif not config.checkpoint.enabled:
        why = "checkpoint.enabled is false, and without a checkpoint a run cannot continue"
    if why:
        raise UserError(f"{why}: it cannot learn tasks that arrive later; choose another")


def make_checked_stream(config: Config, folder: Path | None, given: Stream | None = None) -> Stream:
    """The stream. Settings are checked against it and each other; invalid ones are reported together, at once."""
    refused, stream = Refusals(), given
    with refused:
        choose_device(config.device)
    with refused:
        stream = stream or make_stream(config, folder)
    with refused:
        named_views(config.views.name, config.views.size or (stream.size if stream else 32))
    with refused:
        refused.problems += contradictions(config, stream)
        if stream and stream.arrived:
            check_grows(config)
    with refused:
        sizes = [len(task.train) for task in stream.tasks] if stream else expected_sizes(as_dict(config))
        check_batch(config.training, sizes, stream.arrived if stream else 0)
    refused.end()
    assert stream is not None
    return stream


def contradictions(config: Config, stream: Stream | None) -> Iterator[str]:
    """Settings that do not go together. stream: None where it cannot be made."""
    objective, method = OBJECTIVES.find(config.objective.name), METHODS.find(config.method.name)
    initial, final, training = config.freezing.initial, config.freezing.final, config.training
    if initial > final:
        shares = f"freezing.initial is {initial}, more than freezing.final, {final}"
        yield f"{shares}; what is frozen stays frozen, so the share can only rise"
    if POLICIES.find(config.freezing.policy.name).freezes and not method.freezable:
        yield f"method {config.method.name!r} chooses itself what trains; use --freezing.policy none"
    if why := conflict(objective, method):
        yield f"objective {config.objective.name!r} cannot be trained with method {config.method.name!r}: {why}"
    if stream and objective.needs_labels and stream.data.folders == "tasks":
        lacking = f"objective {config.objective.name!r} needs labels, and a folder per task has none"
        yield f"{lacking}; choose another objective"
    if training.warmup >= training.epochs:
        yield f"training.warmup is {training.warmup} epochs, but a task has only {training.epochs}; lower it"
