"""The pieces of a run, made from its configuration and checked against each other."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError, unknown
from ptlf.core.randomness import derived_seed, seeded
from ptlf.encoders import ENCODERS, feature_dim
from ptlf.evaluation import Gallery, Prober
from ptlf.freezing import POLICIES, Freezer, ProgressiveFreezing
from ptlf.freezing.policies import measure_savings
from ptlf.freezing.units import trained_units
from ptlf.methods import METHODS, Memory, Method
from ptlf.model import Accelerator, Model
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import Config
from ptlf.stream import STREAMS, Stream, open_stream
from ptlf.stream.loading import ImageSource
from ptlf.stream.pack import data_root
from ptlf.training.compiled import CompiledParts
from ptlf.training.engine import choose_engine
from ptlf.training.trainer import Trainer
from ptlf.views import named_views


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
    stream: Stream, config: Config, prepare: Callable[[Tensor], Tensor], source: ImageSource
) -> Prober | None:
    """`source` holds the stream's training images."""
    if not config.evaluation.enabled or not stream.eval_splits:
        return None
    return Prober(stream, config.evaluation, prepare, source.device, source)


def make_gallery(
    stream: Stream, config: Config, prepare: Callable[[Tensor], Tensor], device: torch.device
) -> Gallery | None:
    if not config.evaluation.enabled or not config.evaluation.gallery:
        return None
    seed = derived_seed(config.seed, "gallery")
    return Gallery(stream, prepare, device, batch=config.evaluation.batch, seed=seed)


def make_method(config: Config, stream: Stream, model: Model, view_size: int, generator: torch.Generator) -> Method:
    kind = METHODS[config.method.name]
    memory = None
    if kind.needs_memory or POLICIES[config.freezing.policy].needs_ratios:
        (fresh, *_) = named_views(config.views.memory, view_size)
        outputs = model.objective.feature_dim if kind.needs_outputs else 0
        memory = Memory(config.memory.size, stream.size, view_size, fresh, outputs, model.accelerator)
    with seeded(config.seed, "method"):
        return kind(config.method, model, memory, generator)


def make_freezing(config: Config, trainer: Trainer, generator: torch.Generator) -> ProgressiveFreezing:
    encoder = trainer.model.encoder
    example = torch.zeros(2, 3, trainer.view_size, trainer.view_size, device=trainer.device)
    try:
        freezer = Freezer(
            encoder,
            trainer.optimizer,
            units=trained_units(encoder, example),
            example=example,
            batch_statistics=config.freezing.batch_statistics,
            save_memory=config.freezing.save_memory,
        )
    except ValueError as error:
        if config.freezing.policy != "none":
            raise UserError(f"encoder {config.encoder.name!r} cannot freeze: {error}") from None
        freezer = Freezer(encoder, trainer.optimizer, units=[], save_memory=False)
    if config.freezing.policy != "none" and not freezer.units:
        raise UserError(
            f"encoder {config.encoder.name!r} has no convolution or linear layer that trains and could freeze; "
            "use --freezing.policy none"
        )
    savings = None
    if POLICIES[config.freezing.policy].needs_savings:
        if config.freezing.savings == "seconds":  # which depend on the step's size, type and layout
            layout = torch.channels_last if trainer.channels_last else torch.contiguous_format
            rows = config.training.batch * len(trainer.view_specs)
            example = example[:1].expand(rows, -1, -1, -1).contiguous(memory_format=layout)
        low = trainer.model.dtype is torch.bfloat16
        with torch.autocast(trainer.device.type, dtype=torch.bfloat16, enabled=low):
            savings = measure_savings(encoder, freezer.units, example, by=config.freezing.savings)
        savings = processes.broadcast_object(savings)  # each process would time others, and choose others
    freezing = ProgressiveFreezing(config.freezing, freezer, config.training.epochs, generator, savings)
    if config.freezing.policy != "none" and freezing.schedule.most(len(freezer.units)) == 0:
        processes.warn(
            f"ptlf: warning: freezing.final {config.freezing.final} of {len(freezer.units)} units is less than one: "
            "nothing will freeze"
        )
    return freezing


def make_encoder(name: str, seed: int) -> nn.Module:
    """An encoder of ours by name, or anybody's as "package.module:function". Its weights follow from the seed."""
    with seeded(seed, "encoder"):
        if name in ENCODERS:
            return ENCODERS[name]()
        if ":" not in name:
            raise unknown("encoder", name, ENCODERS)
        module, _, function = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it
        try:
            made = getattr(importlib.import_module(module), function)()
        except Exception as error:
            raise UserError(f"encoder.name is {name!r}, which cannot be imported and called: {error}") from None
        if not isinstance(made, nn.Module):
            raise UserError(f"encoder.name is {name!r}, which gives {type(made).__name__}, not a torch module")
        return made


def make_model(config: Config, stream: Stream, size: int, device: torch.device, encoder: nn.Module | None) -> Model:
    encoder = encoder or make_encoder(config.encoder.name, config.seed)
    with seeded(config.seed, "adapted encoder"):
        encoder = METHODS[config.method.name].adapt_encoder(config.method, encoder, len(stream.tasks))
    objective = OBJECTIVES[config.objective.name]
    with seeded(config.seed, "objective"):
        try:
            heads = objective(config.objective, encoder, feature_dim(encoder, size), len(stream.data.names))
        except (ValueError, RuntimeError, StopIteration) as error:
            raise UserError(f"encoder {config.encoder.name!r} does not take images of {size} px: {error}") from error
    wanted = config.training.precision
    half = on_gpu(None if wanted == "auto" else wanted == "bf16", device)
    fast = choose_engine(config.training.engine, device) != "eager"
    accelerator = CompiledParts(config.training.batch) if fast else Accelerator()
    return Model(encoder, heads, torch.bfloat16 if half else torch.float32, accelerator).to(device)


def on_gpu(setting: bool | None, device: torch.device) -> bool:
    """A setting that, left open, is on for a GPU and off elsewhere."""
    return device.type == "cuda" if setting is None else setting


def check_combination(config: Config, stream: Stream) -> None:
    if config.freezing.policy not in POLICIES:
        raise unknown("freezing policy", config.freezing.policy, POLICIES)
    if config.freezing.initial > config.freezing.final:
        raise UserError(
            f"freezing.initial is {config.freezing.initial}, more than freezing.final, {config.freezing.final}; "
            "what is frozen stays frozen, so the share can only rise"
        )
    if config.freezing.policy != "none" and not METHODS[config.method.name].freezable:
        raise UserError(f"method {config.method.name!r} freezes whole columns itself; use --freezing.policy none")
    if OBJECTIVES[config.objective.name].needs_labels:
        if config.method.name == "lump":
            raise UserError(
                "objective 'supervised' cannot be mixed by method 'lump': its labels are not mixed; use finetune"
            )
        if stream.data.folders == "tasks":
            raise UserError(
                "objective 'supervised' needs labels, and a folder per task has none; choose another objective"
            )
