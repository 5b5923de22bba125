"""Runs that were never trained: folders with a results.json as a run writes it, of any size, in no time."""

import functools
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from ptlf import evaluation
from ptlf.core.settings import as_dict, merge, nested
from ptlf.evaluation import summary
from ptlf.report.page import page
from ptlf.report.runs import read_comparison
from ptlf.run.config import Config, from_dict
from ptlf.run.recipes import name_of, recipe
from ptlf.run.results import SCHEMA, epoch_lines, to_columns


def results(name: str = "digits/simsiam/ptlf", *, tasks: int = 3, units: int = 4, seed: int = 0, **dotted: Any) -> dict:
    """`training__epochs=2` overrides a setting."""
    layers = [nested(k.replace("__", "."), v) for k, v in {"training__epochs": 6, "seed": seed, **dotted}.items()]
    config = as_dict(from_dict(merge(Config, recipe(name), merge(Config, {}, *layers))))
    draw = random.Random(f"{name}{seed}{sorted(dotted.items())}")
    names = [f"stages.{place}.conv" for place in range(units)]
    policy = config["freezing"]["policy"]["name"]
    freezing = [entry(draw, task, names, config) for task in range(2, tasks + 1) if policy != "none"]
    epochs = [
        line(draw, task, epoch, sum(e["epoch"] <= epoch for f in freezing if f["task"] == task for e in f["events"]))
        for task in range(1, tasks + 1)
        for epoch in range(1, config["training"]["epochs"] + 1)
    ]
    epochs[0]["seconds"] = epochs[min(1, len(epochs) - 1)]["seconds"]  # nothing is compiled
    return {
        "schema": SCHEMA,
        "ptlf_version": "0",
        "commit": "c0ffee",
        "uses_labels": config["objective"]["name"] == "supervised",
        "status": "finished",
        "name": name_of(config),
        "baseline": config["method"]["name"] == "lump" and policy == "none",
        "config": config,
        "environment": {"torch": "2", "device": "cpu", "device_name": "<machine>"},
        "seed": seed,
        "class_order": [str(c) for c in range(2 * tasks)],
        "tasks": [f"{2 * t}, {2 * t + 1}" for t in range(tasks)],
        "eval_splits": [f"{2 * t}, {2 * t + 1}" for t in range(tasks)],
        "units": names,
        "probes": {probe: accuracies(draw, tasks) for probe in ("knn_task", "knn_class")},
        "freezing": freezing,
        "cost": {
            "learning_seconds": sum(e["seconds"] for e in epochs) + 3.0,
            "train_seconds": sum(e["seconds"] for e in epochs), "correlation_seconds": 1.0, "rebuild_seconds": 0.1,
            "eval_seconds": 2.0, "backward_flops": sum(e["backward_flops"] for e in epochs),
            "kept_bytes": epochs[-1]["kept_bytes"], "peak_memory_bytes": None, "last_peak_memory_bytes": None,
            "per_task": [], "per_epoch": to_columns(epochs),
        },
    }  # fmt: skip


def pair() -> tuple[dict, dict]:
    """LUMP, and PTLF with 0.25 of its seconds, half its FLOPs, and of its bytes 0.80 on average, 0.60 after the first
    task, 0.75 at the end."""
    costs = (
        {"learning_seconds": 100.0, "backward_flops": 4 * 10**12, "kept_bytes": 80 * 2**20},
        {"learning_seconds": 25.0, "backward_flops": 2 * 10**12, "kept_bytes": 60 * 2**20},
    )
    lump, ptlf = results("digits/simsiam/lump"), results("digits/simsiam/ptlf")
    lump["cost"] |= costs[0] | {"mean_kept_bytes": 80.0 * 2**20}
    ptlf["cost"] |= costs[1] | {"mean_kept_bytes": 64.0 * 2**20}
    for run, kept in ((lump, 80 * 2**20), (ptlf, 48 * 2**20)):
        columns = run["cost"]["per_epoch"]
        columns["kept_bytes"] = [80 * 2**20 if task == 1 else kept for task in columns["task"]]
    return lump, ptlf


def on_gpu(made: dict, first: float, later: float) -> dict:
    """With peaks of GPU memory in MiB: in the epochs of the first task, and in those after it."""
    columns = made["cost"]["per_epoch"]
    columns["peak_memory_bytes"] = peaks = [int((first if task == 1 else later) * 2**20) for task in columns["task"]]
    made["cost"] |= {"peak_memory_bytes": max(peaks), "last_peak_memory_bytes": peaks[-1]}
    return made


def wait_for_compiler(made: dict, seconds: float) -> dict:
    """So much longer, in its first epoch."""
    cost = made["cost"]
    for key in ("learning_seconds", "train_seconds"):
        cost[key] += seconds
    cost["per_epoch"]["seconds"][0] += seconds
    return made


def accuracies(draw: random.Random, tasks: int) -> dict:
    matrix = [[draw.uniform(70, 99) if j <= i else None for j in range(tasks)] for i in range(tasks)]
    untrained = [draw.uniform(50, 70) for _ in range(tasks)]
    settings = {"k": 20, "temperature": 0.1, "similarity": "cosine", "bank": "some"}
    start = {"untrained": untrained, "untrained_accuracy": evaluation.accuracy([untrained])}
    return {"settings": settings, **start, **summary(matrix)}


def entry(draw: random.Random, task: int, units: list[str], config: dict) -> dict:
    ratios = {unit: draw.uniform(0.8, 1) for unit in units}
    order = sorted(units, key=lambda unit: -ratios[unit])[: max(1, len(units) * 2 // 5)]
    epochs = config["training"]["epochs"]
    events = [{"epoch": 2 + place * (epochs - 2) // len(order), "frozen": [u]} for place, u in enumerate(order)]
    made = {"task": task, "ratios": ratios, "order": order, "events": events}
    if config["freezing"]["update"] == "per-epoch":
        made["ratios_by_epoch"] = {"3": {unit: draw.uniform(0.8, 1) for unit in units if unit not in order[:1]}}
    return made


def line(draw: random.Random, task: int, epoch: int, frozen: int) -> dict:
    return {
        "task": task, "epoch": epoch, "loss": {"ssl": -draw.random()},
        "seconds": draw.uniform(1, 1.2) * (1 - 0.03 * frozen), "views_per_second": 1000.0, "frozen": frozen, "steps": 5,
        "kept_bytes": 2**20 * (20 - frozen), "backward_flops": 10**9 * (30 - frozen), "peak_memory_bytes": None,
    }  # fmt: skip


def write(folder: Path, made: dict, gallery: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(made))
    (folder / "config.yaml").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in epoch_lines(made)))
    if gallery is not None:
        (folder / "gallery.json").write_text(json.dumps(gallery))
    return folder


def printed(show: Callable[..., None], *arguments: Any, width: int = 160) -> str:
    """What `show` prints on a console."""
    console = Console(width=width, file=io.StringIO())
    show(console, *arguments)
    return console.file.getvalue()


def table_rows(show: Callable[..., None], *arguments: Any) -> dict[str, list[str]]:
    """The cells of a printed table by the first one."""
    lines = [line.split("│")[1:-1] for line in printed(show, *arguments).splitlines() if "│" in line]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


@functools.cache
def page_of_eight() -> str:
    """Eight settings on 20 tasks of 200 epochs, 20 units."""
    size = {"tasks": 20, "units": 20, "training__epochs": 200}
    runs = [results(f"digits/simsiam/{method}", **size) for method in ("lump", "finetune")]
    runs += [results(freezing__final=share, **size) for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    with TemporaryDirectory() as root:
        return page(read_comparison([write(Path(root) / str(place), run) for place, run in enumerate(runs)]))
