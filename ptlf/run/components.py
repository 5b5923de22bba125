"""What a run is made of, built from its settings and checked before anything is trained or written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError, short_repr, warn
from ptlf.core.randomness import Randomness, derived_seed
from ptlf.encoders import ENCODERS, Weights, as_encoder, brings_weights, load_weights, read_tensors
from ptlf.encoders.norm import broadcast_and_sync_bn
from ptlf.evaluation import Gallery, Prober
from ptlf.freezing.recording import unchanged
from ptlf.methods import METHODS, Method
from ptlf.run import build
from ptlf.run.config import Config
from ptlf.run.folder import START
from ptlf.stream import Stream
from ptlf.stream.images import find_images, open_images
from ptlf.stream.loading import image_sources
from ptlf.stream.pack import data_root
from ptlf.stream.packing import labelled_dataset, sample_images
from ptlf.stream.task import single_task_stream
from ptlf.training.trainer import Trainer
from ptlf.views import draw, make_views, normalise

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
        self.stream = stream = build.make_checked_stream(config, folder, stream)
        self.device = device = processes.local_device(build.choose_device(config.device))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # streams, graphs and Triton kernels use the current device
        self.random, sources = Randomness(config.seed), image_sources(device, config.stream.resident)
        self.view_size = size = config.views.size or stream.size
        root = data_root(config.data_root)
        if config.memory.images and not (folder and (folder / "config.yaml").exists()):
            open_images(find_images(config.memory.images, root))  # a resumed run has them in its memory

        encoder, self.weights = starting_encoder(config, encoder, folder, size)  # the weights that it begins with
        self.model = model = build.make_model(config, stream, size, device, encoder)
        self.view_specs = build.views_for(model.encoder, config.views.name, size)
        build.check_memory(config, model.encoder, len(self.view_specs), size, device)
        wanted = config.training.channels_last
        channels_last = device.type == "cuda" if wanted is None else wanted
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.method = build.make_method(config, stream, model, size, self.random["method"]).to(device)
        broadcast_and_sync_bn([model, self.method], config.distributed)
        optimizer, images = build.make_optimizer(config.training, model, self.method), stream.tasks[0].images
        self.trainer = Trainer(
            model,
            self.method,
            optimizer,
            sources,
            images,
            self.view_specs,
            size,
            config.training,
            self.random,
            device,
            channels_last,
        )
        self.freezing = build.make_freezing(config, self.trainer, self.random["policy"])

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
            path = find_images(tests.reference, root)
            known = labelled_dataset(path, stream.size, tests.reference_test, stream.fit)
            known_stream = single_task_stream(known, "reference")
            self.reference = Prober(known_stream, tests, config.probes, self.prepare, device)
        if tests.gallery and self.out:
            seed = derived_seed(config.seed, "gallery")
            self.gallery = Gallery(stream, self.prepare, device, config=tests, seed=seed)

    def prepare(self, images: Tensor) -> Tensor:
        """Stored images (B, H, W, 3) uint8 as the encoder's input, without augmentation."""
        x = normalise(images, self.view_specs[0].mean, self.view_specs[0].std, self.view_size)
        return x.contiguous(memory_format=torch.channels_last) if self.trainer.channels_last else x


def starting_encoder(
    config: Config, encoder: nn.Module | None, folder: Path | None, size: int
) -> tuple[nn.Module | None, Weights | None]:
    """The encoder with the weights of `encoder.weights`, or as it came without that setting. `size`: of the views."""
    if config.encoder.weights is None:
        return encoder, None
    if METHODS.find(config.method.name).adapt_encoder is not Method.adapt_encoder:
        why = f"method {config.method.name!r} builds an encoder of its own and cannot start from encoder.weights"
        raise UserError(f"{why}; choose another method")
    encoder = build.make_encoder(config.encoder, config.seed, size) if encoder is None else as_encoder(encoder)
    weights = None
    if processes.is_first():  # the others get the weights from it
        if folder and (folder / START).is_file():
            encoder.load_state_dict(encoder.state_dict() | read_tensors(folder / START))
            with safe_open(folder / START, "pt") as file:
                weights = Weights(**json.loads(file.metadata()["weights"]))
        else:
            weights = load_weights(encoder, Path(config.encoder.weights).expanduser())
    return encoder, processes.broadcast_object(weights)


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
