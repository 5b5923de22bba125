"""Results as tables in the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ptlf.report.runs import Group, RunRecord, doubt_about_seconds, unsteady


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def show_matrix(console: Console, probe: str, values: dict[str, Any], eval_splits: list[str]) -> None:
    """One probe's accuracy matrix: a row per task trained, a column per split, and the untrained encoder on top."""
    settings = values["settings"]
    k = f", k = {settings['k']}" if "k" in settings else ""
    console.print(f"\n{probe}: accuracy in %{k}, bank: {settings['bank']}", highlight=False)
    table = Table()
    table.add_column("after training on")
    for split in eval_splits:
        table.add_column(split if len(split) <= 14 else split[:13] + "…", justify="right")
    if values.get("untrained"):
        table.add_row("nothing (random encoder)", *map(percent, values["untrained"]), style="dim")
    for number, row in enumerate(values["matrix"], start=1):
        name = "all tasks" if len(values["matrix"]) == 1 else f"task {number}"
        table.add_row(name, *["" if value is None else percent(value) for value in row])
    console.print(table)


def over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of runs that differ in the seed alone: means, with the probes' spread (sample standard deviation)."""
    if len(runs) == 1:
        return runs[0]
    group = Group([RunRecord(Path(), results) for results in runs])
    probes: dict[str, dict[str, float | None]] = {}
    for probe in runs[0]["probes"]:
        names = ("accuracy", "forgetting", "untrained_accuracy")
        probes[probe] = {name: group.mean("probes", probe, name) for name in names}
        probes[probe] |= {f"{name}_spread": group.spread("probes", probe, name) for name in names}
    cost = {name: group.mean("cost", name) for _, name, _ in COSTS}
    return {"probes": probes, "cost": cost, "unsteady": max(unsteady(run.epochs) for run in group.runs)}


def score(values: dict[str, Any], name: str) -> str:
    """A probe's figure, with its spread over seeds where there are several."""
    spread = values.get(f"{name}_spread")
    return percent(values.get(name)) + ("" if spread is None else f" ±{spread:.2f}")


def show_runs(
    console: Console, runs: dict[str, dict[str, Any]], baseline: str | None = None, title: str = "What it came to"
) -> None:
    """Up to three runs side by side with all figures; more of them as a list with the main ones."""
    (show_side_by_side if len(runs) <= 3 else show_as_list)(console, runs, baseline, title)
    for name, results in runs.items():
        share = results["unsteady"] if "unsteady" in results else unsteady(results["cost"]["per_epoch"])
        if doubt := doubt_about_seconds(share):
            console.print(f"{name}: {doubt}", highlight=False, soft_wrap=True)


def show_as_list(console: Console, runs: dict[str, dict[str, Any]], baseline: str | None, title: str) -> None:
    """One row per run; costs relative to the baseline run, or as they are without one."""
    common, short = shortened(list(runs))
    base = runs[baseline]["cost"] if baseline in runs else None
    named = f"{title}: {common}" + (f"; costs relative to {baseline}" if base else "")
    table = Table(title=named, title_justify="left", padding=(0, 1 if console.width >= 100 else 0))
    table.add_column("run", min_width=max(map(len, short)))
    for column in ("task\n%", "for-\ngets", "class\n%", "for-\ngets", "train", "corr.", "FLOPs", "kept"):
        table.add_column(column, justify="right")
    for name, results in zip(short, runs.values(), strict=True):
        cells = []
        for probe in ("knn_task", "knn_class"):
            values = results["probes"].get(probe, {})
            cells += [score(values, "accuracy"), score(values, "forgetting")]
        cost = results["cost"]
        for figure in ("learning_seconds", "correlation_seconds", "backward_flops", "kept_bytes"):
            form = next(form for _, key, form in COSTS if key == figure)
            relative = _relative(cost, base, figure, form)
            cells.append(relative.split()[-1] if relative.endswith("x") else relative)
        table.add_row(name, *cells)
    console.print(table)


def shortened(names: list[str]) -> tuple[str, list[str]]:
    """What all recipes share, and each one without it."""
    parts = [name.split("/") for name in names]
    shared = [len({part[i] for part in parts}) == 1 for i in range(min(map(len, parts)))]
    common = "/".join(name for name, same in zip(parts[0], shared, strict=False) if same)
    short = [[p for p, same in itertools.zip_longest(part, shared, fillvalue=False) if not same] for part in parts]
    return common, ["/".join(map(str, rest)) or name for rest, name in zip(short, names, strict=True)]


def show_side_by_side(console: Console, runs: dict[str, dict[str, Any]], baseline: str | None, title: str) -> None:
    """One column per run, one row per figure; costs also relative to the baseline run where there is one."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    base = runs[baseline]["cost"] if baseline in runs else None
    probes = list(dict.fromkeys(probe for results in runs.values() for probe in results["probes"]))
    for probe in probes:
        values = [results["probes"].get(probe, {}) for results in runs.values()]
        if any(values):
            for row, name in (
                ("accuracy, %", "accuracy"),
                ("forgetting", "forgetting"),
                ("random encoder, %", "untrained_accuracy"),
            ):
                table.add_row(f"{probe} {row}", *[score(value, name) for value in values])
            table.add_section()
    for row, name, form in COSTS:
        cells = [_relative(results["cost"], base, name, form) for results in runs.values()]
        if any(cell != "-" for cell in cells):
            table.add_row(row, *cells)
    console.print(table)


COSTS: list[tuple[str, str, Callable[[float], str]]] = [
    ("training, all in all", "learning_seconds", seconds),
    ("  the steps", "train_seconds", seconds),
    ("  correlation", "correlation_seconds", seconds),
    ("  freezing and rebuilding", "rebuild_seconds", seconds),
    ("evaluation", "eval_seconds", seconds),
    ("measuring bytes and FLOPs", "measuring_seconds", seconds),
    ("backward FLOPs", "backward_flops", lambda flops: f"{flops / 1e12:.3g} T"),
    ("kept for backward, mean", "mean_kept_bytes", lambda size: f"{size / 2**20:.1f} MiB"),
    ("kept for backward, last epoch", "kept_bytes", lambda size: f"{size / 2**20:.1f} MiB"),
    ("peak GPU memory, last epoch", "last_peak_memory_bytes", lambda size: f"{size / 2**20:.0f} MiB"),
]
RELATIVE = (
    "learning_seconds",
    "train_seconds",
    "backward_flops",
    "mean_kept_bytes",
    "kept_bytes",
    "last_peak_memory_bytes",
)


def _relative(cost: dict[str, Any], base: dict[str, Any] | None, name: str, form: Callable[[float], str]) -> str:
    value = cost.get(name)
    if value is None:
        return "-"
    if base is None or base is cost or name not in RELATIVE or not base.get(name):
        return form(value)
    return f"{form(value)}  {value / base[name]:.2f}x"


def show_results(console: Console, results: dict[str, Any], folder: Any, *, brief: bool = False) -> None:
    """A finished run: its accuracy matrices, one line of figures, and where the files are."""
    for probe, values in results["probes"].items():
        if not brief or (probe == "knn_class" and len(results["eval_splits"]) <= 10):
            show_matrix(console, probe, values, results["eval_splits"])
    if not brief:
        show_runs(console, {results["config"]["recipe"] or "run": results})
    if not results["probes"]:
        console.print("not evaluated: no labelled test images (or evaluation.enabled is false)")
    console.print(f"files: {folder}/results.json, metrics.jsonl, config.yaml, encoder.safetensors", highlight=False)


def show_bench(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """What freezing saves: each figure, and beside it its ratio to nothing frozen."""
    table = Table(title=title, title_justify="left")
    table.add_column("frozen")
    table.add_column("how")
    for column in ("kept, MiB", "ratio", "backward\nGFLOPs", "ratio", "step, ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["frozen"],
            row["way"],
            f"{row['kept_bytes'] / 2**20:.1f}",
            f"{row['kept_bytes_ratio']:.2f}",
            f"{row['backward_flops'] / 1e9:.2f}",
            f"{row['backward_flops_ratio']:.3f}",
            f"{1000 * row['seconds']:.0f}",
            f"{row['seconds_ratio']:.2f}",
        )
    console.print(table)


def show_steps(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """A training step by freeze stage, costs also relative to the first row."""
    table = Table(title=title, title_justify="left")
    table.add_column("frozen", justify="right", no_wrap=True)
    for heading, _, _ in STEP:
        table.add_column(heading, justify="right")
    for row in rows:
        pairs = {f"{key}_ratio": (row[key], rows[0][key]) for key in ("step_ms", "kept_bytes", "peak_memory_bytes")}
        ratios = {key: value / base for key, (value, base) in pairs.items() if value is not None and base}
        cells = [_beside(row | ratios, key, form, row is not rows[0]) for _, key, form in STEP]
        table.add_row(str(row["frozen"]), *cells)
    console.print(table)


def show_comparison(console: Console, comparison: dict[str, Any]) -> None:
    """The step by run and freeze stage, and below it the overheads; costs also relative to the first run."""
    runs = comparison["runs"]
    common, names = shortened([run["run"] for run in runs])
    names = names if len(names) > 1 else [common.split("/")[-1]]
    device = runs[0]["environment"]["device_name"]
    table = Table(title=f"{common} on {device}; x: relative to {names[0]} in the same tasks", title_justify="left")
    table.add_column("run", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    for heading, _, _ in STAGE:
        table.add_column(heading, justify="right")
    for name, run in zip(names, runs, strict=True):
        table.add_section()
        for row in run["stages"]:
            cells = [_beside(row, key, form, run is not runs[0]) for _, key, form in STAGE]
            table.add_row(name if row is run["stages"][0] else "", row["stage"], *cells)
    console.print(table)
    below = Table()
    below.add_column("")
    for name in names:
        below.add_column(name, justify="right")
    for label, key, form in OVERHEADS:
        below.add_row(label, *[_beside(run["overheads"], key, form, run is not runs[0]) for run in runs])
    console.print(below)


def _beside(row: dict[str, Any], key: str, form: Callable[[float], str], relative: bool) -> str:
    times = row.get(f"{key}_ratio") if relative else None
    return "-" if row[key] is None else form(row[key]) + (f"  {times:.2f}x" if times is not None else "")


MEMORY: list[tuple[str, str, Callable[[float], str]]] = [
    ("views per ms", "views_per_second", lambda value: f"{value / 1000:.1f}"),
    ("kept, MiB", "kept_bytes", lambda size: f"{size / 2**20:.0f}"),
    ("peak, MiB", "peak_memory_bytes", lambda size: f"{size / 2**20:.0f}"),
]
STEP: list[tuple[str, str, Callable[[float], str]]] = [
    ("step, ms", "step_ms", "{:.2f}".format),
    ("±", "step_ms_spread", "{:.2f}".format),
    ("device, ms", "device_ms", "{:.2f}".format),
    *MEMORY,
    ("rebuild", "rebuild_seconds", seconds),
]
STAGE: list[tuple[str, str, Callable[[float], str]]] = [
    ("steps", "steps", str),
    ("step, ms", "step_ms", "{:.2f}".format),
    ("median", "median_step_ms", "{:.2f}".format),
    *MEMORY,
]
OVERHEADS: list[tuple[str, str, Callable[[float], str]]] = [
    ("training steps", "train_seconds", seconds),
    ("correlation", "correlation_seconds", seconds),
    ("freezing and rebuilding", "rebuild_seconds", seconds),
    ("checkpoints", "checkpoint_seconds", seconds),
    ("evaluation", "eval_seconds", seconds),
    ("measuring bytes and FLOPs", "measuring_seconds", seconds),
    ("learning after the first task", "later_learning_seconds", seconds),
    ("  of it correlation", "later_correlation_share", "{:.1%}".format),
    ("whole run", "wall_seconds", seconds),
    ("GPU waits for the host", "host_share", "{:.1%}".format),
    ("knn_task accuracy, %", "knn_task_accuracy", percent),
    ("knn_task forgetting", "knn_task_forgetting", percent),
    ("knn_class accuracy, %", "knn_class_accuracy", percent),
    ("knn_class forgetting", "knn_class_forgetting", percent),
]


def show_kernels(console: Console, rows: list[dict[str, Any]], most: int = 15) -> None:
    """What took the time of a step, for each stage that was profiled."""
    for row in rows:
        kernels = row.get("kernels", [])
        total = sum(kernel["ms"] for kernel in kernels)
        if not total:
            continue
        table = Table(title=f"{row['frozen']} frozen: {total:.2f} ms in {len(kernels)} kinds", title_justify="left")
        table.add_column("kernel", no_wrap=True, max_width=60)
        for column in ("calls", "ms", "share"):
            table.add_column(column, justify="right")
        for kernel in kernels[:most]:
            share = f"{kernel['ms'] / total:.1%}"
            table.add_row(kernel["name"], f"{kernel['calls']:.0f}", f"{kernel['ms']:.3f}", share)
        console.print(table)
