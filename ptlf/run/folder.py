"""The folder of a run: claimed by one process at a time, finished or not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn

from ptlf.core.errors import UserError
from ptlf.core.files import locked, write_error, write_whole
from ptlf.run.config import Config, from_dict, read_yaml
from ptlf.run.results import read_results
from ptlf.stream.arrivals import arrived_names

ENCODER = "encoder.safetensors"
START = "start.safetensors"  # the weights that training began with, if no setting says how to make them


@contextmanager
def claimed(out: Path, resume: bool) -> Iterator[None]:
    """The output folder, made and locked. One that already holds a run is refused, unless that is to go on."""
    with lock_of_run(out):
        if not resume and any((out / name).exists() for name in ("results.json", "config.yaml", "metrics.jsonl")):
            if has_finished(out):
                raise UserError(f"{out} already holds a run; choose another --out, or remove that folder")
            advice = f"resume it with `ptlf train --resume {out}`, or choose another --out"
            raise UserError(f"{out} already holds a run that has not finished; {advice}")
        if not resume and any(out.glob("*/config.yaml")):
            raise UserError(f"{out} holds other runs; choose a folder of its own as --out")
        yield


@contextmanager
def lock_of_run(folder: Path) -> Iterator[None]:
    """Held while a run uses its folder, which is made if it is not there."""
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / ".lock", f"{folder} is in use", "wait for it, or choose another --out"))
        except OSError as error:
            raise write_error(folder, error) from error
        yield


def save_encoder(folder: Path, encoder: nn.Module, name: str = ENCODER) -> None:
    # Copies, since one tensor may have two names; what is no tensor is the encoder's own business.
    tensors = {name: value.cpu().clone() for name, value in encoder.state_dict().items() if torch.is_tensor(value)}
    write_whole(folder / name, save({name: value.contiguous() for name, value in tensors.items()}))


def has_finished(folder: Path) -> bool:
    """Whether every task is learnt, those included that arrived since the results were written."""
    if not (folder / "results.json").exists():
        return False
    results = read_results(folder)
    return results["status"] == "finished" and results.get("arrived", 0) == len(arrived_names(folder))


def finished(folder: Path, config: Config) -> bool:
    """Whether this very run already lies finished in the folder; another run there is refused."""
    if not (folder / "config.yaml").exists():
        return False
    if from_dict(read_yaml(folder / "config.yaml")) != config:
        raise UserError(f"{folder} holds a run with other settings; choose another --out")
    return has_finished(folder)


def load_encoder(folder: Path, encoder: nn.Module, name: str = ENCODER) -> None:
    """The weights of a finished run into a module like the one trained."""
    path = folder / name
    if not path.exists():
        raise UserError(f"{folder} holds no {name}; the run there has not finished")
    state = {name: value for name, value in encoder.state_dict().items() if not torch.is_tensor(value)}
    try:
        encoder.load_state_dict(state | load_file(path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"{path} is not of an encoder like this one: {reason}") from None
