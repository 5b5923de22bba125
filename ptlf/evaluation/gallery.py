"""What an encoder sees, before and after: the nearest images of a dozen queries, and a flat map of features."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.evaluation.prober import testing
from ptlf.stream import Stream
from ptlf.stream.task import Images

QUERIES, NEIGHBOURS = 12, 5
POOL, POINTS = 2000, 600  # images the neighbours come from; those of them on the map
TILE, SPRITE_BYTES = 48, 110_000  # pixels; base64 adds a third


class Gallery:
    """Call `look` on the untrained and on the trained encoder; `as_dict` is what gallery.json holds.

    The images are the splits' test images, or the tasks' own training images where the stream has no split per task.
    Which of them follows from the seed alone, so runs with one seed show the same images.
    """

    def __init__(
        self, stream: Stream, prepare: Callable[[Tensor], Tensor], device: torch.device, *, batch: int, seed: int
    ) -> None:
        self.prepare, self.device, self.batch = prepare, device, batch
        images, groups, self.group_names = sources(stream)
        chosen, self.groups = spread(groups, POOL, np.random.default_rng(seed))
        order = np.argsort(chosen, kind="stable")  # a memory-mapped file is read forwards
        self.pixels = np.empty((len(chosen), *images.pixels.shape[1:]), images.pixels.dtype)
        self.pixels[order] = images.pixels[chosen[order]]
        labelled = stream.data.folders == "classes"
        self.labels = images.labels[chosen] if labelled else self.groups
        self.label_names = list(stream.data.names) if labelled else self.group_names
        self.queries = pick_queries(self.labels, QUERIES)
        self.looks: dict[str, dict[str, Any]] = {}

    def look(self, moment: str, encoder: nn.Module) -> None:
        """moment: "before" or "after"."""
        features = self.features(encoder)
        similarity = features[self.queries] @ features.T  # (Q, N)
        similarity[torch.arange(len(self.queries)), self.queries] = -torch.inf
        count = min(NEIGHBOURS, len(features) - 1)
        self.looks[moment] = {
            "neighbours": similarity.topk(count, dim=1).indices.tolist(),
            "points": flat_map(features[:POINTS].numpy()),
        }

    def features(self, encoder: nn.Module) -> Tensor:
        """(N, D) on the CPU, of length one."""
        parts = []
        with testing(encoder):
            for part in torch.from_numpy(self.pixels).split(self.batch):
                parts.append(F.normalize(encoder(self.prepare(part.to(self.device))).float(), dim=1).cpu())
        return torch.cat(parts)

    def as_dict(self) -> dict[str, Any]:
        """Tiles are numbered as in the sprite, row by row; points are (x, y) in [0, 1]."""
        shown = sorted({*self.queries} | {n for look in self.looks.values() for row in look["neighbours"] for n in row})
        tile = {index: number for number, index in enumerate(shown)}
        looks = {
            moment: {
                "neighbours": [[tile[n] for n in row] for row in look["neighbours"]],
                "points": look["points"],
            }
            for moment, look in self.looks.items()
        }
        return {
            "groups": self.group_names,
            "labels": self.label_names,
            "sprite": sprite([self.pixels[index] for index in shown]),
            "tiles": [[int(self.groups[index]), int(self.labels[index])] for index in shown],  # group, label
            "queries": [tile[index] for index in self.queries],
            "point_groups": [int(group) for group in self.groups[:POINTS]],
            "looks": looks,
        }


def sources(stream: Stream) -> tuple[Images, list[np.ndarray], list[str]]:
    """The images, the indices of each group, and the groups' names."""
    test = stream.data.test
    if stream.eval_data is stream.data and test is not None:
        return (
            test,
            [split.test for split in stream.eval_splits],
            [split.name for split in stream.eval_splits],
        )
    return stream.data.train, [task.train for task in stream.tasks], [task.name for task in stream.tasks]


def spread(groups: Sequence[np.ndarray], most: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Up to `most` indices, dealt round by round from the shuffled groups, and the group of each."""
    shuffled = [random.permutation(group) for group in groups]
    dealt = [
        (int(group[place]), number)
        for place in range(max(map(len, shuffled)))
        for number, group in enumerate(shuffled)
        if place < len(group)
    ][:most]
    return np.array([index for index, _ in dealt]), np.array([number for _, number in dealt])


def pick_queries(labels: np.ndarray, count: int) -> list[int]:
    """Positions of images spread over the labels: evenly spaced labels first, second images of them after that."""
    by_label = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    if len(by_label) > count:
        by_label = [by_label[place * len(by_label) // count] for place in range(count)]
    rounds = [[places[turn] for places in by_label if turn < len(places)] for turn in range(count)]
    flat = [place for turn in rounds for place in turn][:count]
    return sorted(flat, key=lambda place: (labels[place], place))


def flat_map(features: np.ndarray) -> list[list[float]]:
    """t-SNE with a fixed start, scaled to the unit square with three digits."""
    from sklearn.manifold import TSNE  # slow to import, and only needed here

    count = len(features)
    if count < 8:
        return []
    settings = {"init": "pca", "learning_rate": "auto", "max_iter": 500, "random_state": 0, "n_jobs": 1}
    points = TSNE(2, perplexity=min(30, count / 4), **settings).fit_transform(features.astype(np.float64))
    points -= points.min(0)
    points /= max(float(points.max()), 1e-12)
    points += (1 - points.max(0)) / 2
    return [[round(float(x), 3), round(float(y), 3)] for x, y in points]


def sprite(pixels: Sequence[np.ndarray]) -> dict[str, Any]:
    """All tiles in one image, as a data address: lossless where that is small, else JPEG."""
    size = min(TILE, pixels[0].shape[0])
    columns = int(np.ceil(np.sqrt(len(pixels))))
    sheet = Image.new("RGB", (columns * size, -(-len(pixels) // columns) * size))
    for number, tile in enumerate(pixels):
        image = Image.fromarray(np.asarray(tile)).resize((size, size), Image.Resampling.LANCZOS)
        sheet.paste(image, (number % columns * size, number // columns * size))
    kind, data = encode(sheet)
    address = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"image": address, "size": size, "columns": columns, "width": sheet.width, "height": sheet.height}


def encode(sheet: Image.Image) -> tuple[str, bytes]:
    ways: list[tuple[str, dict[str, Any]]] = [("png", {"optimize": True})]
    ways += [("jpeg", {"quality": quality, "subsampling": 0}) for quality in (90, 80, 65, 50, 30)]
    for kind, options in ways:
        buffer = io.BytesIO()
        sheet.save(buffer, format=kind, **options)
        if buffer.tell() <= SPRITE_BYTES:
            break
    return kind, buffer.getvalue()
