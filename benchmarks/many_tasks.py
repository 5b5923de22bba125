"""Does the cost of a task grow with the number of tasks learnt? 200 small ones, one after the other, in one process.

    python benchmarks/many_tasks.py

Every task is a new set of noise images with labels and test images; what they show does not matter for what they cost.
Tested on the last 5 tasks. Every 20 tasks, a fresh process opens the run and says how long that took. Writes
results/bench/many-tasks-cpu.json and docs/pictures/many-tasks.png; `--plot` only draws.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptlf import Learner
from ptlf.core.phases import Watcher
from ptlf.run.record import environment, source_commit
from ptlf.run.results import write_json

ROOT = Path(__file__).parent.parent
FIGURES, PICTURE = ROOT / "results/bench/many-tasks-cpu.json", ROOT / "docs/pictures/many-tasks.png"
EVERY = 20  # tasks between two fresh starts
SETTINGS: dict[str, Any] = {
    "encoder": "resnet18-mini",
    "method": "ptlf",
    "size": 16,
    "device": "cpu",
    "objective.projection": 128,
    "training": {"epochs": 2, "batch": 32},
    "memory.size": 64,
    "freezing.batches": 2,
    "views": {"name": "digits", "memory": "digits"},
    "probes.knn_class.enabled": False,  # compares with all classes seen: its cost grows with them
    "evaluation": {"tasks": "last:5", "gallery": False},
}
OPEN = """
import sys, time, torch
torch.set_num_threads(1)
from ptlf import Learner
from ptlf.run.loop import Run
started = time.process_time()
learner = Learner.load(sys.argv[1])
run = Run(learner.config, learner.folder)
run.load_checkpoint()
print(time.process_time() - started)
"""


def images_of(task: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """64 training and 32 test images of two classes, 16 px."""
    random = np.random.default_rng(task)
    pixels = random.integers(0, 256, (96, 16, 16, 3), dtype=np.uint8)
    labels = np.array([f"class {2 * task + number % 2}" for number in range(96)])
    return {"train": (pixels[:64], labels[:64]), "test": (pixels[64:], labels[64:])}


def start_up(folder: Path) -> float:
    """CPU seconds that a fresh process needs, once torch is imported, to be ready for the next step."""
    done = subprocess.run([sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def run_bytes(folder: Path) -> int:
    """All files but the packed images."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if "tasks" not in path.relative_to(folder).parts)


def measure(tasks: int) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        learner = Learner(out=Path(place) / "run", **SETTINGS)
        for task in range(tasks):
            started, used = time.perf_counter(), time.process_time()
            learner.learn(images_of(task), name=f"task{task + 1}", watcher=Watcher())
            row = {
                "task": task + 1,
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - used,
            }
            row |= {"peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
            row |= {"disk_bytes": run_bytes(learner.folder), "start_seconds": None}
            if (task + 1) % EVERY == 0:
                row["start_seconds"] = statistics.median(start_up(learner.folder) for _ in range(3))
            rows.append(row)
            print(row, flush=True)
        largest = {
            path.name: path.stat().st_size for path in learner.folder.rglob("*.json*") if "tasks" not in path.parts
        }
        newest = max((learner.folder / "checkpoints").glob("after-*")).stat().st_size
    where = environment(torch.device("cpu"))
    sizes = {**largest, "checkpoint": newest}
    return {"commit": source_commit(), "environment": where, "settings": SETTINGS, "files_bytes": sizes, "rows": rows}


def draw(figures: dict[str, Any]) -> None:
    from matplotlib import pyplot

    rows = figures["rows"]
    panels = [
        ("CPU seconds per task", "cpu_seconds", 1.0),
        ("CPU seconds to start again", "start_seconds", 1.0),
        ("peak memory of the process, MiB", "peak_rss_bytes", 2.0**20),
        ("on disk, without the images, MiB", "disk_bytes", 2.0**20),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 2.8), constrained_layout=True)
    for axis, (title, key, unit) in zip(axes, panels, strict=True):
        points = [(row["task"], row[key] / unit) for row in rows if row[key] is not None]
        axis.plot(*zip(*points, strict=True), color="#3366aa", linewidth=1, marker="o" if len(points) < 50 else None)
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tasks learnt")
        axis.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--plot", action="store_true", help="draw what was measured before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.plot:
        write_json(FIGURES, measure(arguments.tasks))
    draw(json.loads(FIGURES.read_text()))
