"""Checkpoints: the state from which a run continues bit for bit. Written atomically, by a thread, without pickle.

A file is a line with the SHA-256 of the rest, and safetensors data: tensors, and all else as JSON in the metadata.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from ptlf.core.errors import UserError, quoted, warn
from ptlf.core.files import check_held, open_regular, sync_folder, write_whole
from ptlf.core.phases import Clock
from ptlf.core.settings import key

KIND = b"ptlf checkpoint "
MAGIC = KIND + b"1 sha256 "
NAME = re.compile(r"(?:after-task(\d+)|task(\d+)-epoch(\d+)-step(\d+))\.ckpt")


@dataclass
class CheckpointConfig:
    enabled: bool = key(True, "save checkpoints; false = a run that is stopped starts again from the beginning")
    every_epochs: int = key(1, "save every N epochs of a task; 0 = only after each task", ge=0)
    every_steps: int = key(0, "also save every N steps of an epoch; 0 = never", ge=0)
    every_minutes: float = key(0.0, "also save after N minutes without a checkpoint; 0 = never", ge=0)
    keep: int = key(2, "how many to keep, besides the one after each task", ge=1)
    keep_tasks: int | None = key(None, "how many of those after each task to keep, the last ones; null = all", ge=1)
    keep_images: bool = key(True, "keep the images of tasks that `ptlf learn` has learnt; false = no image stays")


@dataclass(frozen=True, order=True)
class Position:
    """Progress of a run: finished tasks, finished epochs of the current task, finished steps of the current epoch."""

    task: int = 0
    epoch: int = 0
    step: int = 0

    def __str__(self) -> str:
        """The next step, counted from 1."""
        return f"task {self.task + 1}, epoch {self.epoch + 1}, step {self.step + 1}"

    @property
    def between_tasks(self) -> bool:
        return self.epoch == self.step == 0

    @property
    def file(self) -> str:
        if self.between_tasks:
            return f"after-task{self.task:02}.ckpt"
        return f"task{self.task + 1:02}-epoch{self.epoch:03}-step{self.step:05}.ckpt"

    @classmethod
    def of_file(cls, name: str) -> Self | None:
        if (found := NAME.fullmatch(name)) is None:
            return None
        after, task, epoch, step = found.groups()
        return cls(int(after)) if after else cls(int(task) - 1, int(epoch), int(step))


class DamagedCheckpoint(Exception):
    """The file is incomplete or corrupt, and the reason."""


class Checkpoints:
    """The checkpoints of one run, in FOLDER/checkpoints. One at a time is written, by a thread."""

    def __init__(self, folder: Path, config: CheckpointConfig, resume_command: str = "") -> None:
        """resume_command: what to type to continue the run."""
        self.folder, self.config, self.resume_command = folder / "checkpoints", config, resume_command
        self.last: Path | None = None  # that was written, or loaded
        self._clock = Clock()
        self._saved_at = self._clock()
        self._writing: Future[None] | None = None

    def due(self, position: Position) -> bool:
        """Whether to save at this position."""
        steps, epochs, minutes = self.config.every_steps, self.config.every_epochs, self.config.every_minutes
        every, done = (steps, position.step) if position.step else (epochs, position.epoch)
        if position.between_tasks or (every and done % every == 0):
            return True
        return bool(minutes) and self._clock() - self._saved_at >= 60 * minutes

    def save(self, position: Position, state: Mapping[str, Any]) -> None:
        """Copies the state and has it written. Waits for the write before this one, and raises its error."""
        self.wait()
        path, copy = self.folder / position.file, HostCopy(state)
        self._saved_at = self._clock()
        thread = ThreadPoolExecutor(1)  # Python waits for it before it exits
        self._writing = thread.submit(self._write, path, copy)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the state last saved is on the disk. Raises the error if it could not be written, once."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, path: Path, copy: "HostCopy") -> None:
        """In the thread. It calls nothing of CUDA: meanwhile the training thread may be capturing a graph."""
        check_held(self.folder)
        self.folder.mkdir(exist_ok=True)
        sync_folder(self.folder.parent)
        try:
            write_checkpoint(path, copy)
        except UserError as error:
            hint = "nothing of this run is saved yet"
            if self.last is not None:
                hint = f"put that right, and `{self.resume_command}` continues from {self.last.name}"
            raise UserError(f"{str(error).partition(';')[0]}; {hint}") from error
        self.last, files = path, self.files()
        within, after = ([p for p in files if p.name.startswith("after-") is between] for between in (False, True))
        for old in within[: -self.config.keep] + after[: -(self.config.keep_tasks or len(files))]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest intact state. A damaged file is logged and renamed to *.damaged."""
        self.wait()
        for part in self.folder.glob(".*.part"):  # left by a process that was killed while writing
            part.unlink(missing_ok=True)
        for path in reversed(self.files()):
            try:
                state = read_checkpoint(path)
            except (DamagedCheckpoint, OSError) as error:
                reason = getattr(error, "strerror", None) or error
                path.rename(path.with_name(path.name + ".damaged"))
                warn(f"{path} is damaged ({reason}); trying the one before it")
                continue
            self.last = path
            return state
        if any(self.folder.glob("*.damaged")):
            again = "remove that folder to train every task again"
            anew = f"begin a new run with --encoder.weights {quoted(self.folder.parent)}"
            raise UserError(f"no checkpoint in {self.folder} is whole; put one back, {again}, or {anew}")
        return None

    def check_version(self) -> None:
        """Refuse to resume from a checkpoint of another version of ptlf, by the newest file's first bytes."""
        for path in self.files()[-1:]:
            with open_regular(path) as file:
                check_magic(path, file.read(len(MAGIC)))

    def files(self) -> list[Path]:
        """Oldest first."""
        found = [(Position.of_file(path.name), path) for path in self.folder.glob("*.ckpt")]
        return [path for position, path in sorted((p, path) for p, path in found if p is not None)]


SCALARS = {bool, int, float, str, type(None)}


class HostCopy:
    """A copy of nested dicts (with string keys), lists, values and tensors, to write while the original changes."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._gpus = set[torch.device]()
        self.plain = self._copied(state, "")
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()  # the copies are done

    def _copied(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)  # torch keeps pinned memory
            self._gpus |= {value.device} if value.is_cuda else set()
            self.tensors[path] = copy.copy_(value.detach().contiguous(), non_blocking=True)
            return {"$tensor": path}
        if isinstance(value, Mapping):
            items = ((name, part, f"{path}/{name}" if path else name) for name, part in value.items())
            return {name: part if type(part) in SCALARS else self._copied(part, at) for name, part, at in items}
        if isinstance(value, (list, tuple)):
            return [p if type(p) in SCALARS else self._copied(p, f"{path}/{index}") for index, p in enumerate(value)]
        return value


def first_line(data: bytes) -> bytes:
    return MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n"


def write_checkpoint(path: Path, state: HostCopy) -> None:
    data = save(state.tensors, {"state": json.dumps(state.plain)})
    write_whole(path, [first_line(data), data])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state. Raises `DamagedCheckpoint` if the file is not as it was written."""

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return tensors[value["$tensor"]] if "$tensor" in value else {name: restored(v) for name, v in value.items()}
        return [restored(part) for part in value] if isinstance(value, list) else value

    with open_regular(path) as file:
        head, data = file.read(len(MAGIC) + 65), file.read()
    check_magic(path, head)
    if head != first_line(data):
        raise DamagedCheckpoint("its checksum is wrong")
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return restored(json.loads(header["__metadata__"]["state"]))


def check_magic(path: Path, head: bytes) -> None:
    if re.match(KIND + rb"\d+ ", head) and not head.startswith(MAGIC):
        raise UserError(f"{path} is a checkpoint of another version of ptlf; resume with that version")


def optimizer_state(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """State by parameter name, and by group what the optimizer itself counts or adapts there, but not the rate."""
    groups = []
    for group in optimizer.param_groups:
        plain = {n: v for n, v in group.items() if type(v) in SCALARS and v != optimizer.defaults.get(n)}
        tensors = {n: v for n, v in group.items() if isinstance(v, Tensor)}
        groups.append({name: value for name, value in (plain | tensors).items() if name != "lr"})
    state = {names[p]: dict(values) for p, values in optimizer.state.items() if p in names}
    return {"optimizer": state, "optimizer_groups": groups}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
    """Into an optimizer as it was made. Older checkpoints have numbers for names, and no groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {str(number): p for number, p in enumerate(parameters)} | {names[p]: p for p in parameters}
    optimizer.state.clear()
    for name, values in state["optimizer"].items():
        optimizer.state[known[name]] = {part: like(known[name], value) for part, value in values.items()}
    for group, values in zip(optimizer.param_groups, state.get("optimizer_groups") or (), strict=False):
        for name, value in values.items():
            if isinstance(old := group.get(name), Tensor):
                old.copy_(value)  # in place: a captured step reads the tensor it saw
            else:
                group[name] = like(group["params"][0], value)


def like(parameter: Tensor, value: Any) -> Any:
    """The value on the parameter's device, and in its layout if it has its shape, which fused optimizers need."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device) if isinstance(value, Tensor) else value
