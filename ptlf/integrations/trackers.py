"""Experiment trackers, fed with the lines of metrics.jsonl. Each imports its package only when a run asks for it.

To add one: subclass `Tracker` and add a line to `TRACKERS`, or name it as package.module:Class.
"""

import copy
import importlib
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ptlf.core.errors import UserError, import_optional
from ptlf.core.files import write_whole
from ptlf.core.processes import warn
from ptlf.core.reading import flatten
from ptlf.core.registry import Registry
from ptlf.core.words import short_repr
from ptlf.integrations.feed import Feed

Line = Mapping[str, Any]  # of metrics.jsonl
IDS = "trackers.json"  # in the run's folder: by tracker, the id under which it knows the run
STORING = threading.Lock()  # of that file: several trackers begin at the same time
WANDB_URL = "https://api.wandb.ai"


class Tracker:
    """The step of a line is its number in metrics.jsonl, from 1: epochs over all tasks. `begin`, `epoch` and `end` are
    called in this order by one thread, which is not the training's."""

    def __init__(self) -> None:
        """Import what is needed; nothing is written yet. Raises a UserError if the package is missing."""

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        """Open the tracker's own record of the run in `folder`, or continue it.

        settings: of the run, nested.
        lines: of the epochs before. Those that are not in the record yet are to be added. Later ones that are in it
            were trained by a process that was killed, and come again.
        """

    def epoch(self, step: int, line: Line) -> None: ...

    def end(self, status: str) -> None:
        """status: finished, stopped or failed."""


class TensorBoard(Tracker):
    """TensorBoard event files, in RUN/tensorboard."""

    def __init__(self) -> None:
        self.package = import_optional("torch.utils.tensorboard", "--log", "trackers", "tensorboard")

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        place = folder / "tensorboard"
        known = any(place.glob("events.*"))
        # Older files may lack the last lines. Readers leave out what they have from this step on.
        self.writer = self.package.SummaryWriter(place, purge_step=1 if known else None)
        if not known:
            self.writer.add_text("settings", "```yaml\n" + yaml.safe_dump(dict(settings), sort_keys=False) + "```")
        write_all(self, lines)
        self.writer.flush()

    def epoch(self, step: int, line: Line) -> None:
        for name, value in numbers(line).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: str) -> None:
        self.writer.close()


class WandB(Tracker):
    """Weights & Biases, in RUN/wandb: online after `wandb login`, else offline; WANDB_MODE, WANDB_PROJECT and the like
    hold."""

    def __init__(self) -> None:
        self.package = import_optional("wandb", "--log", "trackers")

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if self.has_login() else "offline")
        known = stored_id(folder, "wandb")
        run_id = known or store_id(folder, "wandb", secrets.token_hex(4))
        written = sorted((folder / "wandb").glob(f"*run-*-{run_id}"))
        # A file that was not uploaded is replaced by one that holds all lines; W&B itself drops steps it has already.
        for place in written:
            if place.name.startswith("offline-") and not any(place.glob("*.synced")):
                shutil.rmtree(place)
        silent = self.package.Settings(silent=True, console="off")
        how = {"project": os.environ.get("WANDB_PROJECT", "ptlf"), "name": os.environ.get("WANDB_NAME", folder.name)}
        resume = "allow" if mode == "online" else None
        self.run = self.package.init(
            dir=folder, id=run_id, mode=mode, resume=resume, config=dict(settings), settings=silent, **how
        )
        self.last = self.run.step - 1 if known and mode == "online" else 0
        write_all(self, lines)

    def has_login(self) -> bool:
        utils = importlib.import_module("requests.utils")  # wandb depends on it
        host = os.environ.get("WANDB_BASE_URL", WANDB_URL)
        return bool(os.environ.get("WANDB_API_KEY") or utils.get_netrc_auth(host))

    def epoch(self, step: int, line: Line) -> None:
        if step > self.last:
            self.run.log(numbers(line), step=step, commit=True)

    def end(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "finished"))


class MLflow(Tracker):
    """MLflow, in RUN/mlruns or where MLFLOW_TRACKING_URI says; the experiment is MLFLOW_EXPERIMENT_NAME or ptlf."""

    ENDS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED"}

    def __init__(self) -> None:
        self.package = import_optional("mlflow", "--log", "trackers", "mlflow-skinny")

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (folder / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow refuses a folder
        self.client = self.package.MlflowClient(tracking_uri=uri)
        self.run_id = stored_id(folder, "mlflow")
        self.written: set[int] = set()  # steps: what is logged cannot be taken back
        if self.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ptlf")
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            self.run_id = self.client.create_run(experiment, run_name=folder.name).info.run_id
            settings = {self.allowed(key): str(value)[:500] for key, value in flatten(settings).items()}
            parameters = [self.package.entities.Param(key, value) for key, value in settings.items()]
            for start in range(0, len(parameters), 100):  # the most that one call takes
                self.client.log_batch(self.run_id, params=parameters[start : start + 100])
            store_id(folder, "mlflow", self.run_id)
        else:
            self.client.set_terminated(self.run_id, "RUNNING")
            self.written = {metric.step for metric in self.client.get_metric_history(self.run_id, "epoch")}
        write_all(self, lines)

    def epoch(self, step: int, line: Line) -> None:
        if step in self.written:
            return
        now = self.package.utils.time.get_current_time_millis()
        values = {self.allowed(name): value for name, value in numbers(line).items()}
        metrics = [self.package.entities.Metric(name, value, now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def allowed(self, name: str) -> str:
        """The name with "_" for what MLflow refuses in names of metrics and parameters."""
        return re.sub(r"[^\w\-. :/]", "_", name)

    def end(self, status: str) -> None:
        self.client.set_terminated(self.run_id, self.ENDS.get(status, "FAILED"))


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker", "ptlf.trackers", Tracker, {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
)


class Trackers:
    """Several of them, each called in order by a thread of its own. One that fails, or for which `room` calls wait, is
    left out from then on, with a warning: the run is worth more. At the end the run waits for each tracker, unless no
    call has returned for `timeout` seconds."""

    def __init__(self, names: Iterable[str] = (), timeout: float = 30.0, room: int = 1000) -> None:
        self.members = {name: made(name) for name in names}
        self.timeout, self.room = timeout, room
        self.feeds: dict[str, Feed] = {}

    def begin(self, folder: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
        place, known = folder.resolve(), list(lines)  # a tracker's own process may be in another folder
        self.feeds = {name: Feed(f"tracker {name}", self.room, partial(left_out, name)) for name in self.members}
        self._each(lambda tracker: tracker.begin(place, settings, known), "to begin")

    def epoch(self, step: int, line: Line) -> None:
        line = copy.deepcopy(line)
        self._each(lambda tracker: tracker.epoch(step, line), f"in task {line['task']}, epoch {line['epoch']}")

    def end(self, status: str) -> None:
        self._each(lambda tracker: tracker.end(status), "to end", last=True)
        for name, feed in self.feeds.items():
            if not feed.join(self.timeout):
                why = f"has not answered for {self.timeout:g} s"
                warn(f"tracker {name!r} {why} and is left behind; metrics.jsonl holds all epochs")
        self.feeds = {}

    def _each(self, act: Callable[[Tracker], None], moment: str, *, last: bool = False) -> None:
        for name, feed in list(self.feeds.items()):
            if not feed.put(partial(act, self.members[name]), moment, last=last):
                del self.feeds[name]
                why = f"hangs: {self.room} calls wait for it; it is left out and the run continues"
                warn(f"tracker {name!r} {why}; metrics.jsonl holds all epochs")


def left_out(name: str, moment: str, error: BaseException) -> None:
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    warn(f"tracker {name!r} failed {moment} and is left out; the run continues: {why}")


def made(name: str) -> Tracker:
    kind = TRACKERS.find(name)
    try:
        return kind()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"tracker {short_repr(name)} cannot be made: {type(error).__name__}: {error}") from error


def numbers(line: Line) -> dict[str, float]:
    """The line's numbers by name, losses as loss/NAME. Text and lists are left out; a loss of "nan" is a number."""
    found = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return found | {f"loss/{name}": float(value) for name, value in line.get("loss", {}).items()}


def write_all(tracker: Tracker, lines: Sequence[Line]) -> None:
    for step, line in enumerate(lines, start=1):
        tracker.epoch(step, line)


def stored_ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stored_id(folder: Path, tracker: str) -> str | None:
    found = stored_ids(folder).get(tracker)
    return found if isinstance(found, str) and found.isalnum() else None


def store_id(folder: Path, tracker: str, name: str) -> str:
    with STORING:
        write_whole(folder / IDS, json.dumps({**stored_ids(folder), tracker: name}) + "\n")
    return name
