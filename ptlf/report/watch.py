"""A run watched from its files alone, so it may be on another machine: loss, speed, frozen units, time left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ptlf.core.errors import UserError
from ptlf.report.live import console
from ptlf.report.measures import seconds
from ptlf.report.tables import percent
from ptlf.run.results import Json, epoch_lines, read_results

BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Snapshot:
    """What the files say at one moment."""

    results: Json
    lines: list[Json]
    skipped: int = 0  # lines that could not be read

    def __post_init__(self) -> None:
        self.status: str = self.results["status"]
        self.units: list[str] = list(self.results["units"])
        self.tasks, self.epochs = len(self.results["tasks"]), int(self.results["config"]["training"]["epochs"])
        self.total = self.tasks * self.epochs

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

    @property
    def remaining(self) -> float | None:
        """Seconds. No clock is asked: the run may be on a machine whose clock differs."""
        each = self.epoch_seconds
        return None if each is None else each * (self.total - len(self.lines))


def read_snapshot(folder: Path) -> Snapshot:
    results = read_results(folder)
    try:
        lines, skipped = read_lines(folder / "metrics.jsonl")
        if results["status"] == "finished":  # of runs that are kept, often only the results are
            lines = epoch_lines(results)
            froze = {(log["task"], e["epoch"]): e["frozen"] for log in results["freezing"] for e in log["events"]}
            lines = [line | {"newly_frozen": froze.get((line["task"], line["epoch"]))} for line in lines]
        snapshot = Snapshot(results, lines, skipped)
        view(snapshot)  # whatever it needs is there
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder} holds a damaged run: {error}") from None
    return snapshot


def read_lines(path: Path) -> tuple[list[Json], int]:
    """Whole lines only: the last one may still be on its way."""
    lines, skipped = [], 0
    text = path.read_text() if path.exists() else ""
    for raw in text.split("\n")[:-1]:
        try:
            line = json.loads(raw)
            lines.append({"task": line["task"], "epoch": line["epoch"], **line})
        except (ValueError, KeyError, TypeError):
            skipped += 1
    return lines, skipped


def view(snapshot: Snapshot, quiet: float = 0.0) -> Group:
    """quiet: seconds without a new line, as the watcher saw them."""
    rows: list[RenderableType] = [head(snapshot), bar(snapshot), figures(snapshot)]
    if snapshot.units:
        rows.append(unit_strip(snapshot))
    rows += accuracies(snapshot)
    if snapshot.status == "running" and quiet > max(60.0, 10 * (snapshot.epoch_seconds or 60.0)):
        rows.append(Text(f"no new line for {seconds(quiet)}: the run may have stopped", "yellow"))
    if snapshot.skipped:
        rows.append(Text(f"{snapshot.skipped} lines of metrics.jsonl cannot be read", "yellow"))
    return Group(*rows)


def head(snapshot: Snapshot) -> Text:
    environment = snapshot.results.get("environment", {})
    where = environment.get("device_name") or environment.get("device") or "unknown device"
    text = Text(f"{snapshot.results['name']}, seed {snapshot.results.get('seed')}", style="bold")
    return text.append(f"  {snapshot.status}, on {where}", style="not bold")


def bar(snapshot: Snapshot) -> Table:
    done, total = len(snapshot.lines), max(snapshot.total, 1)
    last = snapshot.lines[-1] if snapshot.lines else {"task": 1, "epoch": 0}
    place = f"task {last['task']}/{snapshot.tasks}, epoch {last['epoch']}/{snapshot.epochs}"
    left = snapshot.remaining if snapshot.status == "running" else None
    row = Table.grid(padding=(0, 1))
    words = "" if left is None else f"{seconds(left)} left"
    row.add_row(place, ProgressBar(total=total, completed=done, width=28), f"{100 * done / total:.0f}%", words)
    return row


def figures(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    if not snapshot.lines:
        table.add_row("no epoch finished yet")
        return table
    last = snapshot.lines[-1]
    here = [line for line in snapshot.lines if line["task"] == last["task"]]
    for name in last.get("loss", {}):
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
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def unit_strip(snapshot: Snapshot) -> Text:
    """A box per unit from input to output, filled when frozen in the task at hand, and which froze last."""
    task = snapshot.lines[-1]["task"] if snapshot.lines else 1
    events = [(line["epoch"], line.get("newly_frozen") or []) for line in snapshot.lines if line["task"] == task]
    frozen = {unit for _, units in events for unit in units}
    text = Text("units   ")
    for unit in snapshot.units:
        text.append("■" if unit in frozen else "□", style="cyan" if unit in frozen else "dim")
    if frozen:
        epoch, units = [(epoch, units) for epoch, units in events if units][-1]
        text.append(f"  epoch {epoch}: {', '.join(units)} froze")
    return text


def accuracies(snapshot: Snapshot) -> list[Text]:
    rows = []
    for probe, found in snapshot.results.get("probes", {}).items():
        if found.get("matrix"):
            words = f"accuracy {percent(found.get('accuracy'))}, forgetting {percent(found.get('forgetting'))}"
            rows.append(Text(f"{probe} after task {len(found['matrix'])}: {words}"))
    return rows


def watch(
    folder: Path, once: bool = False, console: Console = console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Until the run has finished or failed; with `once`, or where output is no terminal, a single look."""
    every, clock = 2.0, time.monotonic  # seconds
    once = once or not console.is_terminal
    while not once and not (folder / "results.json").exists() and (folder / "config.yaml").exists():
        sleep(every)  # the run has just begun
    snapshot = read_snapshot(folder)
    if once:
        console.print(view(snapshot))
        return
    seen, since = len(snapshot.lines), clock()
    with Live(view(snapshot), console=console, auto_refresh=False) as live:
        while snapshot.status == "running":
            sleep(every)
            snapshot = read_snapshot(folder)
            if len(snapshot.lines) != seen:
                seen, since = len(snapshot.lines), clock()
            live.update(view(snapshot, clock() - since), refresh=True)
