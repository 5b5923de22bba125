"""A second stream learnt on top of an encoder that already knows something: what is left of what it knew?

An encoder is trained on the first four classes of CIFAR-10, at 16 px so that a CPU suffices. Then four methods continue
with the other six, in three tasks: they begin with its weights, with a memory of the first classes' images, and are
tested on the first classes before and after every task.
`python benchmarks/continue.py` needs `ptlf data get cifar10`, and writes runs/continue/ and results/continue/.
"""

import json
import sys
from pathlib import Path

import numpy as np

from ptlf.cli import main
from ptlf.run.results import read_results, write_json
from ptlf.stream.pack import Pack, data_root, open_pack
from ptlf.stream.packing import pack_images

KNOWN, NEW = [[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9]]
SIZE, PER_CLASS = 16, 250
METHODS = ("finetune", "lump", "ptlf", "ptlf-cost")
SETTINGS = {
    "encoder.name": "resnet18-mini",
    "objective.projection": 256,
    "training.epochs": 10,
    "training.batch": 64,
    "training.lr": 0.03,
    "stream.pack": f"cifar10-{SIZE}",
    "stream.per_class": PER_CLASS,
    "probes.knn_class.k": 20,
    "device": "cpu",
}


def words(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def save_known(pack: Pack, path: Path) -> None:
    """Training and test images of the known classes, as the first run uses them."""
    arrays = {}
    for split, prefix in (("train", ""), ("test", "test_")):
        labels = pack.labels(split)
        chosen = np.concatenate([np.flatnonzero(labels == c)[:PER_CLASS] for group in KNOWN for c in group])
        arrays |= {f"{prefix}images": pack.images(split)[chosen], f"{prefix}labels": labels[chosen]}
    np.savez(path, **arrays)


def train(recipe: str, out: Path, groups: list[list[int]], **settings: object) -> None:
    if (out / "results.json").exists() and read_results(out)["status"] == "finished":
        return
    given = words({**SETTINGS, **settings, "stream.groups": json.dumps(groups), "data_root": out.parent})
    if code := main(["train", "--recipe", f"folder/simsiam/{recipe}", "--out", str(out), *given]):
        sys.exit(code)


def run(runs: Path, results: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    small, known = runs / f"cifar10-{SIZE}", runs / "known.npz"
    whole = open_pack(data_root(), "cifar10").path
    save_known(open_pack(runs, small.name) if small.exists() else pack_images(whole, small, SIZE), known)
    for seed in seeds:
        first = runs / f"first-seed{seed}"
        train("lump", first, KNOWN, seed=seed)
        for method in METHODS:
            out = runs / f"{method}-seed{seed}"
            given = {"encoder.weights": first, "memory.images": known, "evaluation.reference": known}
            train(method, out, NEW, seed=seed, **given)
            kept = results / out.name
            kept.mkdir(parents=True, exist_ok=True)
            write_json(kept / "results.json", read_results(out))


if __name__ == "__main__":
    run(Path("runs/continue"), Path("results/continue"))
