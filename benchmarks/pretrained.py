"""A pretrained encoder on new domains: what `ptlf learn` gains there, loses of what it knew, and takes.

    python benchmarks/pretrained.py DOMAINS --encoder onnx:FILE [settings of the encoder] --out results/pretrained

DOMAINS holds NAME.npz for each domain, with `images` (N, S, S, 3) uint8, `labels` and `groups` (pictures of one object
have one group, and are never on both sides of a test), and photos.npz, what the encoder knew. Every domain is learnt in
two days without its labels, by the recipe for given encoders. A finished run is kept in OUT and not repeated. With
--table the kept runs are printed as a table. With --costs a few epochs are timed instead, of the recipe and of what it
leaves out, on the first domain of --only; with --folders a run from folders of JPEG files to the encoder.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold

import ptlf
from ptlf.core.settings import load_yaml
from ptlf.run.inference import load_encoder
from ptlf.run.record import source_commit
from ptlf.run.results import write_json
from ptlf.run.verdict import colours, start_encoder

KNOWN, DAYS, NEIGHBOURS = "photos", 2, 10


def accuracies(features: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> dict[str, list[int]]:
    """Which images (N,) are right, by nearest neighbours and by a linear classifier, in five folds of groups."""
    found = {"knn": np.zeros(len(labels), int), "linear": np.zeros(len(labels), int)}
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    for train, test in StratifiedGroupKFold(5, shuffle=True, random_state=0).split(features, labels, groups):
        similarity = unit[test] @ unit[train].T
        near = np.argsort(-similarity, 1)[:, :NEIGHBOURS]
        weights = np.exp(np.take_along_axis(similarity, near, 1) / 0.1)
        votes = np.zeros((len(test), labels.max() + 1))
        for column in range(NEIGHBOURS):
            np.add.at(votes, (np.arange(len(test)), labels[train][near[:, column]]), weights[:, column])
        found["knn"][test] = votes.argmax(1) == labels[test]
        mean, std = features[train].mean(0), features[train].std(0) + 1e-6
        classifier = LogisticRegression(C=0.01, max_iter=200).fit((features[train] - mean) / std, labels[train])
        found["linear"][test] = classifier.predict((features[test] - mean) / std) == labels[test]
    return {name: right.tolist() for name, right in found.items()}


def small_pixels(images: np.ndarray) -> np.ndarray:
    size = images.shape[1] // 8
    small = images.reshape(len(images), 8, size, 8, size, 3).mean((2, 4)).reshape(len(images), -1)
    return small - small.mean(1, keepdims=True)


def learn(domain: Path, known: Path, seed: int, settings: dict[str, object], folder: Path) -> dict[str, object]:
    data, old = np.load(domain), np.load(known)
    images, test = data["images"], (data["labels"], data["groups"])
    known_test = old["labels"], old["groups"]
    order, began = np.random.default_rng(seed).permutation(len(images)), time.monotonic()
    learner = ptlf.Learner(out=folder, size=images.shape[1], seed=seed, **settings)
    for day, rows in enumerate(np.array_split(order, DAYS), start=1):
        learner.learn(images[rows], f"day{day}")
    seconds, results = time.monotonic() - began, learner.results
    start = start_encoder(load_encoder(folder), folder, learner.config, None)
    return {
        "domain": domain.stem, "seed": seed, "images": len(images), "days": DAYS, "config": results["config"],
        "commit": results["commit"], "environment": results["environment"],
        "seconds": seconds, "cost": {k: v for k, v in results["cost"].items() if not isinstance(v, dict | list)},
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "start": accuracies(start.embed(images), *test), "end": accuracies(learner.embed(images), *test),
        "pixels": accuracies(small_pixels(images), *test),
        "colours": accuracies(colours(torch.from_numpy(images)).numpy(), *test),
        "known_start": accuracies(start.embed(old["images"]), *known_test),
        "known_end": accuracies(learner.embed(old["images"]), *known_test),
    }  # fmt: skip


def learn_in_turn(
    domains: list[Path], known: Path, seed: int, settings: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Two domains in turn, five days: the first on days 1, 3 and 5."""
    data, old, began = [np.load(domain) for domain in domains], np.load(known), time.monotonic()
    random = np.random.default_rng(seed)
    days = [np.array_split(random.permutation(len(d["images"])), n) for d, n in zip(data, (3, 2), strict=True)]
    learner = ptlf.Learner(out=folder, size=data[0]["images"].shape[1], seed=seed, **settings)
    for day in range(5):
        learner.learn(data[day % 2]["images"][days[day % 2][day // 2]], f"day{day + 1}")
    results = learner.results
    found = {
        "seed": seed,
        "config": results["config"],
        "commit": results["commit"],
        "seconds": time.monotonic() - began,
    }
    for name, each in [*zip((domain.stem for domain in domains), data, strict=True), (KNOWN, old)]:
        found[name] = accuracies(learner.embed(each["images"]), each["labels"], each["groups"])
    return found


UNFROZEN: dict[str, Any] = {"freezing.initial": 0, "freezing.final": 0, "training.keep_views": 0}
COSTS: dict[str, dict[str, Any]] = {  # what is timed, each beside the first
    "all layers train, no anchor": {**UNFROZEN, "method.weight": 0},
    "all layers train": UNFROZEN,
    "half frozen, forward shared with the anchor": {"training.keep_views": 0},
    "half frozen, outputs kept (default)": {},
    "the same in float32": {"training.precision": "fp32"},
}


def time_costs(domain: Path, settings: dict[str, Any], epochs: int = 4) -> list[dict[str, Any]]:
    """The median epoch after the first of each way, and the bytes that a step saves for backward."""
    images, rows = np.load(domain)["images"][:600], []
    for name, changes in COSTS.items():
        with tempfile.TemporaryDirectory() as folder:
            few = {"training.epochs": epochs, "training.batch": 64, "evaluation.enabled": False}
            learner = ptlf.Learner(out=Path(folder) / "run", size=images.shape[1], **{**settings, **few, **changes})
            results = learner.learn(images, "day")
        seconds = results["cost"]["per_epoch"]["seconds"]
        row = {"way": name, "epoch_seconds": float(np.median(seconds[1:])), "kept_bytes": results["cost"]["kept_bytes"]}
        rows.append({**row, "first_epoch_seconds": seconds[0], "environment": results["environment"]})
        first = rows[0]
        ratios = [rows[-1][key] / first[key] for key in ("epoch_seconds", "kept_bytes")]
        print(f"{name}: {row['epoch_seconds']:.1f} s, {ratios[0]:.2f}; kept {ratios[1]:.2f}", flush=True)
    return rows


def time_folders(folders: list[Path], settings: dict[str, Any]) -> dict[str, Any]:
    """From image files to the encoder, a folder a day."""
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        learner = ptlf.Learner(out=Path(out) / "run", size=64, **settings)
        for folder in folders:
            learner.learn(folder)
        seconds, results = time.monotonic() - began, learner.results
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"folders": len(folders), "seconds": seconds, "peak_resident_bytes": peak, "results": results["environment"]}


def differences(runs: list[dict[str, Any]], before: str, after: str, test: str) -> np.ndarray:
    """In points, by seed and image."""
    return np.array([np.subtract(run[after][test], run[before][test]) for run in runs]) * 100.0


def gain(runs: list[dict[str, Any]], before: str, after: str, test: str) -> str:
    """Mean over seeds of the difference in points, its 95 % interval over images, and the range of several seeds."""
    each = differences(runs, before, after, test)
    images, seeds = each.mean(0), each.mean(1)
    sure = 1.96 * images.std() / len(images) ** 0.5
    spread = f" ({seeds.min():+.1f} to {seeds.max():+.1f})" if len(seeds) > 1 else ""
    return f"{images.mean():+.1f} ± {sure:.1f}{spread}"


def table(out: Path, name: str) -> list[list[str]]:
    """Of the runs in `out` with the settings `name`: a row of cells for each domain, and one of their means."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob(f"{name}-*-seed*.json")):
        runs.setdefault(file.stem.split("-")[-2], []).append(json.loads(file.read_text()))
    columns = [("start", "end", "knn"), ("start", "end", "linear"), ("known_start", "known_end", "knn")]
    rows = [
        [domain, str(len(some))]
        + [
            cell
            for before, after, test in columns
            for cell in (f"{100 * np.mean(some[0][before][test]):.1f}", gain(some, before, after, test))
        ]
        for domain, some in runs.items()
    ]
    means = [[differences(some, *column).mean() for some in runs.values()] for column in columns]
    return [*rows, ["mean", "", *(cell for each in means for cell in ("", f"{np.mean(each):+.1f}"))]]


def print_table(out: Path, name: str) -> None:
    titles = ["images", "seeds", "kNN at the start", "gained", "linear at the start", "gained"]
    titles += ["what it knew, kNN", "gained"]
    print(f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", sep="\n")
    for cells in table(out, name):
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domains", type=Path)
    parser.add_argument("--encoder", help="as for --encoder.name (default: chosen for the images, with random weights)")
    parser.add_argument("--table", action="store_true", help="of the runs in OUT; nothing is trained")
    parser.add_argument(
        "--costs", action="store_true", help="time a few epochs of the recipe and of what it leaves out"
    )
    parser.add_argument("--folders", type=Path, nargs="+", help="time a run from these folders of images")
    parser.add_argument("--turns", nargs=2, help="two domains to learn in turn, in five days")
    parser.add_argument("--only", nargs="+", help="names of domains")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="default", help="of the settings, in the files' names")
    parser.add_argument("--out", type=Path, default=Path("results/pretrained"))
    options, words = parser.parse_known_args()
    if options.table:
        return print_table(options.out, options.name)
    settings: dict[str, object] = {"evaluation.gallery": False}
    settings |= {"encoder": options.encoder} if options.encoder else {}
    settings |= {word.removeprefix("--"): load_yaml(value) for word, value in zip(words[::2], words[1::2], strict=True)}
    options.out.mkdir(parents=True, exist_ok=True)
    if options.costs or options.folders:
        report: dict[str, Any] = {"commit": source_commit()}
        if options.folders:
            report["from files"] = time_folders(options.folders, settings)
            print(report["from files"], flush=True)
        if options.costs:
            report["rows"] = time_costs(options.domains / f"{options.only[0]}.npz", settings)
        return write_json(options.out / f"{options.name}.json", report)
    known = options.domains / f"{KNOWN}.npz"
    for seed in options.seeds:
        if options.turns:
            file = options.out / f"turns-{'-'.join(options.turns)}-{seed}.json"
            with tempfile.TemporaryDirectory() as folder:
                both = [options.domains / f"{name}.npz" for name in options.turns]
                file.write_text(json.dumps(learn_in_turn(both, known, seed, settings, Path(folder) / "run")))
            continue
        for domain in sorted(options.domains.glob("*.npz")):
            file = options.out / f"{options.name}-{domain.stem}-seed{seed}.json"
            if file.exists() or (domain.stem not in options.only if options.only else domain.stem == KNOWN):
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = learn(domain, known, seed, settings, Path(folder) / "run")
            file.write_text(json.dumps(found))
            parts = ("start", "end", "known_start", "known_end")
            means = {part: round(100 * float(np.mean(found[part]["knn"])), 1) for part in parts}
            print(file.stem, means, f"{found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
