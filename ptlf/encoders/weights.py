"""Weights from a file into an encoder: safetensors or a state_dict saved by torch, read without running any code."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ptlf.core.errors import UserError, short_repr
from ptlf.core.files import file_digest

KEY = "ptlf"  # of the card in the metadata of a run's or an exported file
FILES = ("encoder.safetensors", "model.safetensors")  # of a run's folder, of an exported one
KEPT = "encoders"  # in a run's folder: the encoders of after earlier tasks
WRAPPERS = ("state_dict", "model", "model_state_dict", "encoder")  # under which training scripts save a state_dict
# Names of torchvision's and timm's residual networks, and ours.
RESNET = ((r"^conv1\.", "stem.conv."), (r"^bn1\.", "stem.bn."), (r"\.downsample\.", ".shortcut."))
ADVICE = "save a state_dict: torch.save(model.state_dict(), FILE), or safetensors"
COUNTER = "num_batches_tracked"  # of a BatchNorm; many files leave it out


@dataclass(frozen=True)
class Weights:
    """What came of loading a file. Names are the encoder's, or for `unexpected` the file's without the prefix."""

    path: str
    sha256: str
    prefix: str  # left out of the file's names
    matched: int
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]

    def lines(self) -> list[str]:
        """A table for the terminal."""
        head = f"encoder.weights {self.path}" + (f", names without {self.prefix!r}" if self.prefix else "")
        rows = {"missing": self.missing, "unexpected": self.unexpected, "other shape": self.other_shape}
        table = [f"  {what:<12}{len(names):>5}  {some(names)}".rstrip() for what, names in rows.items()]
        return [head, f"  {'matched':<12}{self.matched:>5}", *table]


def load_weights(encoder: nn.Module, path: Path) -> Weights:
    """Load the file into the encoder. A final classifier may be missing, and heads be too many."""
    file = find_file(path)
    read = read_tensors(file)
    own = {name: value for name, value in encoder.state_dict().items() if isinstance(value, Tensor)}
    # Of a model that held the encoder, or of DataParallel.
    prefixes = ["", *(prefix for name in read for prefix in accumulate(f"{part}." for part in name.split(".")[:-1]))]
    ways = [
        (prefix, {name.removeprefix(prefix): value for name, value in read.items() if name.startswith(prefix)})
        for prefix in dict.fromkeys(prefixes)
    ]
    shared = {name.partition(".")[0] for name in own}
    if len(shared) == 1:  # a wrapper, which adds a name of its own
        ways += [(prefix, {f"{min(shared)}.{name}": value for name, value in state.items()}) for prefix, state in ways]
    ways += [(prefix, {as_ours(name): value for name, value in state.items()}) for prefix, state in ways]
    prefix, state = max(ways, key=lambda way: len(matches(own, way[1])))  # of equals, the first
    found = matches(own, state)
    shapes = [name for name in own if name in state and name not in found]
    missing = [name for name in own if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in own and not name.endswith(COUNTER)]
    unexpected += [name for name in read if not name.startswith(prefix)]
    classifier = last_linear(encoder)
    parts = {name.partition(".")[0] for name in own}
    other = {name: f"{name} {tuple(state[name].shape)} where {tuple(own[name].shape)} is needed" for name in shapes}
    problems = {
        "it lacks": [name for name in missing if not name.startswith(classifier)],
        "of another shape are": [text for name, text in other.items() if not name.startswith(classifier)],
        "it also has": [name for name in unexpected if name.partition(".")[0] in parts and name in state],
    }
    if any(problems.values()) or not found:
        why = "; ".join(f"{what} {some(names)}" for what, names in problems.items() if names)
        stored = stored_encoder(file)
        whose = f"they are of --encoder.name {stored['name']}; " if stored else ""
        kind, count = type(encoder).__name__, f"{len(found)} of {len(own)} tensors match"
        raise UserError(f"{file} has the weights of another architecture than this {kind}: {count}; {whose}{why}")
    check_values(file, {name: state[name] for name in found}, encoder, ADVICE)
    encoder.load_state_dict(encoder.state_dict() | {name: state[name] for name in found})
    return Weights(str(path), file_digest(file, "sha256"), prefix, len(found), missing, unexpected, shapes)


def at_version(path: Path) -> Path:
    """RUN@TASK is the encoder that the run kept of after that task."""
    run, at, task = path.name.rpartition("@")
    if not at or path.exists() or not (folder := path.with_name(run)).is_dir():
        return path
    if not (kept := folder / KEPT / task).is_dir():
        hint = f"`ptlf embed {folder} IMAGES --as {task}` maps vectors into its space"
        raise UserError(f"{folder} keeps no encoder of after {task}; learn with --keep-encoders, or {hint}")
    return kept


def check_values(source: object, state: Mapping[str, Any], encoder: nn.Module, hint: str) -> None:
    """Refuse what cannot be the encoder's: another kind of numbers, numbers that are not finite, variances below 0. A
    buffer such as a mask may hold infinities."""
    own, trained = encoder.state_dict(), {name for name, _ in encoder.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        finite = value.isfinite() if name in trained or "running_" in name else ~value.isnan()
        problems = {
            f"{value.dtype} where {own[name].dtype} is needed".replace("torch.", ""): value.is_floating_point()
            != own[name].is_floating_point(),
            "numbers that are not finite": not finite.all(),
            "variances below 0": name.endswith("running_var") and bool((value.real < 0).any()),
        }
        if wrong := [problem for problem, there in problems.items() if there]:
            raise UserError(f"{source} is damaged: {short_repr(name)} holds {wrong[0]}; {hint}")


def find_file(path: Path) -> Path:
    """The file, or the one in a run's or an exported folder."""
    path = at_version(path)
    if path.is_dir():
        path = next((path / name for name in FILES if (path / name).exists()), path / FILES[0])
    if not path.is_file():
        raise UserError(f"encoder.weights: there is no file {path}")
    return path


def stored_encoder(path: Path) -> dict[str, Any] | None:
    """Settings and normalisation of the encoder in a run's or an exported folder or file; None for other files."""
    try:
        with safe_open(find_file(path), "pt") as file:
            card = json.loads((file.metadata() or {}).get(KEY, "null"))
    except (UserError, SafetensorError, OSError, ValueError):  # told where the weights are loaded
        return None
    settings = card.get("encoder") if isinstance(card, dict) and "method" not in card else None
    if not isinstance(settings, dict) or not isinstance(settings.get("name"), str):
        return None
    return {**settings, "mean": card.get("mean"), "std": card.get("std"), "weights": None}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors by name. Nothing in the file is executed."""
    try:
        value = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a malformed file can raise almost any exception
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:150]
        raise UserError(f"{file} cannot be read as plain tensors ({why}); {ADVICE}") from None
    while isinstance(value, Mapping) and (inner := [value[k] for k in WRAPPERS if isinstance(value.get(k), Mapping)]):
        value = inner[0]
    tensors = {str(k): v for k, v in value.items() if isinstance(v, Tensor)} if isinstance(value, Mapping) else {}
    if not tensors:
        raise UserError(f"{file} holds no tensors by name; {ADVICE}")
    return tensors


def as_ours(name: str) -> str:
    """The name in our residual networks of a tensor of torchvision's."""
    for pattern, new in RESNET:
        name = re.sub(pattern, new, name)
    return re.sub(r"^layer(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.", name)


def matches(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    return [name for name, value in own.items() if name in state and state[name].shape == value.shape]


def last_linear(encoder: nn.Module) -> str:
    """What the names of the final classifier's tensors begin with, if the last module with weights is linear."""
    weighted = [(name, module) for name, module in encoder.named_modules() if list(module.parameters(recurse=False))]
    last = weighted[-1] if len(weighted) > 1 else None
    return f"{last[0]}." if last and isinstance(last[1], nn.Linear) else "(none)"


def some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
