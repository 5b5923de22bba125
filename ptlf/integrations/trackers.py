"""Experiment trackers, fed with the lines of metrics.jsonl. Each imports its package only when a run asks for it.

To add one: subclass `Tracker` and add a line to `TRACKERS`, or name it as package.module:Class.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ptlf.core.errors import import_optional, warn
from ptlf.core.files import write_whole
from ptlf.core.reading import read_json
from ptlf.core.registry import Registry

Line = Mapping[str, Any]  # of metrics.jsonl
IDS = "trackers.json"  # in the run's folder: by tracker, the id under which it knows the run
WANDB_URL = "https://api.wandb.ai"


class Tracker:
    """The step of a line is its number in metrics.jsonl, from 1. `begin`, `epoch` and `end` are called in this order by
    the thread that trains: what takes long belongs into a thread or process of your own."""

    def __init__(self) -> None:
        """Import what is needed; nothing is written yet. Raises a UserError if the package is missing."""

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        """Open the tracker's own record of the run in `folder`, or continue it. settings: of the run, nested.

        lines: of the epochs before. Those that are not in the record yet are to be added. Later ones that are in it
            were trained by a process that was killed, and come again.
        """

    def epoch(self, step: int, line: Line) -> None: ...

    def end(self, status: str) -> None:
        """status: finished, stopped or failed."""


class TensorBoard(Tracker):
    """TensorBoard event files, in RUN/tensorboard."""

    def __init__(self) -> None:
        self.package = import_optional("torch.utils.tensorboard", "--log tensorboard", "trackers")

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        place = folder / "tensorboard"
        known = any(place.glob("events.*"))
        # Older files may lack the last lines. Readers leave out what they have from this step on.
        self.writer = self.package.SummaryWriter(place, purge_step=1 if known else None)
        if not known:
            self.writer.add_text("settings", "```yaml\n" + yaml.safe_dump(dict(settings), sort_keys=False) + "```")
        for step, line in enumerate(lines, start=1):
            self.epoch(step, line)

    def epoch(self, step: int, line: Line) -> None:
        for name, value in numbers(line).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: str) -> None:
        self.writer.close()


class WandB(Tracker):
    """Weights & Biases, in RUN/wandb: online after `wandb login`, else offline. WANDB_MODE and the like hold."""

    def __init__(self) -> None:
        self.package = import_optional("wandb", "--log", "trackers")

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        from requests.utils import get_netrc_auth

        known = os.environ.get("WANDB_API_KEY") or get_netrc_auth(os.environ.get("WANDB_BASE_URL", WANDB_URL))
        mode = os.environ.get("WANDB_MODE") or ("online" if known else "offline")
        if not (folder / IDS).exists():
            write_whole(folder / IDS, json.dumps({"wandb": secrets.token_hex(4)}) + "\n")
        run_id = read_json(folder / IDS)["wandb"]
        if not run_id.isalnum():  # folders are removed by this name
            raise ValueError(f"{folder / IDS} holds {run_id!r}, which is no id of W&B")
        # A file that was not uploaded is replaced by one that holds all lines; W&B itself drops steps it has already.
        for place in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
            if not any(place.glob("*.synced")):
                shutil.rmtree(place)
        self.run = self.package.init(
            dir=folder,
            id=run_id,
            mode=mode,
            resume="allow" if mode == "online" else None,
            config=dict(settings),
            settings=self.package.Settings(silent=True, console="off"),
            project=os.environ.get("WANDB_PROJECT", "ptlf"),
            name=os.environ.get("WANDB_NAME", folder.name),
        )
        self.last = self.run.step - 1 if mode == "online" else 0  # of the steps that the server has
        for step, line in enumerate(lines, start=1):
            self.epoch(step, line)

    def epoch(self, step: int, line: Line) -> None:
        if step > self.last:
            self.run.log(numbers(line), step=step, commit=True)

    def end(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "finished"))


MEMBERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
TRACKERS: Registry[type[Tracker]] = Registry("tracker", "ptlf.trackers", Tracker, MEMBERS)


class Trackers:
    """Several of them. One that fails is left out from then on, with a warning."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.members = {name: TRACKERS.find(name)() for name in names}

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        self._each("to begin", "begin", folder.resolve(), settings, lines)  # its own process may be in another folder

    def epoch(self, step: int, line: Line) -> None:
        self._each(f"in task {line['task']}, epoch {line['epoch']}", "epoch", step, line)

    def end(self, status: str) -> None:
        self._each("to end", "end", status)

    def _each(self, moment: str, method: str, *values: Any) -> None:
        for name, tracker in list(self.members.items()):
            try:
                getattr(tracker, method)(*values)
            except (Exception, SystemExit) as error:  # the disk, the network, the package
                del self.members[name]
                why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                warn(f"tracker {name!r} failed {moment} and is left out; metrics.jsonl holds all epochs: {why}")


def numbers(line: Line) -> dict[str, float]:
    """The line's numbers by name, losses as loss/NAME. Text and lists are left out; a loss of "nan" is a number."""
    found = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return found | {f"loss/{name}": float(value) for name, value in line.get("loss", {}).items()}
