"""The pieces of a run, made from its configuration and checked against each other."""

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import Refusals, UserError, short_repr, warn
from ptlf.core.memory import check_fits
from ptlf.core.randomness import seeded
from ptlf.core.settings import as_dict
from ptlf.encoders import ENCODERS, EncoderConfig, as_encoder, feature_dim, set_normalisation
from ptlf.encoders.encoder import SizedConfig
from ptlf.freezing import Freezer, FreezeSchedule, ProgressiveFreezing
from ptlf.freezing.cost import kept_bytes, measure_savings
from ptlf.freezing.units import trained_units
from ptlf.methods import METHODS, Memory, Method
from ptlf.model import Model
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import POLICIES, Config
from ptlf.run.fitting import expected_sizes
from ptlf.run.recipes import conflict
from ptlf.stream import STREAMS, Stream, open_stream
from ptlf.stream.arrivals import arrivals, with_arrivals, without_tasks
from ptlf.stream.pack import data_root
from ptlf.training.engine import choose_dtype, choose_engine, make_accelerator
from ptlf.training.optimizers import OPTIMIZERS
from ptlf.training.trainer import Trainer, TrainingConfig, check_batch, check_warmup
from ptlf.views import View, named_views


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
    stream = with_arrivals(open_stream(config.stream, entry, root, config.seed), packs)
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
        low = trainer.model.dtype is torch.bfloat16
        with torch.autocast(trainer.device.type, dtype=torch.bfloat16, enabled=low):
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


def make_model(config: Config, stream: Stream, size: int, device: torch.device, encoder: nn.Module | None) -> Model:
    encoder = make_encoder(config.encoder, config.seed, size) if encoder is None else as_encoder(encoder)
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
    accelerator = make_accelerator(kind, processes.share(config.training.batch), device)
    accelerator.prepare(heads)
    return Model(encoder, heads, choose_dtype(config.training.precision, device), accelerator).to(device)


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
    """The stream, with the settings checked against it and each other. Invalid settings are reported together, before
    anything is made that takes time."""
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
        check_warmup(config.training)
    with refused:
        sizes = [len(task.train) for task in stream.tasks] if stream else expected_sizes(as_dict(config))
        check_batch(config.training, sizes, stream.arrived if stream else 0)
    refused.end()
    assert stream is not None
    return stream


def contradictions(config: Config, stream: Stream | None) -> Iterator[str]:
    """Settings that do not go together. stream: None where it cannot be made."""
    objective, method = OBJECTIVES.find(config.objective.name), METHODS.find(config.method.name)
    initial, final = config.freezing.initial, config.freezing.final
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
