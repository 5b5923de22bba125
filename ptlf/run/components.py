"""What a run is made of, built from its settings and checked before anything is trained or written."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import warn
from ptlf.core.randomness import Randomness, derived_seed
from ptlf.core.words import short_repr
from ptlf.encoders import ENCODERS, Weights
from ptlf.evaluation import Gallery, Prober
from ptlf.freezing import ProgressiveFreezing
from ptlf.freezing.recording import unchanged
from ptlf.methods import Memory, Method
from ptlf.model import Model
from ptlf.run import build
from ptlf.run.config import Config
from ptlf.run.start import find_given, make_reference, starting_encoder
from ptlf.stream import Stream
from ptlf.stream.images import open_images
from ptlf.stream.loading import Sources
from ptlf.stream.packing import sample_images
from ptlf.training.distributed import broadcast_and_sync_bn
from ptlf.training.trainer import Trainer
from ptlf.views import View, draw, make_views, normalise

BATCH = 256  # images per forward of those that fill the memory


@dataclass(frozen=True)
class Components:
    """Where several processes share the run, every one of them builds the same; the first one writes."""

    config: Config
    folder: Path | None  # of the run
    out: Path | None  # the same in the process that writes
    encoder_given: bool  # as a module, from Python
    own_encoder: bool  # code of the user's, which may come with weights
    stream: Stream
    device: torch.device
    random: Randomness
    view_specs: tuple[View, ...]
    view_size: int
    prepare: Callable[[Tensor], Tensor]  # stored images as the encoder's input
    weights: Weights | None  # that the encoder began with
    model: Model
    method: Method
    trainer: Trainer
    freezing: ProgressiveFreezing
    prober: Prober | None  # on the stream's test images
    reference: Prober | None  # on `evaluation.reference`
    gallery: Gallery | None


def build_components(
    config: Config, folder: Path | None = None, encoder: nn.Module | None = None, stream: Stream | None = None
) -> Components:
    """`encoder` and `stream` take the place of those the configuration names."""
    encoder_given = encoder is not None
    out = folder if processes.is_first() else None
    stream = build.make_checked_stream(config, folder, stream)
    device = processes.local_device(build.choose_device(config.device))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and Triton kernels use the current device
    random, sources = Randomness(config.seed), Sources(device, config.stream.resident)
    view_size = config.views.size or stream.size
    if config.memory.images and not (folder and (folder / "config.yaml").exists()):
        open_images(find_given(config, config.memory.images))  # a resumed run has them in its memory

    encoder, weights = starting_encoder(config, encoder, folder, view_size)
    model = build.make_model(config, stream, view_size, device, encoder)
    view_specs = build.views_for(model.encoder, config.views.name, view_size)
    build.check_memory(config, model.encoder, len(view_specs), view_size, device)
    channels_last = config.training.channels_last
    if channels_last is None:
        channels_last = device.type == "cuda"
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method = build.make_method(config, stream, model, view_size, random["method"]).to(device)
    broadcast_and_sync_bn([model, method], config.distributed)
    parameters = [*model.parameters(), *method.parameters()]
    optimizer = build.make_optimizer(config.training, [p for p in parameters if p.requires_grad])
    trainer = Trainer(
        model,
        method,
        optimizer,
        sources,
        stream.tasks[0].images,
        view_specs,
        view_size,
        config.training,
        random,
        device,
        channels_last,
    )
    freezing = build.make_freezing(config, trainer, random["policy"])

    tests, prober, gallery = config.evaluation, None, None
    prepare = partial(prepare_images, view=view_specs[0], size=view_size, channels_last=channels_last)
    if tests.enabled and stream.untested:
        names = short_repr(list(stream.untested))
        warn(f"there are no test images of {names}: these tasks are learnt, but not tested")
    if tests.enabled and stream.eval_splits:
        prober = Prober(stream, tests, config.probes, prepare, device, sources)
    if tests.enabled and tests.gallery and out:
        gallery = Gallery(stream, prepare, device, config=tests, seed=derived_seed(config.seed, "gallery"))
    return Components(
        config=config,
        folder=folder,
        out=out,
        encoder_given=encoder_given,
        own_encoder=encoder_given or ENCODERS.names_code(config.encoder.name) or config.encoder.name.startswith("hf:"),
        stream=stream,
        device=device,
        random=random,
        view_specs=view_specs,
        view_size=view_size,
        prepare=prepare,
        weights=weights,
        model=model,
        method=method,
        trainer=trainer,
        freezing=freezing,
        prober=prober,
        reference=make_reference(config, stream, prepare, device),
        gallery=gallery,
    )


def prepare_images(images: Tensor, view: View, size: int, channels_last: bool) -> Tensor:
    """Stored images (B, H, W, 3) uint8 as the encoder's input, without augmentation."""
    x = normalise(images, view.mean, view.std, size)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def fill_memory(components: Components, memory: Memory) -> dict[str, Any]:
    """Fill the memory as if the images of `memory.images` had been a task before the first: a sample of them, each with
    a second view, and with the encoder's vector of its first view if the method needs that. Returns what was done."""
    parts, config = components, components.config
    device, path = memory.images.device, find_given(config, str(config.memory.images))
    draws = np.random.default_rng(derived_seed(config.seed, "memory images"))
    count = open_images(path)["train"].count
    seen = count * config.training.epochs
    pixels, _ = sample_images(path, memory.images.shape[1], min(seen, memory.size), draws, parts.stream.fit)
    images = torch.from_numpy(pixels).to(device)
    uniforms = draw(len(images), parts.random["memory images"], len(parts.view_specs))
    views: list[Tensor] = []
    outputs: list[Tensor] = []
    encoder, stores_outputs = parts.model.encoder, parts.method.needs_outputs
    with torch.no_grad(), unchanged(encoder):
        encoder.train()  # as in the step whose vectors DER stores
        for part, chances in zip(images.split(BATCH), uniforms.split(BATCH, dim=1), strict=True):
            first, *_, last = made = make_views(part, chances.to(device), parts.view_specs, parts.view_size)
            views.append(last if len(made) > 1 else first)
            if stores_outputs:
                outputs.append(encoder(first).float())
    memory.fill(images, torch.cat(views), torch.cat(outputs) if stores_outputs else None, seen)
    return {"path": str(config.memory.images), "images": count, "taken": len(images)}
