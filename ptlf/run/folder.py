"""The folder of a run: claimed by one process at a time, finished or not."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from ptlf.core.errors import UserError, quoted, short_repr
from ptlf.core.files import check_no_link, file_digest, locked, write_error, write_whole
from ptlf.core.reading import damaged
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict
from ptlf.encoders.weights import KEPT, check_values
from ptlf.run.compat import NO_EFFECT, describe_changes, differences
from ptlf.run.config import Config, from_dict, read_yaml
from ptlf.run.results import RESTORE_HINT, results_if_any
from ptlf.stream.arrivals import INCOMING, TASKS, arrived_names, folder_name, is_arrival, missing

ENCODER = "encoder.safetensors"
START = "start.safetensors"  # the weights that training began with, if they do not follow from the seed
LOGS = (".log", ".out", ".err")  # shells and schedulers open them before the run begins


@contextmanager
def claim_folder(out: Path, resume: bool) -> Iterator[None]:
    """The output folder, made and locked. One that already holds a run is refused, unless that continues."""
    with lock_of_run(out):
        if not resume:
            check_vacant(out)
        check_new(out)
        yield


def check_vacant(out: Path) -> None:
    """Refuse a folder that holds a run, or folders of runs."""
    if any((out / name).exists() for name in ("results.json", "config.yaml", "metrics.jsonl")):
        advice = "; choose another --out, or remove that folder"
        if not has_finished(out):
            resume = f"resume it with `ptlf train --resume {quoted(out)}`"
            advice = f" that has not finished; {resume}, or choose another --out"
        raise UserError(f"{out} already holds a run{advice}")
    if any(out.glob("*/config.yaml")):
        raise UserError(f"{out} holds other runs; choose a folder of its own as --out")


def check_new(folder: Path) -> None:
    """Refuse a folder that holds files and no run, but for hidden files, logs and what a run leaves that was killed."""
    if (folder / "config.yaml").exists() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        own = path.name == START or (path.name == TASKS and all(map(is_arrival, path.iterdir())))
        log = path.suffix in LOGS and path.is_file()
        if not (own or log or path.name.startswith(".")):
            raise UserError(f"{folder} holds files and no run, such as {short_repr(path.name)}; give a new folder")


def lock_of_run(folder: Path) -> AbstractContextManager[None]:
    """Held while a run uses its folder, which is made if it is not there. No folder in it that is written is a link."""
    check_no_link(*(folder / name for name in ("checkpoints", TASKS, f"{TASKS}/{INCOMING}", "tensorboard", "wandb")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    return locked(folder / ".lock", f"{folder} is in use", "wait for it, or choose another folder")


def save_encoder(
    folder: Path, encoder: nn.Module, name: str = ENCODER, metadata: Mapping[str, str] | None = None
) -> str:
    """The file's SHA-256. With one key of metadata at most, the same state gives the same bytes."""
    # Copies, since one tensor may have two names; what is no tensor is the encoder's own business.
    state = {key: value for key, value in encoder.state_dict().items() if torch.is_tensor(value)}
    data = save({key: value.cpu().clone().contiguous() for key, value in state.items()}, dict(metadata or {}) or None)
    write_whole(folder / name, data)
    return hashlib.sha256(data).hexdigest()


def keep_encoder(folder: Path, task: str) -> None:
    """As it is now, after this task. From then on the run keeps those of later tasks too."""
    place = folder / KEPT / folder_name(task)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / ENCODER, (folder / ENCODER).read_bytes())


def forget_images(folder: Path) -> None:
    """Of all tasks that arrived; their names and checksums stay."""
    for file in (folder / TASKS).glob("*/*.npy"):
        file.unlink()


def encoder_digest(state: Mapping[str, Any]) -> str:
    """Of names, shapes and values of all its tensors: which version of an encoder it is."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        if torch.is_tensor(value):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def has_finished(folder: Path) -> bool:
    """Whether every task is learnt, those included that arrived since the results were written."""
    results = results_if_any(folder) or {"status": ""}
    return results["status"] == "finished" and results.get("arrived", 0) == len(arrived_names(folder))


def check_arrived(folder: Path) -> None:
    """Refuse a run if one of the tasks that arrived by its last results is not in its folder."""
    results = results_if_any(folder)
    if not results or results["status"] == "running" or not results.get("arrived"):
        return  # it may have failed before it took its last task
    there = {int(name.partition("-")[0]) for name in arrived_names(folder)}
    for number, name in enumerate(results["tasks"][-results["arrived"] :], start=1):
        if number not in there:
            raise missing(folder, number, str(name))


def has_finished_as(folder: Path, config: Config) -> bool:
    """Whether this very run already lies finished in the folder; another run there is refused."""
    if not (folder / "config.yaml").exists():
        return False
    with settings_from(folder / "config.yaml", all_text(as_dict(config))):
        there = from_dict(read_yaml(folder / "config.yaml"))
    if changed := describe_changes(as_dict(there), as_dict(config), NO_EFFECT):
        raise UserError(f"{folder} holds a run with other settings ({changed}); choose another --out")
    return has_finished(folder)


def all_text(settings: Mapping[str, Any]) -> list[str]:
    """All text in nested settings, names of sections included."""
    below = [all_text(value) if isinstance(value, Mapping) else [str(value)] for value in settings.values()]
    return [*settings, *itertools.chain(*below)]


def restore_encoder(folder: Path, encoder: nn.Module, name: str = ENCODER) -> None:
    """The weights of a finished run into a module like the one trained."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} holds no {name}; the run there has not finished")
    expected = (results_if_any(folder) or {}).get("encoder_sha256") if name == ENCODER else None
    if expected and file_digest(path, "sha256") != expected:
        raise UserError(f"{path} is damaged: it is not the file whose checksum is in results.json; {RESTORE_HINT}")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error, RESTORE_HINT) from None
    own = encoder.state_dict()
    for key, there, here in differing_shapes(tensors, own):
        what = f"{short_repr(key)} has the shape {there} there and {here} here"
        raise UserError(f"{path} is not of an encoder like this one: {what}")
    check_values(path, tensors, encoder, RESTORE_HINT)
    encoder.load_state_dict({**own, **tensors})


def differing_shapes(*states: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name and both shapes, None where there is none, of the tensors of two states that differ in that."""
    return differences(*({name: tuple(t.shape) for name, t in s.items() if torch.is_tensor(t)} for s in states))
