"""A run watched from its files alone, so it may be on another machine: loss, speed, frozen units, time left."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ptlf.core.files import lock_holder
from ptlf.report.live import console
from ptlf.report.measures import show_seconds
from ptlf.report.tables import percent
from ptlf.run.results import Json, epoch_lines, read_lines, read_results

EVERY = 2.0  # seconds between two reads
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
        self.tasks, self.epochs = len(self.results["tasks"]), int(self.results["config"]["training"]["epochs"])
        self.last: Json = self.lines[-1] if self.lines else {"task": 1, "epoch": 0}
        self.killed = self.results["status"] == "running" and self.alive is False
        self.going = self.results["status"] == "running" and not self.killed

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
        lines = epoch_lines(results)
    return Snapshot(folder, results, lines, skipped, holder, alive)


def view(snapshot: Snapshot, quiet: float = 0.0) -> Text:
    """quiet: seconds without a new line, as the watcher saw them."""
    results, last, each = snapshot.results, snapshot.last, snapshot.epoch_seconds
    where = results["environment"].get("device_name") or results["environment"].get("device") or "unknown device"
    status = "not running any more" if snapshot.killed else results["status"]
    done, total = len(snapshot.lines), max(snapshot.tasks * snapshot.epochs, 1)
    place = f"task {last['task']}/{snapshot.tasks}, epoch {last['epoch']}/{snapshot.epochs}, {100 * done / total:.0f}%"
    if each is not None and snapshot.going:  # without a clock, as another machine's may differ
        place += f", {show_seconds(each * (total - done))} left"
    values = [f"{name} {value}" for name, value in last.get("loss", {}).items()]
    if "views_per_second" in last:
        values.append(f"{last['views_per_second']:,.0f} views/s")
    values += [f"{last.get('frozen', 0)}/{len(results['units'])} frozen"]
    rows = [f"{results['name']}, seed {results.get('seed')}: {status}, on {where}", place]
    rows += [", ".join(values) if snapshot.lines else "no epoch finished yet"]
    for probe, found in results["probes"].items():
        if found["matrix"]:
            words = f"accuracy {percent(found.get('accuracy'))}, forgetting {percent(found.get('forgetting'))}"
            rows.append(f"{probe} after task {len(found['matrix'])}: {words}")
    return Text("\n").join([*map(Text, rows), *(Text(warning, "yellow") for warning in warnings(snapshot, quiet))])


def warnings(snapshot: Snapshot, quiet: float) -> Iterator[str]:
    """Why a run that calls itself running may not be; and lines that cannot be read."""
    written = [path.stat().st_mtime for name in WRITTEN if (path := snapshot.folder / name).exists()]
    silent = max(quiet, time.time() - max(written, default=time.time()))
    if snapshot.going and silent > max(60.0, 10 * (snapshot.epoch_seconds or 60.0)):
        still = f"; process {snapshot.holder} still holds the run" if snapshot.alive else ": the run may have stopped"
        yield f"no new line for {show_seconds(silent)}{still}"
    if snapshot.killed:
        verb = "learn" if snapshot.results.get("arrived") else "train --resume"
        ended = f"process {snapshot.holder} exited without updating its status"
        yield f"{ended}; `ptlf {verb} {snapshot.folder}` continues the run"
    if snapshot.skipped:
        yield f"{snapshot.skipped} lines of metrics.jsonl cannot be read"


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
