"""How new images are to an encoder, without labels: beside those that it has learnt from.

Two figures are each compared with what they are of the run's own images, drawn again and again, and held out: Fréchet
distance, to all earlier images or to those of the nearest task, and the mean cosine distance to the nearest image.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
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


def measure_drift(past: Sequence[np.ndarray], features: np.ndarray, names: Sequence[str] = ()) -> Drift:
    """past: features (N, dim) of each task's images. features: (n, dim) of the new ones."""
    for count, whose in ((len(features), "the folder"), (sum(map(len, past)) // 2, "half of what the run has learnt")):
        if count < LEAST:
            raise UserError(f"{count} images are too few to tell whether they are new ({whose}); at least {LEAST} do")
    tasks, own = np.repeat(np.arange(len(past)), [*map(len, past)]), unit_rows(np.concatenate(past))
    new, mean = unit_rows(features), own.mean(0)
    directions = np.linalg.svd(own - mean, full_matrices=False)[2][: min(DIMENSIONS, len(own) // 4)].T
    flat, flat_new, among, to_own = (own - mean) @ directions, (new - mean) @ directions, own @ own.T, new @ own.T
    np.fill_diagonal(among, -1)

    def figures(x: np.ndarray, cosines: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
        """kept: which of the run's own images they are compared with, (N,) bool."""
        of_tasks = (kept & (tasks == task) for task in range(len(past)))
        groups = [kept, *(group for group in of_tasks if group.sum() > len(directions.T) // 2)]
        return min(frechet(x, flat[group]) for group in groups), float(1 - cosines[:, kept].max(1).mean())

    random, draws, size = np.random.default_rng(0), [], min(len(new), max(map(len, past)) // 2)
    for number in range(DRAWS):  # of all of them, and of one task, in turn
        rows = np.arange(len(own)) if number % 2 else np.flatnonzero(tasks == random.integers(len(past)))
        rows = random.choice(rows, min(size, max(len(rows) // 2, 1)), replace=False)
        draws.append(figures(flat[rows], among[rows], ~np.isin(np.arange(len(own)), rows)))
    some = [random.permutation(len(new))[:size] for _ in range(SUBSETS)]
    found = np.median([figures(flat_new[rows], to_own[rows], np.ones(len(own), bool)) for rows in some], axis=0)
    usual, p = np.quantile(draws, 0.95, axis=0), (1 + (np.array(draws) >= found).sum(0)) / (1 + DRAWS)
    far, near = 1 - to_own.max(1), DUPLICATE * float(np.median(1 - among.max(1)))
    same = far <= np.clip(near, 1e-6, DUPLICATE / 4)
    known = same.mean() >= 1 - SURE  # these very images, be they a part of a task
    answer = ANSWERS[0 if known else 2 if p[1] <= SURE / 2 else 1 if p[0] <= SURE / 2 else 0]
    most = [(str(names[row]), round(float(far[row]), 4)) for row in np.argsort(-far)[:NOVEL]] if len(names) else []
    shown = {
        name: {"value": float(found[place]), "usual": float(usual[place]), "p": float(p[place])}
        for place, name in enumerate(FIGURES)
    }
    return Drift(answer, len(new), len(own), int(same.sum()), shown, most)


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
    return measure_drift(past_features(encoder, config, folder), np.concatenate([x for _, x in parts]), names)


def decisions(folder: Path) -> list[dict[str, Any]]:
    """What `learn --if-drift` decided; of a damaged file nothing."""
    with suppress(FileNotFoundError, UserError, *DAMAGE):
        found = read_json(folder / FILE)
        check_shape(found, [{"source": str, "learnt": bool}])
        return found
    return []


def usual_sources(folder: Path) -> set[str]:
    """Those that were not learnt."""
    return {made["source"] for made in decisions(folder) if not made["learnt"]}


def record_decision(folder: Path, drift: Drift, source: str, name: str, level: str) -> bool:
    """Whether the images are to be learnt: if they are at least that new. Kept in the run's folder."""
    if level not in ANSWERS[1:]:
        raise unknown("level of if_drift", level, ANSWERS[1:])
    learnt = ANSWERS.index(drift.answer) >= ANSWERS.index(level)
    made: Mapping[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "source": source, "name": name}
    write_json(folder / FILE, [*decisions(folder), {**made, "learnt": learnt, "if": level, **asdict(drift)}])
    info(f"{name} is {'' if learnt else 'not '}learnt: {drift}")
    return learnt
