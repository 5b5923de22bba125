"""Old vectors after more days of learning, and whether a new folder needs learning.

    python benchmarks/versions.py PHOTOS.npz --encoder onnx:FILE [settings of the encoder] --out results/versions

PHOTOS.npz holds `images` (N, S, S, 3) uint8 and `labels` of 24 classes, see benchmarks/domains.py. Of each class 35
images are learnt, four new classes a day, and 15 are not. There are three parts, each with a file of its own:

maps: vectors of the images that were not learnt, made after one day and used after one to five more: as they are, by
    the maps that `ptlf learn` left, by a residual MLP in their place, and encoded again.
drift: the answers about folders of known kinds, after three days.
stream: six days of which the third and the fifth bring other images of known classes, with and without --if-drift.
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

import ptlf
from ptlf.core.phases import Watcher
from ptlf.core.settings import load_yaml
from ptlf.run.drift import Past, decisions
from ptlf.run.inference import load_encoder
from ptlf.run.record import source_commit
from ptlf.run.results import write_json
from ptlf.run.vectors import move
from ptlf.run.verdict import neighbours_agree
from ptlf.run.versions import find_maps, find_version, recall

DAYS, CLASSES, LEARNT = 6, 4, 35
SIZES, FOLDERS, TIMED = (12, 24, 48), 40, 250


def split(labels: np.ndarray, count: int = LEARNT) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By day: rows that are learnt, `count` of each class, and rows that are not."""
    random = np.random.default_rng(0)
    order = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    days = [order[CLASSES * day : CLASSES * (day + 1)] for day in range(DAYS)]
    learnt = [random.permutation(np.concatenate([rows[:count] for rows in day])) for day in days]
    return learnt, [np.concatenate([rows[count:] for rows in day]) for day in days]


def knn(vectors: np.ndarray, queries: np.ndarray, labels: np.ndarray, k: int = 10) -> float:
    """Accuracy in % of each query (N, D), among the vectors (N, D) of all images but its own."""
    similarity = unit(queries) @ unit(vectors).T
    np.fill_diagonal(similarity, -np.inf)
    near = np.argsort(-similarity, 1)[:, :k]
    votes = np.zeros((len(queries), labels.max() + 1))
    for column in near.T:
        weight = np.exp(similarity[np.arange(len(queries)), column] / 0.1)
        np.add.at(votes, (np.arange(len(queries)), labels[column]), weight)
    return 100 * float(np.mean(votes.argmax(1) == labels))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def residual_mlp(old: np.ndarray, new: np.ndarray, hidden: int = 256, steps: int = 400) -> Any:
    """From vectors (N, D) of the same images: x + MLP(x), with weight decay."""
    torch.manual_seed(0)
    x, y = torch.from_numpy(old), torch.from_numpy(new)
    scale = float(x.std())
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], hidden), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(hidden, x.shape[1])
    )
    torch.nn.init.zeros_(net[-1].weight)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.1)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,))
        loss = ((x[rows] + scale * net(x[rows] / scale) - y[rows]) / scale).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    return lambda v: v + scale * net(torch.from_numpy(v) / scale).detach().numpy()


def learn_days(images: np.ndarray, days: list[np.ndarray], folder: Path, settings: dict[str, Any]) -> ptlf.Learner:
    learner = ptlf.Learner(out=folder, size=images.shape[1], **settings)
    for number, rows in enumerate(days, start=1):
        learner.learn(images[rows], f"day{number}", keep_encoders=True, watcher=Watcher())
    return learner


def measure_maps(images: np.ndarray, labels: np.ndarray, folder: Path, learnt: Any, unseen: Any) -> dict[str, Any]:
    names, test = [f"day{day + 1}" for day in range(DAYS)], np.concatenate(unseen)
    encoders = [load_encoder(folder / "encoders" / name, device="cpu") for name in names]
    own = [encoder.embed(images) for encoder in encoders]
    began = time.process_time()
    encoders[0].embed(images[:TIMED])
    again_ms = 1000 * (time.process_time() - began) * 10_000 / TIMED
    versions = [find_version(folder, name) for name in names]
    mlps = [residual_mlp(*(own[day + step][np.concatenate(learnt[: day + 2])] for step in (0, 1))) for day in range(5)]
    rows = []
    for start in range(DAYS):
        for end in range(start + 1, DAYS):
            maps = find_maps(folder, versions[start], versions[end], "a test")
            old, new = own[start][test], own[end][test]
            back = move(find_maps(folder, versions[end], versions[start], "a test"), new)
            by_mlp = old
            for mlp in mlps[start:end]:
                by_mlp = mlp(by_mlp)
            vectors = {"as they are": old, "mapped": move(maps, old), "residual MLP": by_mlp, "encoded again": new}
            row: dict[str, Any] = {"from": start + 1, "days": end - start}
            row["recall"] = {name: recall(each, new) for name, each in vectors.items()}
            row["knn"] = {name: knn(each, new, labels[test]) for name, each in vectors.items()}
            row["recall of new images in the old space"] = {
                "as they are": recall(new, old),
                "mapped": recall(back, old),
            }
            rows.append(row)
    many, one = np.repeat(own[0], 9, 0)[:10_000], find_maps(folder, versions[0], versions[1], "a test")
    began = time.process_time()
    move(one, many)
    map_ms = 1000 * (time.process_time() - began)
    sizes = [file.stat().st_size for file in sorted((folder / "versions").iterdir())]
    seconds = {"a map": map_ms, "encoding again": again_ms}
    return {"images": len(test), "rows": rows, "cpu_milliseconds_per_10000": seconds, "bytes_per_task": sizes}


def worsened(kind: str, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A copy of one image (S, S, 3)."""
    image = Image.fromarray(pixels)
    if kind == "blur":
        return np.array(image.filter(ImageFilter.GaussianBlur(1.5)))
    if kind == "noise":
        return np.clip(pixels + random.normal(0, 25, pixels.shape), 0, 255).astype(np.uint8)
    if kind == "contrast":
        return np.clip((pixels - 128.0) * 0.4 + 128, 0, 255).astype(np.uint8)
    image.save(buffer := io.BytesIO(), "jpeg", quality=75)
    return np.array(Image.open(buffer))


def measure_answers(images: np.ndarray, folder: Path, learnt: Any, unseen: Any) -> dict[str, Any]:
    encoder, random = load_encoder(folder / "encoders" / "day3", device="cpu"), np.random.default_rng(1)
    began = time.process_time()
    encoder.embed(images[:TIMED])
    encoding = (time.process_time() - began) / TIMED
    past = Past([encoder.embed(images[rows]) for rows in learnt[:3]])
    known, new = np.concatenate(unseen[:3]), np.concatenate(unseen[3:])
    clean = encoder.embed(images)
    kinds: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "other images of the learnt classes": (clean, known),
        "other images of one day's classes": (clean, known),
        "new classes": (clean, new),
    }
    pools = {
        "blur": known,
        "noise": known,
        "contrast": known,
        "JPEG copies of learnt images": np.concatenate(learnt[:3]),
    }
    for kind, pool in pools.items():
        vectors = np.zeros_like(clean)
        vectors[pool] = encoder.embed(np.stack([worsened(kind, image, random) for image in images[pool]]))
        kinds[kind] = vectors, pool
    rows, spent = [], []
    for size in SIZES:
        for kind, (vectors, pool) in kinds.items():
            answers, duplicates = {"as usual": 0, "shifted": 0, "new": 0}, []
            for number in range(FOLDERS):
                some = unseen[number % 3] if "one day" in kind else pool
                chosen = random.choice(some, size, replace=False)
                began = time.process_time()
                found = past.compare(vectors[chosen])
                spent.append(time.process_time() - began)
                answers[found.answer] += 1
                duplicates.append(found.duplicates / size)
            rows.append({"images": size, "kind": kind, "answers": answers, "duplicates": float(np.mean(duplicates))})
            print(rows[-1], flush=True)
    seconds = {"comparing": float(np.mean(spent)), "encoding_1000": 1000 * encoding}
    return {"folders": FOLDERS, "compared": len(past.own), "rows": rows, "cpu_seconds": seconds}


def measure_stream(images: np.ndarray, labels: np.ndarray, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    first, second = split(labels, 25)
    days = [first[0], first[1], second[0], first[2], second[1], first[3]]
    found: dict[str, Any] = {}
    right = {}
    for name, if_drift in (("all", None), ("if drift", "shifted")):
        learner, began = ptlf.Learner(out=folder / name, size=images.shape[1], **settings), time.process_time()
        for number, rows in enumerate(days, start=1):
            learner.learn(images[rows], f"day{number}", if_drift=if_drift, watcher=Watcher())
        seconds = time.process_time() - began
        right[name] = neighbours_agree(torch.from_numpy(learner.embed(images)), torch.from_numpy(labels), 10).numpy()
        learnt = [made["answer"] for made in decisions(folder / name)]
        found[name] = {
            "cpu_seconds": seconds,
            "tasks": learner.tasks,
            "answers": learnt,
            "knn": 100 * right[name].mean(),
        }
    difference = 100 * (right["if drift"] - right["all"])
    found["difference"] = difference.mean(), 1.96 * difference.std() / len(difference) ** 0.5
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--encoder", required=True, help="as for --encoder.name")
    parser.add_argument("--parts", nargs="+", default=["maps", "drift", "stream"], choices=("maps", "drift", "stream"))
    parser.add_argument("--name", default="default", help="of the settings, in the files' names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="side of the images in pixels, a divisor of theirs (default: theirs)")
    parser.add_argument("--run", type=Path, help="keep the run of the six days in this folder, or take it from there")
    parser.add_argument("--out", type=Path, default=Path("results/versions"))
    options, words = parser.parse_known_args()
    settings: dict[str, Any] = {"encoder": options.encoder, "evaluation.gallery": False, "seed": options.seed}
    settings |= {word.removeprefix("--"): load_yaml(value) for word, value in zip(words[::2], words[1::2], strict=True)}
    data = np.load(options.photos)
    images, labels = data["images"], data["labels"]
    if options.size:
        count, side = len(images), images.shape[1] // options.size
        blocks = images.reshape(count, options.size, side, options.size, side, 3)
        images = blocks.mean((2, 4)).round().astype(np.uint8)
    learnt, unseen = split(labels)
    options.out.mkdir(parents=True, exist_ok=True)
    given = {key: value for key, value in settings.items() if key != "encoder"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.run or Path(temporary, "run")
        if {"maps", "drift"} & {*options.parts} and not folder.exists():
            learn_days(images, learnt, folder, settings)
        for part in options.parts:
            if part == "maps":
                found = measure_maps(images, labels, folder, learnt, unseen)
            elif part == "drift":
                found = measure_answers(images, folder, learnt, unseen)
            else:
                found = measure_stream(images, labels, settings, Path(temporary))
            found = {
                "commit": source_commit(),
                "settings": given,
                "size": images.shape[1],
                "torch_threads": torch.get_num_threads(),
                **found,
            }
            write_json(options.out / f"{part}-{options.name}-seed{options.seed}.json", json.loads(json.dumps(found)))


if __name__ == "__main__":
    main()
