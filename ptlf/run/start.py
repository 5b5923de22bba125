"""What a run knows before its first task: an encoder with weights from a file, images in the replay memory."""

import json
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from torch import nn

from ptlf.core import processes
from ptlf.core.errors import UserError
from ptlf.core.files import write_whole
from ptlf.encoders import Weights, load_weights, read_tensors
from ptlf.methods import METHODS, Method
from ptlf.run.build import make_encoder
from ptlf.run.config import Config
from ptlf.run.folder import encoder_bytes

START = "start.safetensors"  # in a run's folder: the given encoder, so that the run needs its file no more


def starting_encoder(
    config: Config, encoder: nn.Module | None, folder: Path | None
) -> tuple[nn.Module | None, Weights | None]:
    """The encoder with the weights of `encoder.weights`, or as it came without that setting."""
    if config.encoder.weights is None:
        return encoder, None
    if METHODS.find(config.method.name).adapt_encoder is not Method.adapt_encoder:
        why = f"method {config.method.name!r} builds an encoder of its own and cannot start from encoder.weights"
        raise UserError(f"{why}; choose another method")
    encoder = encoder or make_encoder(config.encoder, config.seed)
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
    if not (folder / START).exists():
        write_whole(folder / START, encoder_bytes(encoder, {"weights": json.dumps(asdict(weights))}))
