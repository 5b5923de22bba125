"""What a run knows before its first task: an encoder with weights from a file, and the labelled images that say what
it knew."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.encoders import Weights, as_encoder, load_weights, read_tensors
from ptlf.evaluation import Prober
from ptlf.methods import METHODS, Method
from ptlf.run.build import make_encoder
from ptlf.run.config import Config
from ptlf.run.folder import START, save_encoder
from ptlf.stream import Stream
from ptlf.stream.images import find_images
from ptlf.stream.pack import data_root
from ptlf.stream.packing import labelled_dataset
from ptlf.stream.task import single_task_stream


def starting_encoder(
    config: Config, encoder: nn.Module | None, folder: Path | None, size: int
) -> tuple[nn.Module | None, Weights | None]:
    """The encoder with the weights of `encoder.weights`, or as it came without that setting. `size`: of the views."""
    if config.encoder.weights is None:
        return encoder, None
    if METHODS.find(config.method.name).adapt_encoder is not Method.adapt_encoder:
        why = f"method {config.method.name!r} builds an encoder of its own and cannot start from encoder.weights"
        raise UserError(f"{why}; choose another method")
    encoder = make_encoder(config.encoder, config.seed, size) if encoder is None else as_encoder(encoder)
    weights = None
    if processes.is_first():  # the others get the weights from it
        kept = folder / START if folder else None
        if kept is not None and kept.is_file():
            encoder.load_state_dict(encoder.state_dict() | read_tensors(kept))
            with safe_open(kept, "pt") as file:
                weights = Weights(**json.loads(file.metadata()["weights"]))
        else:
            weights = load_weights(encoder, Path(config.encoder.weights).expanduser())
    return encoder, processes.broadcast_object(weights)


def save_start(folder: Path, encoder: nn.Module, weights: Weights) -> None:
    """The given encoder into the run's folder, so that the run needs its file no more."""
    if not (folder / START).exists():
        save_encoder(folder, encoder, START, {"weights": json.dumps(asdict(weights))})


def without_start(config: Config) -> Config:
    """The settings without what a run begins with: for an encoder that is already trained."""
    encoder, memory = replace(config.encoder, weights=None), replace(config.memory, images=None)
    return replace(config, encoder=encoder, memory=memory, evaluation=replace(config.evaluation, reference=None))


def find_given(config: Config, value: str) -> Path:
    return find_images(value, data_root(config.data_root))


def make_reference(
    config: Config, stream: Stream, prepare: Callable[[Tensor], Tensor], device: torch.device
) -> Prober | None:
    """Tests an encoder on the labelled images of `evaluation.reference`, against a bank of their own, in size and shape
    as those of the stream."""
    tests = config.evaluation
    if tests.reference is None or not tests.enabled:
        return None
    data = labelled_dataset(find_given(config, tests.reference), stream.size, tests.reference_test, stream.fit)
    try:
        return Prober(single_task_stream(data, "reference"), tests, config.probes, prepare, device)
    except UserError as error:
        raise UserError(f"evaluation.reference: {error}") from None
