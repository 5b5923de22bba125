"""Nearest neighbours of a dozen query images, and a 2D map of features, before and after training."""

import base64
import hashlib
import io
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from ptlf.core.phases import Phase, silent
from ptlf.evaluation.prober import EvaluationConfig, Prepare, eval_mode
from ptlf.stream import Stream

QUERIES, NEIGHBOURS = 12, 5
TILE, SPRITE_BYTES = 48, 110_000  # pixels; bytes before base64, which adds a third
BATCH = 64  # images per forward, at most: it shows progress on a CPU too
POOL, POINTS = 2000, 600  # candidates for neighbours; how many of them are on the map
SAME = 1e-6  # how much features of length 1 may differ by rounding alone
UNLABELLED_POOL = 300  # of a stream without labels, where looking at images is all that evaluation does


class Gallery:
    """Call `look` with the untrained and with the trained encoder; `as_dict` is the content of gallery.json.

    The images are test images, or training images where a task has none. They follow from the seed alone, and are read
    when they are first needed.
    """

    pixels: np.ndarray  # (N, H, W, 3) uint8
    groups: np.ndarray  # (N,) number of the task
    labels: np.ndarray  # (N,) class, or the group where a task has none
    queries: list[int]

    def __init__(
        self, stream: Stream, prepare: Prepare, device: torch.device, *, config: EvaluationConfig, seed: int
    ) -> None:
        self.prepare, self.device, self.batch, self.seed = prepare, device, min(config.batch, BATCH), seed
        numbers = config.limited([number for number, task in enumerate(stream.tasks) if task.images.kept])
        tasks = [stream.tasks[number] for number in numbers]
        splits = [split for split in stream.eval_splits if split.since in numbers and split.kept and not split.always]
        self.drawn = [(split.name, split.test_images, split.test) for split in splits]
        if {split.since for split in splits} != set(numbers):
            self.drawn = [(task.name, task.images, task.train) for task in tasks]
        self.labelled = all(task.classes for task in tasks)
        self.classes = stream.classes
        self.looks: dict[str, dict[str, Any]] = {}

    def read(self) -> None:
        """The images, drawn from the shuffled tasks in turn, unless they are here already."""
        if hasattr(self, "pixels"):
            return
        random = np.random.default_rng(self.seed)
        shuffled = [random.permutation(indices) for _, _, indices in self.drawn]
        turns = in_turn(shuffled, POOL if self.labelled else UNLABELLED_POOL)
        chosen = np.array([shuffled[number][place] for place, number in turns])
        self.groups = np.array([number for _, number in turns])
        size = self.drawn[0][1].size
        self.pixels, self.labels = np.empty((len(chosen), size, size, 3), np.uint8), np.array(self.groups)
        for number, (_, images, _) in enumerate(self.drawn):
            places = np.flatnonzero(self.groups == number)
            places = places[np.argsort(chosen[places])]  # read a memory-mapped file in order
            self.pixels[places] = images.pixels[chosen[places]]
            if self.labelled:
                self.labels[places] = images.labels[chosen[places]]
        self.queries = pick_queries(self.labels, QUERIES)

    @cached_property
    def sha256(self) -> str:
        """Of the images and of which are queries: numbers in `looks` mean nothing with others."""
        self.read()
        found = hashlib.sha256(repr((self.pixels.shape, self.queries)).encode())
        found.update(self.pixels.data)
        return found.hexdigest()

    def look(self, moment: str, encoder: nn.Module, phase: Phase = silent) -> None:
        """moment: "before" or "after"."""
        self.read()
        parts = []
        with eval_mode(encoder), phase("features", len(self.pixels)) as advance:
            for part in torch.from_numpy(self.pixels).split(self.batch):
                parts.append(F.normalize(encoder(self.prepare(part.to(self.device))).float(), dim=1).cpu())
                advance(len(part))
        features = torch.cat(parts)  # (N, D)
        similarity = features[self.queries] @ features.T  # (Q, N)
        similarity[torch.arange(len(self.queries)), self.queries] = -torch.inf
        nearest = similarity.topk(min(NEIGHBOURS, len(features) - 1), dim=1).indices.tolist()
        self.looks[moment] = {"neighbours": nearest, "points": [], "features": features[:POINTS]}
        if moment == "after":  # the maps of both, so that the first step need not wait for t-SNE
            with phase("map"):
                for look in self.looks.values():
                    if "features" in look:
                        look["points"] = flat_map(look.pop("features").numpy())

    def chance(self) -> float:
        """The share of the other images with a query's label."""
        same = (self.labels[self.queries, None] == self.labels).sum(1) - 1
        return float(same.mean() / (len(self.labels) - 1))

    def as_dict(self) -> dict[str, Any]:
        """Images are tile numbers in the sprite; points are (x, y) in [0, 1]."""
        self.read()
        shown = sorted({*self.queries} | {n for look in self.looks.values() for row in look["neighbours"] for n in row})
        tile, names = {index: number for number, index in enumerate(shown)}, [name for name, _, _ in self.drawn]
        return {
            "labelled": self.labelled,  # false: the labels are the tasks
            "groups": names,
            "labels": list(self.classes) if self.labelled else names,
            "sprite": sprite(self.pixels[shown]),
            "tiles": [[int(self.groups[index]), int(self.labels[index])] for index in shown],  # group, label
            "queries": [tile[index] for index in self.queries],
            "chance": self.chance(),
            "point_groups": self.groups[:POINTS].tolist(),
            "looks": {
                moment: {
                    "neighbours": [[tile[index] for index in row] for row in look["neighbours"]],
                    "points": look["points"],
                }
                for moment, look in self.looks.items()
            },
        }


def in_turn(groups: Sequence[Sequence[int] | np.ndarray], most: int) -> list[tuple[int, int]]:
    """(place, group number) of the first of every group, then of the second, and so on."""
    return sorted((place, number) for number, group in enumerate(groups) for place in range(len(group)))[:most]


def pick_queries(labels: np.ndarray, count: int) -> list[int]:
    """Positions of `count` images: the first image of evenly spaced labels, then the second of each, and so on."""
    by_label = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    if len(by_label) > count:
        by_label = [by_label[place * len(by_label) // count] for place in range(count)]
    picked = [by_label[number][place] for place, number in in_turn(by_label, count)]
    return sorted(picked, key=lambda place: (labels[place], place))


def flat_map(features: np.ndarray) -> list[list[float]]:
    """t-SNE with a fixed seed, scaled to the unit square, rounded to three digits. Empty for fewer than 8 features, and
    for features that are not finite or all the same, as those of black images: there t-SNE divides by 0 and crashes."""
    from sklearn.manifold import TSNE  # slow to import

    count = len(features)
    if count < 8 or not np.isfinite(features).all() or np.ptp(features, axis=0).max() < SAME:
        return []
    settings = {"init": "pca", "learning_rate": "auto", "max_iter": 500, "random_state": 0, "n_jobs": 1}
    points = TSNE(2, perplexity=min(30, count / 4), **settings).fit_transform(features.astype(np.float64))
    points -= points.min(0)
    points /= max(float(points.max()), 1e-12)
    points += (1 - points.max(0)) / 2
    return [[round(float(x), 3), round(float(y), 3)] for x, y in points]


def sprite(pixels: np.ndarray) -> dict[str, Any]:
    """Images (N, S, S, 3) uint8 as tiles of one, row by row, in a data URL. PNG if that is small enough, else JPEG."""
    size, columns = min(TILE, pixels.shape[1]), int(np.ceil(np.sqrt(len(pixels))))
    sheet = Image.new("RGB", (columns * size, -(-len(pixels) // columns) * size))
    for number, tile in enumerate(pixels):
        image = Image.fromarray(tile).resize((size, size), Image.Resampling.LANCZOS)
        sheet.paste(image, (number % columns * size, number // columns * size))
    for kind in ("png", "jpeg"):
        buffer = io.BytesIO()
        sheet.save(buffer, kind, optimize=True)  # JPEG in Pillow's quality, 75
        if buffer.tell() <= SPRITE_BYTES:
            break
    url = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"image": url, "size": size, "columns": columns, "width": sheet.width, "height": sheet.height}
