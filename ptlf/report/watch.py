"""A run watched from its files alone, so it may be on another machine: loss, speed, frozen units, time left."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ptlf.core.errors import quoted
from ptlf.core.files import lock_holder
from ptlf.report.live import console
from ptlf.report.measures import duration
from ptlf.report.tables import percent
from ptlf.run.results import Json, epoch_lines, read_lines, read_results

EVERY = 2.0  # seconds between two reads


@dataclass
class Snapshot:
    """What the files say at one moment."""

    folder: Path
    results: Json
    lines: list[Json]
    holder: str  # the process that trains, as "PROCESS on MACHINE"
    alive: bool | None  # whether it still holds the run's lock; None: this machine cannot tell
    status: str  # of the results, or killed


def read_snapshot(folder: Path) -> Snapshot:
    holder, alive = lock_holder(folder / ".lock")  # before the results: a run writes its end, and then lets go
    results = read_results(folder)
    status = "killed" if results["status"] == "running" and alive is False else results["status"]
    # Of runs that are kept, often only the results are.
    lines = epoch_lines(results) if status == "finished" else read_lines(folder / "metrics.jsonl")
    return Snapshot(folder, results, lines, holder, alive, status)


def view(snapshot: Snapshot) -> Text:
    results, cost, lines = snapshot.results, snapshot.results["cost"], snapshot.lines
    tasks, epochs = len(results["tasks"]), results["config"]["training"]["epochs"]
    last: Json = lines[-1] if lines else {"task": 1, "epoch": 0}
    where = results["environment"].get("device_name") or results["environment"].get("device") or "unknown device"
    share = 100 * len(lines) / max(tasks * epochs, 1)
    place, each = f"task {last['task']}/{tasks}, epoch {last['epoch']}/{epochs}, {share:.0f}%", 0.0
    if recent := [line["seconds"] for line in lines[-epochs:] if "seconds" in line]:
        # As long as a task's worth of the last epochs, with their share of evaluation, correlation and freezing.
        others = sum(cost.get(f"{purpose}_seconds") or 0.0 for purpose in ("correlation", "rebuild", "eval"))
        each = sum(recent) / len(recent) * (1 + others / (cost.get("train_seconds") or float("inf")))
        if snapshot.status == "running":  # without a clock, as another machine's may differ
            place += f", {duration(each * (tasks * epochs - len(lines)))} left"
    values = [f"{name} {value}" for name, value in last.get("loss", {}).items()]
    values += [f"{last['views_per_second']:,.0f} views/s"] if "views_per_second" in last else []
    values += [f"{last.get('frozen', 0)}/{len(results['units'])} frozen"]
    rows = [f"{results['name']}, seed {results['seed']}: {snapshot.status}, on {where}", place]
    rows += [", ".join(values) if lines else "no epoch finished yet"]
    for probe, found in results["probes"].items():
        if found["matrix"]:
            words = f"accuracy {percent(found.get('accuracy'))}, forgetting {percent(found.get('forgetting'))}"
            rows.append(f"{probe} after task {len(found['matrix'])}: {words}")
    return Text("\n").join([*map(Text, rows), *(Text(words, "yellow") for words in warnings(snapshot, each))])


def warnings(snapshot: Snapshot, each: float) -> list[str]:
    """Why a run that calls itself running may not be. each: seconds of an epoch."""
    found, paths = [], [snapshot.folder / name for name in ("metrics.jsonl", "results.json")]
    silent = time.time() - max(path.stat().st_mtime if path.exists() else 0.0 for path in paths)
    if snapshot.status == "running" and silent > max(60.0, 10 * (each or 60.0)):
        still = f"; process {snapshot.holder} still holds the run" if snapshot.alive else ": the run may have stopped"
        found.append(f"no new line for {duration(silent)}{still}")
    if snapshot.status == "killed":
        again = f"ptlf {'learn' if snapshot.results.get('arrived') else 'train --resume'} {quoted(snapshot.folder)}"
        found.append(f"process {snapshot.holder} exited without updating its status; `{again}` continues the run")
    return found


def watch(
    folder: Path, once: bool = False, console: Console = console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Until the run has finished or failed; with `once`, or where output is no terminal, a single look."""
    once = once or not console.is_terminal
    while not once and not (folder / "results.json").exists() and (folder / "config.yaml").exists():
        sleep(EVERY)  # the run has just begun
    snapshot = read_snapshot(folder)
    if once:
        return console.print(view(snapshot))
    with Live(view(snapshot), console=console, auto_refresh=False) as live:
        while snapshot.status == "running":
            sleep(EVERY)
            snapshot = read_snapshot(folder)
            live.update(view(snapshot), refresh=True)
