"""A run watched from its files alone, so it may be on another machine: loss, speed, frozen units, time left."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ptlf.core.files import lock_holder
from ptlf.report.live import console
from ptlf.report.measures import show_seconds
from ptlf.report.tables import percent
from ptlf.run.results import Json, epoch_lines, read_lines, read_results

BARS = "▁▂▃▄▅▆▇█"
EVERY = 2.0  # seconds between two looks
CLOCKS_DIFFER = 30.0  # seconds by which a file may be newer than now
WRITTEN = ("metrics.jsonl", "results.json")  # what a run writes as it goes


@dataclass
class Snapshot:
    """What the files say at one moment."""

    folder: Path
    results: Json
    lines: list[Json]
    skipped: int  # lines that could not be read
    holder: str  # the process that trains, as "PROCESS on MACHINE"
    alive: bool | None  # whether it still holds the run's lock; None: this machine cannot tell

    def __post_init__(self) -> None:
        self.status: str = self.results["status"]
        self.tasks, self.epochs = len(self.results["tasks"]), int(self.results["config"]["training"]["epochs"])
        self.last: Json = self.lines[-1] if self.lines else {"task": 1, "epoch": 0}
        self.here = [line for line in self.lines if line["task"] == self.last["task"]]  # epochs of the task at hand

    @property
    def going(self) -> bool:
        """False where nothing says that the run has stopped, but its process was killed."""
        return self.status == "running" and self.alive is not False

    @property
    def age(self) -> float:
        """Seconds since the run last wrote, by this machine's clock; negative if its clock differs."""
        written = [path.stat().st_mtime for name in WRITTEN if (path := self.folder / name).exists()]
        return time.time() - max(written) if written else 0.0

    @property
    def epoch_seconds(self) -> float | None:
        """Of an epoch like the last task's worth of them, with its share of evaluation, correlation and freezing."""
        recent = [line["seconds"] for line in self.lines[-self.epochs :] if "seconds" in line]
        if not recent:
            return None
        cost = self.results["cost"]
        others = sum(cost.get(f"{purpose}_seconds") or 0.0 for purpose in ("correlation", "rebuild", "eval"))
        factor = 1 + others / cost["train_seconds"] if cost.get("train_seconds") else 1.0
        return sum(recent) / len(recent) * factor


def read_snapshot(folder: Path) -> Snapshot:
    holder, alive = lock_holder(folder / ".lock")  # before the results: a run writes its end, and then lets go
    results = read_results(folder)
    lines, skipped = read_lines(folder / "metrics.jsonl")
    if results["status"] == "finished":  # of runs that are kept, often only the results are
        froze = {(log["task"], e["epoch"]): e["frozen"] for log in results["freezing"] for e in log["events"]}
        lines = [line | {"newly_frozen": froze.get((line["task"], line["epoch"]))} for line in epoch_lines(results)]
    return Snapshot(folder, results, lines, skipped, holder, alive)


def view(snapshot: Snapshot, quiet: float = 0.0) -> Group:
    """quiet: seconds without a new line, as the watcher saw them."""
    results = snapshot.results
    where = results["environment"].get("device_name") or results["environment"].get("device") or "unknown device"
    killed = snapshot.status == "running" and not snapshot.going
    head = Text(f"{results['name']}, seed {results.get('seed')}", style="bold")
    head.append(f"  {'not running any more' if killed else snapshot.status}, on {where}", style="not bold")
    rows: list[RenderableType] = [head, place_and_time_left(snapshot), latest_values(snapshot), unit_strip(snapshot)]
    for probe, found in results["probes"].items():
        if found["matrix"]:
            words = f"accuracy {percent(found.get('accuracy'))}, forgetting {percent(found.get('forgetting'))}"
            rows.append(Text(f"{probe} after task {len(found['matrix'])}: {words}"))
    return Group(*rows, *[Text(warning, "yellow") for warning in warnings(snapshot, quiet)])


def warnings(snapshot: Snapshot, quiet: float) -> Iterator[str]:
    """Why a run that calls itself running may not be; and lines that cannot be read."""
    silent = max(quiet, snapshot.age)
    if snapshot.going and snapshot.age < -CLOCKS_DIFFER:
        newer = show_seconds(-snapshot.age)
        yield f"the files are {newer} newer than now: the clock of the machine that writes them differs"
    if snapshot.going and silent > max(60.0, 10 * (snapshot.epoch_seconds or 60.0)):
        still = f"; process {snapshot.holder} still holds the run" if snapshot.alive else ": the run may have stopped"
        yield f"no new line for {show_seconds(silent)}{still}"
    if snapshot.status == "running" and not snapshot.going:
        verb = "learn" if snapshot.results.get("arrived") else "train --resume"
        ended = f"process {snapshot.holder} exited without updating its status"
        yield f"{ended}; `ptlf {verb} {snapshot.folder}` continues the run"
    if snapshot.skipped:
        yield f"{snapshot.skipped} lines of metrics.jsonl cannot be read"


def place_and_time_left(snapshot: Snapshot) -> Table:
    """The time left is told without a clock: the run may be on a machine whose clock differs."""
    done, total = len(snapshot.lines), max(snapshot.tasks * snapshot.epochs, 1)
    place = f"task {snapshot.last['task']}/{snapshot.tasks}, epoch {snapshot.last['epoch']}/{snapshot.epochs}"
    each = snapshot.epoch_seconds if snapshot.going else None
    left = "" if each is None else f"{show_seconds(each * (total - done))} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(place, ProgressBar(total=total, completed=done, width=28), f"{100 * done / total:.0f}%", left)
    return row


def latest_values(snapshot: Snapshot) -> Table:
    table, here = Table.grid(padding=(0, 2)), snapshot.here
    if not here:
        table.add_row("no epoch finished yet")
    for name in snapshot.last.get("loss", {}):
        losses = [line.get("loss", {}).get(name) for line in here]
        values = [value for value in losses if isinstance(value, int | float)]
        table.add_row(f"loss {name}", f"{values[-1]:.4f}" if values else str(losses[-1]), spark(values))
    if speeds := [line["views_per_second"] for line in here if "views_per_second" in line]:
        table.add_row("views/s", f"{speeds[-1]:,.0f}", spark(speeds))
    if frozen := [line.get("frozen", 0) for line in here]:
        table.add_row("frozen", f"{frozen[-1]}/{len(snapshot.results['units'])}", spark(frozen))
    return table


def spark(values: list[float], width: int = 40) -> str:
    """The last values as bars between their least and their greatest."""
    shown = values[-width:]
    low = min(shown, default=0.0)
    span = (max(shown, default=0.0) - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def unit_strip(snapshot: Snapshot) -> Text:
    """A box per unit from input to output, filled when frozen in the task at hand, and which froze last."""
    events = [(line["epoch"], line["newly_frozen"]) for line in snapshot.here if line.get("newly_frozen")]
    frozen = {unit for _, units in events for unit in units}
    text = Text("units   ")
    for unit in snapshot.results["units"]:
        text.append("■" if unit in frozen else "□", style="cyan" if unit in frozen else "dim")
    for epoch, units in events[-1:]:
        text.append(f"  epoch {epoch}: {', '.join(units)} froze")
    return text


def watch(
    folder: Path, once: bool = False, console: Console = console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Until the run has finished or failed; with `once`, or where output is no terminal, a single look."""
    once = once or not console.is_terminal
    while not once and not (folder / "results.json").exists() and (folder / "config.yaml").exists():
        sleep(EVERY)  # the run has just begun
    snapshot = read_snapshot(folder)
    if once:
        console.print(view(snapshot))
        return
    seen, since = len(snapshot.lines), time.monotonic()
    with Live(view(snapshot), console=console, auto_refresh=False) as live:
        while snapshot.going:
            sleep(EVERY)
            snapshot = read_snapshot(folder)
            if len(snapshot.lines) != seen:
                seen, since = len(snapshot.lines), time.monotonic()
            live.update(view(snapshot, time.monotonic() - since), refresh=True)
