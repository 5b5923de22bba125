"""How new images are to an encoder, without labels: beside those that it has learnt from.

Two figures are each compared with what they are of the run's own images, drawn again and again, and held out: Fréchet
distance, to all earlier images or to those of the nearest task, and the mean cosine distance to the nearest image.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import eigvals

from ptlf.core.errors import UserError, info, unknown
from ptlf.core.reading import DAMAGE, check_shape, read_json
from ptlf.evaluation.metrics import spaced
from ptlf.run.build import make_stream
from ptlf.run.config import Config
from ptlf.run.inference import LoadedEncoder
from ptlf.run.results import write_json
from ptlf.run.versions import unit_rows
from ptlf.stream.images import find_images
from ptlf.stream.pack import data_root

FILE = "drift.json"  # what `learn --if-drift` decided, and why
FIGURES = {"frechet": "Fréchet distance", "distance": "distance to the nearest learnt image"}
ANSWERS = ("as usual", "shifted", "new")
PAST, TASKS = 2000, 50  # images and tasks that are compared with
DRAWS, SURE, LEAST = 200, 0.05, 8  # of the run's own images; chance of a false alarm; images that suffice
SUBSETS = 9  # of the new images, whose median counts
DIMENSIONS = 32  # main directions of the run's own features, for the Fréchet distance
DUPLICATE = 0.2  # distance of near-duplicates, relative to that of neighbours; a quarter of it at most
NOVEL = 5  # images that are named, the most novel


@dataclass(frozen=True)
class Drift:
    """figures: of FIGURES, each as `value`, `usual`, which 95 % of draws are below, and `p`, the share of
    draws that are as far: twice the lesser p is the chance of a false alarm."""

    answer: str  # of ANSWERS
    images: int
    compared: int  # images of the run
    duplicates: int
    figures: dict[str, dict[str, float]]
    novel: list[tuple[str, float]]  # name and distance, the farthest first

    def __str__(self) -> str:
        said = "{} {value:.3g}, usually below {usual:.3g} (p = {p:.3f})".format
        words = [said(FIGURES[name], **figure) for name, figure in self.figures.items()]
        return f"{self.answer}; {'; '.join(words)}; {self.duplicates} of {self.images} images nearly as learnt ones"


class Past:
    """What a run has learnt from: features (N, dim) of images of its tasks."""

    def __init__(self, features: Sequence[np.ndarray]) -> None:
        self.own = unit_rows(np.concatenate(features))
        if len(self.own) < 2 * LEAST:
            raise UserError(f"the run's {len(self.own)} images are too few to compare with; {2 * LEAST} suffice")
        tasks, self.mean = np.repeat(np.arange(len(features)), [*map(len, features)]), self.own.mean(0)
        self.tasks = [tasks == task for task in range(len(features))]  # which rows are a task's
        self.directions = np.linalg.svd(self.own - self.mean, full_matrices=False)[2][:DIMENSIONS][
            : len(self.own) // 4
        ].T
        self.flat, self.cosines = (self.own - self.mean) @ self.directions, self.own @ self.own.T
        np.fill_diagonal(self.cosines, -1)
        self.size = max(map(len, features)) // 2  # of a draw, at most
        self.draws = cache(self.draw)

    def figures(self, flat: np.ndarray, cosines: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
        """As FIGURES, of rows with these places and cosines to all own rows. kept: with which they are compared."""
        groups = [kept, *(both for task in self.tasks if (both := kept & task).sum() > len(self.directions.T) // 2)]
        return min(frechet(flat, self.flat[group]) for group in groups), float(1 - cosines[:, kept].max(1).mean())

    def draw(self, size: int) -> np.ndarray:
        """Figures (DRAWS, 2) of own rows, beside all others: of all tasks, and of one task, in turn."""
        random, found = np.random.default_rng(0), []
        for number in range(DRAWS):
            rows = np.arange(len(self.own)) if number % 2 else np.flatnonzero(random.choice(self.tasks))
            rows = random.choice(rows, min(size, max(len(rows) // 2, 2)), replace=False)
            kept = ~np.isin(np.arange(len(self.own)), rows)
            found.append(self.figures(self.flat[rows], self.cosines[rows], kept))
        return np.array(found)

    def compare(self, features: np.ndarray, names: Sequence[str] = ()) -> Drift:
        """features: (n, dim) of new images."""
        if len(features) < LEAST:
            raise UserError(f"{len(features)} images are too few to tell whether they are new; give at least {LEAST}")
        new, random, size = unit_rows(features), np.random.default_rng(0), min(len(features), self.size)
        flat, cosines, draws = (new - self.mean) @ self.directions, new @ self.own.T, self.draws(size)
        some, everything = [random.permutation(len(new))[:size] for _ in range(SUBSETS)], np.ones(len(self.own), bool)
        found = np.median([self.figures(flat[rows], cosines[rows], everything) for rows in some], axis=0)
        p = (1 + (draws >= found).sum(0)) / (1 + DRAWS)
        far, usual = 1 - cosines.max(1), float(np.median(1 - self.cosines.max(1)))  # to the nearest
        same = far <= np.clip(DUPLICATE * usual, 1e-6, DUPLICATE / 4)
        known = same.mean() >= 1 - SURE  # these very images, be they a part of a task
        answer = ANSWERS[0 if known else 2 if p[1] <= SURE / 2 else 1 if p[0] <= SURE / 2 else 0]
        most = [(str(names[row]), round(float(far[row]), 4)) for row in np.argsort(-far)[:NOVEL]] if len(names) else []
        rows = zip(FIGURES, np.stack([found, np.quantile(draws, 0.95, axis=0), p], 1).tolist(), strict=True)
        shown = {name: dict(zip(("value", "usual", "p"), row, strict=True)) for name, row in rows}
        return Drift(answer, len(new), len(self.own), int(same.sum()), shown, most)


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    """Between normal distributions with the means and covariances of the rows."""
    one, other = np.cov(x.T), np.cov(y.T)
    both = np.sqrt(np.maximum(eigvals(one @ other).real, 0)).sum()
    return float(np.square(x.mean(0) - y.mean(0)).sum() + np.trace(one) + np.trace(other) - 2 * both)


def past_features(encoder: LoadedEncoder, config: Config, folder: Path) -> list[np.ndarray]:
    """Of the images of the run's tasks, by task, as far as they are there."""
    tasks, found = make_stream(config, folder).tasks, []
    chosen = spaced(np.arange(len(tasks)), TASKS)
    for task in (tasks[number] for number in chosen):
        with suppress(UserError):
            rows = spaced(task.train, PAST // len(chosen))
            found.append(encoder.embed(np.asarray(task.images.pixels[np.sort(rows)])))
    if not found:
        raise UserError(f"{folder} holds no images of its tasks any more, so nothing can be compared with them")
    return found


def drift_of(encoder: LoadedEncoder, config: Config, folder: Path, images: Any) -> Drift:
    if isinstance(images, str | Path):
        images = find_images(str(images), data_root(config.data_root))
    parts = [(part.names, features) for part, features in encoder.embedded(images, 256)]
    names = [name for some, _ in parts for name in some]
    return Past(past_features(encoder, config, folder)).compare(np.concatenate([x for _, x in parts]), names)


def decisions(folder: Path) -> list[dict[str, Any]]:
    """What `learn --if-drift` decided; of a damaged file nothing."""
    with suppress(FileNotFoundError, UserError, *DAMAGE):
        found = read_json(folder / FILE)
        check_shape(found, [{"source": str, "learnt": bool}])
        return found
    return []


def record_decision(folder: Path, drift: Drift, source: str, name: str, level: str) -> bool:
    """Whether the images are to be learnt: if they are at least that new. Kept in the run's folder."""
    if level not in ANSWERS[1:]:
        raise unknown("level of if_drift", level, ANSWERS[1:])
    learnt = ANSWERS.index(drift.answer) >= ANSWERS.index(level)
    made = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "source": source, "name": name, "if": level}
    write_json(folder / FILE, [*decisions(folder), {**made, "learnt": learnt, **asdict(drift)}])
    info(f"{name} is {'' if learnt else 'not '}learnt: {drift}")
    return learnt
