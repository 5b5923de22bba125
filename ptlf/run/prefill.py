"""Images in the replay memory before the first task: what the encoder learnt elsewhere."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptlf.core.randomness import derived_seed
from ptlf.freezing.recording import unchanged
from ptlf.methods import Memory
from ptlf.run.components import Components
from ptlf.run.start import find_given
from ptlf.stream.images import open_images
from ptlf.stream.packing import sample_images
from ptlf.views import draw, make_views

BATCH = 256  # images per forward


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
