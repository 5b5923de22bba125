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
from ptlf.report.measures import seconds
from ptlf.report.tables import percent
from ptlf.run.results import Json, epoch_lines, read_lines, read_results

BARS = "▁▂▃▄▅▆▇█"
EVERY = 2.0  # seconds between two looks
CLOCKS_DIFFER = 30.0  # seconds by which a file may be newer than now
WRITTEN = ("metrics.jsonl", "results.json")  # what a run writes as it goes


@dataclass
class Snapshot:
    """What the files say at one moment."""

    results: Json
    lines: list[Json]
    skipped: int = 0  # lines that could not be read
    folder: Path = Path()
    holder: str = ""  # the process that trains, as "PROCESS on MACHINE"
    alive: bool | None = None  # whether it still holds the run's lock; None: this machine cannot tell
    age: float | None = None  # seconds since the run last wrote, by this machine's clock; negative if its clock differs

    def __post_init__(self) -> None:
        self.status: str = self.results["status"]
        self.units: list[str] = list(self.results["units"])
        self.tasks, self.epochs = len(self.results["tasks"]), int(self.results["config"]["training"]["epochs"])
        self.last: Json = self.lines[-1] if self.lines else {"task": 1, "epoch": 0}
        self.here = [line for line in self.lines if line["task"] == self.last["task"]]  # epochs of the task at hand

    @property
    def ended(self) -> bool:
        """Whether nobody trains although nothing says that the run has stopped: its process was killed."""
        return self.status == "running" and self.alive is False

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
        found = epoch_lines(results)
        lines = [line | {"newly_frozen": froze.get((line["task"], line["epoch"]))} for line in found]
    return Snapshot(results, lines, skipped, folder, holder, alive, age_of(folder))


def age_of(folder: Path) -> float | None:
    written = [path.stat().st_mtime for name in WRITTEN if (path := folder / name).exists()]
    return time.time() - max(written) if written else None


def view(snapshot: Snapshot, quiet: float = 0.0) -> Group:
    """quiet: seconds without a new line, as the watcher saw them."""
    environment = snapshot.results.get("environment", {})
    where = environment.get("device_name") or environment.get("device") or "unknown device"
    head = Text(f"{snapshot.results['name']}, seed {snapshot.results.get('seed')}", style="bold")
    status = "not running any more" if snapshot.ended else snapshot.status
    head.append(f"  {status}, on {where}", style="not bold")
    rows: list[RenderableType] = [head, progress(snapshot), figures(snapshot)]
    if snapshot.units:
        rows.append(unit_strip(snapshot))
    for probe, found in snapshot.results.get("probes", {}).items():
        if found.get("matrix"):
            words = f"accuracy {percent(found.get('accuracy'))}, forgetting {percent(found.get('forgetting'))}"
            rows.append(Text(f"{probe} after task {len(found['matrix'])}: {words}"))
    rows += [Text(warning, "yellow") for warning in doubts(snapshot, quiet)]
    if snapshot.skipped:
        rows.append(Text(f"{snapshot.skipped} lines of metrics.jsonl cannot be read", "yellow"))
    return Group(*rows)


def doubts(snapshot: Snapshot, quiet: float) -> Iterator[str]:
    """Why a run that calls itself running may not be."""
    if snapshot.status != "running":
        return
    age = snapshot.age or 0.0
    if snapshot.ended:
        verb = "learn" if snapshot.results.get("arrived") else "train --resume"
        yield f"process {snapshot.holder} has ended without a word; `ptlf {verb} {snapshot.folder}` goes on"
        return
    if age < -CLOCKS_DIFFER:
        yield f"the files are {seconds(-age)} newer than now: the clock of the machine that writes them differs"
    silent = max(quiet, age)
    if silent > max(60.0, 10 * (snapshot.epoch_seconds or 60.0)):
        still = f"; process {snapshot.holder} still holds the run" if snapshot.alive else ": the run may have stopped"
        yield f"no new line for {seconds(silent)}{still}"


def progress(snapshot: Snapshot) -> Table:
    """The time left is told without a clock: the run may be on a machine whose clock differs."""
    done, total = len(snapshot.lines), max(snapshot.tasks * snapshot.epochs, 1)
    place = f"task {snapshot.last['task']}/{snapshot.tasks}, epoch {snapshot.last['epoch']}/{snapshot.epochs}"
    each = snapshot.epoch_seconds if snapshot.status == "running" and not snapshot.ended else None
    left = "" if each is None else f"{seconds(each * (total - done))} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(place, ProgressBar(total=total, completed=done, width=28), f"{100 * done / total:.0f}%", left)
    return row


def figures(snapshot: Snapshot) -> Table:
    table, here = Table.grid(padding=(0, 2)), snapshot.here
    if not here:
        table.add_row("no epoch finished yet")
        return table
    for name in snapshot.last.get("loss", {}):
        losses = [line.get("loss", {}).get(name) for line in here]
        values = [value for value in losses if isinstance(value, int | float)]
        table.add_row(f"loss {name}", f"{values[-1]:.4f}" if values else str(losses[-1]), spark(values))
    if speeds := [line["views_per_second"] for line in here if "views_per_second" in line]:
        table.add_row("views/s", f"{speeds[-1]:,.0f}", spark(speeds))
    frozen = [line.get("frozen", 0) for line in here]
    table.add_row("frozen", f"{frozen[-1]}/{len(snapshot.units)}", spark(frozen))
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
    for unit in snapshot.units:
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
        while snapshot.status == "running" and not snapshot.ended:
            sleep(EVERY)
            snapshot = read_snapshot(folder)
            if len(snapshot.lines) != seen:
                seen, since = len(snapshot.lines), time.monotonic()
            live.update(view(snapshot, time.monotonic() - since), refresh=True)
