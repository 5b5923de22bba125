"""Many seeds of small runs: what the paper claims, and which method is best, with intervals.

    python benchmarks/evidence.py run --out FILE.jsonl [--arms ARM ...] [--seeds N] [--jobs N] [settings]
    python benchmarks/evidence.py table FILE.jsonl

The protocol is Split CIFAR-10 with `resnet18-mini`, half of the images and 40 epochs: 15,800 steps of
64 images. A run that FILE has already is not repeated; with --folder, interrupted runs continue. Settings, such as
--training.epochs 10, hold for all runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from ptlf.report.intervals import interval

PROTOCOL = (
    "--encoder.name resnet18-mini --stream.per_class 2500 --training.epochs 40 --training.batch 64 --training.lr 0.12 "
    "--evaluation.gallery false"
)
PREFIX = "--freezing.policy.name ascending --freezing.shape constant"


def prefix(share: float) -> str:
    return f"{PREFIX} --freezing.initial {share} --freezing.final {share}"


ARMS: dict[str, str] = {  # METHOD and settings, with SimSiam
    "finetune": "finetune",
    "lump": "lump",
    "ptlf": "ptlf",
    "ascending": "ptlf --freezing.policy.name ascending",
    "random": "ptlf --freezing.policy.name random",
    "ptlf-cost": "ptlf-cost",
    "ptlf-deep": "ptlf-deep",
    "per-epoch": "ptlf --freezing.update per-epoch",
    "below-0.965": "ptlf --freezing.threshold 0.965 --freezing.reach false",
    **{f"ratio-{share}": f"ptlf --freezing.final {share}" for share in (0.5, 0.6, 0.7)},
    "si": "si",
    "der": "der",
    "der-0.1": "der --method.alpha 0.1",
    "cassle": "cassle",
    "pfr": "pfr",
    "multitask": "multitask",
    **{f"{name}-prefix-{share}": f"{name} {prefix(share)}" for share in (0.2, 0.4, 0.6) for name in ("pfr", "cassle")},
    "pfr-ptlf": "pfr --freezing.policy.name correlation",
    "pfr-weight-0.3": "pfr --method.weight 0.3",
    "pfr-weight-3": "pfr --method.weight 3",
    "supervised": "supervised/finetune",
    "supervised-layerwise": "supervised/layerwise",
    **{f"barlow-{name}": f"barlow_twins/{name}" for name in ("finetune", "lump", "ptlf", "si", "der", "cassle", "pfr")},
}  # fmt: skip


def run(arm: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any] | None:
    method, _, settings = ARMS[arm].partition(" ")
    recipe = f"split-cifar10/{method}" if "/" in method else f"split-cifar10/simsiam/{method}"
    out = folder / f"{arm}-seed{seed}"
    words = [*PROTOCOL.split(), *settings.split(), *overrides]
    command = [sys.executable, "-m", "ptlf", "train"]
    if (out / "config.yaml").exists():
        command += ["--resume", str(out)]
    else:
        command += ["--recipe", recipe, "--seed", str(seed), "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not (out / "results.json").exists() or done.returncode:
        print(f"{arm} {seed}: {done.stderr[-600:]}", flush=True)
        return None
    results = json.loads((out / "results.json").read_text())
    cost = {name: value for name, value in results["cost"].items() if not isinstance(value, dict | list)}
    kept = ("accuracy", "forgetting", "forgetting_just_learned", "untrained_accuracy", "accuracy_by_task")
    probes = {name: {key: probe[key] for key in kept} for name, probe in results["probes"].items()}
    return {
        "arm": arm, "seed": seed, "settings": [recipe, *words], "probes": probes, "cost": cost,
        "commit": results["commit"], "environment": results["environment"],
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each arm, the best first: means over seeds, and differences to LUMP with the same seed."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {})[row["seed"]] = row["probes"]

    def values(arm: str, probe: str, measure: str = "accuracy") -> list[float]:
        return [probes[probe][measure] for probes in arms[arm].values() if probes[probe][measure] is not None]

    def difference(arm: str, probe: str) -> str:
        seeds = sorted(set(arms[arm]) & set(arms["lump"]))
        found = interval([arms[arm][s][probe]["accuracy"] - arms["lump"][s][probe]["accuracy"] for s in seeds])
        if arm == "lump" or found is None:
            return ""
        return f"{found.mean:+.2f}" + ("" if found.half is None else f" ± {found.half:.2f}")

    def mean(found: list[float]) -> str:
        return f"{fmean(found):.2f}" if found else ""

    order = sorted(arms, key=lambda arm: -fmean(values(arm, "knn_class")))
    probes = ("knn_class", "knn_task_k200")
    return [
        [
            arm,
            str(len(arms[arm])),
            *(cell for probe in probes for cell in (mean(values(arm, probe)), difference(arm, probe))),
            mean(values(arm, "knn_task_k200", "forgetting")),
        ]
        for arm in order
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="train what FILE does not have")
    runs.add_argument("--out", type=Path, required=True, help="a line of JSON for each run")
    runs.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    runs.add_argument("--seeds", type=int, default=8)
    runs.add_argument("--jobs", type=int, default=1, help="runs at a time")
    runs.add_argument("--folder", type=Path, help="keep the runs' folders here, to go on after an interruption")
    shown = verbs.add_parser("table", help="accuracies, and differences to LUMP with 95 % t intervals over seeds")
    shown.add_argument("file", type=Path)
    options, overrides = parser.parse_known_args(argv)
    if options.verb == "table":
        titles = ["arm", "seeds", "knn_class", "minus LUMP", "knn_task, k = 200", "minus LUMP", "forgetting"]
        lines = [titles, ["---"] * len(titles), *table([json.loads(line) for line in options.file.open()])]
        print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
        return 0
    have = set()
    if options.out.exists():
        have = {(row["arm"], row["seed"]) for row in map(json.loads, options.out.read_text().splitlines())}
    todo = [(arm, seed) for seed in range(options.seeds) for arm in options.arms if (arm, seed) not in have]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.folder or Path(temporary)
        for row in pool.map(lambda job: run(*job, folder, overrides), todo):
            if row is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["arm"], row["seed"], {n: round(p["accuracy"], 2) for n, p in row["probes"].items()},
                      round(row["cost"]["train_seconds"], 1), flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
