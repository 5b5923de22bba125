"""Versions of a run's encoder, one after each task, and maps that move vectors from one to the next without images.

A map is fitted when a task ends, on images that were encoded before and after it, in each direction. It is an identity
with a correction of low rank: x + (x @ left) @ right + shift.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from scipy.linalg import svd

from ptlf.core.errors import UserError, unknown
from ptlf.core.files import write_whole
from ptlf.core.reading import DAMAGE, check_shape, clean, damaged
from ptlf.encoders.weights import KEPT, KEY
from ptlf.run.results import RESTORE_HINT, Json, results_if_any

FOLDER = "versions"
RANK, NEIGHBOURS, LEAST = 64, 10, 16  # of a correction; of recall; images, for anything but a shift
STEP = {"task": str, "previous": str, "before": str, "after": str, "kind": str, "recall": {"*": (int, float)}}


class Map(NamedTuple):
    left: np.ndarray  # (D, R)
    right: np.ndarray  # (R, D)
    shift: np.ndarray  # (D,)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x + (x @ self.left) @ self.right + self.shift


class Step(NamedTuple):
    """From the version before a task to the one after it. about: as STEP."""

    about: Json
    forward: Map
    backward: Map


def move(maps: Sequence[Map], vectors: np.ndarray) -> np.ndarray:
    return reduce(lambda x, step: step(x), maps, np.asarray(vectors, np.float32))


def low_rank(left: np.ndarray, right: np.ndarray, x_mean: np.ndarray, y_mean: np.ndarray) -> Map:
    """The map that takes one mean to the other, with the largest parts of the correction `left @ right`."""
    basis, rest = np.linalg.qr(left)
    u, values, vt = svd(rest @ right, full_matrices=False)
    scale = np.sqrt(values[:RANK])  # in both factors alike: they fit half precision, whatever the features' size
    left, right = basis @ (u[:, :RANK] * scale), scale[:, None] * vt[:RANK]
    return Map(left, right, y_mean - x_mean - (x_mean @ left) @ right)


def shifted(x: np.ndarray, y: np.ndarray) -> Map:
    """Nothing but the difference of the means."""
    return Map(np.zeros((x.shape[1], 0)), np.zeros((0, x.shape[1])), y.mean(0) - x.mean(0))


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> Map:
    """Least squares, with a penalty for what differs from the identity, relative to the mean square of x."""
    means, x, y = (x.mean(0), y.mean(0)), x - x.mean(0), y - y.mean(0)
    gram = x @ x.T
    gram[np.diag_indices(len(x))] += penalty * max(np.trace(gram) / len(x), 1e-12)
    return low_rank(x.T, np.linalg.solve(gram, y - x), *means)


def procrustes(x: np.ndarray, y: np.ndarray, penalty: float) -> Map:
    """The rotation that fits best, drawn to the identity."""
    means, product = (x.mean(0), y.mean(0)), (x - x.mean(0)).T @ (y - y.mean(0))
    u, _, vt = svd(product + penalty * np.linalg.norm(product, 2) * np.eye(len(product)))
    return low_rank(u @ vt - np.eye(len(product)), np.eye(len(product)), *means)


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], Map]] = {
    "shift": shifted,
    **{f"ridge {penalty:g}": partial(ridge, penalty=penalty) for penalty in (0.1, 1.0, 10.0)},
    "procrustes": partial(procrustes, penalty=0.1),
}


def unit_rows(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def recall(mapped: np.ndarray, true: np.ndarray, k: int = NEIGHBOURS) -> float:
    """Share of each vector's nearest k of the true ones, by cosine, that are its nearest among the mapped ones."""
    k = min(k, len(true) - 1)
    unit, near = unit_rows(true), []
    for others in (unit, unit_rows(mapped)):
        similarity = unit @ others.T
        np.fill_diagonal(similarity, -np.inf)
        near.append(np.argpartition(-similarity, k - 1, axis=1)[:, :k])
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(*near, strict=True)]))


def fit_maps(old: np.ndarray, new: np.ndarray) -> tuple[Map, Map, str, dict[str, float]]:
    """From vectors (N, D) of the same images by two encoders: maps there and back, their kind and the recall of each
    kind on images that it was not fitted on."""
    old, new = old.astype(np.float64), new.astype(np.float64)
    if len(old) < LEAST:
        return shifted(old, new), shifted(new, old), "shift", {}
    half, found = np.arange(len(old)) % 2 == 0, {"none": recall(old, new)}
    for kind, fit in KINDS.items():
        mapped = np.empty_like(old)
        for part in (half, ~half):
            mapped[~part] = fit(old[part], new[part])(old[~part])
        found[kind] = recall(mapped, new)
    best = max(KINDS, key=lambda kind: found[kind])
    return KINDS[best](old, new), KINDS[best](new, old), best, found


def write_step(folder: Path, number: int, about: Json, old: np.ndarray, new: np.ndarray) -> None:
    """number: of the task, from 1."""
    forward, backward, kind, scores = fit_maps(old, new)
    scores = {name: round(value, 4) for name, value in scores.items()}
    tensors = {
        f"{way}.{name}": np.ascontiguousarray(part, np.float16 if part.ndim == 2 else np.float32)
        for way, each in (("forward", forward), ("backward", backward))
        for name, part in each._asdict().items()
    }
    about = {**about, "images": len(old), "kind": kind, "recall": scores}
    (folder / FOLDER).mkdir(exist_ok=True)
    write_whole(folder / FOLDER / f"{number:04}.safetensors", save(tensors, {KEY: json.dumps(about)}))


def step_files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.safetensors"), key=lambda path: int(path.stem))


def read_steps(folder: Path) -> list[Step]:
    return [read_step(path) for path in step_files(folder)]


def read_step(path: Path) -> Step:
    try:
        with safe_open(path, "np") as file:
            about = clean(json.loads((file.metadata() or {}).get(KEY, "null")))
            check_shape(about, STEP)
            ways = [[file.get_tensor(f"{way}.{part}") for part in Map._fields] for way in Step._fields[1:]]
        return Step(about, *(Map(*(part.astype(np.float32) for part in way)) for way in ways))
    except (OSError, SafetensorError, *DAMAGE) as error:
        raise damaged(path, error, RESTORE_HINT) from None


def find_maps(folder: Path, start: str, end: str, what: str) -> list[Map]:
    """From one version of the run in this folder to another, by their checksums. what: needs them, for the error."""
    steps = read_steps(folder)
    ways = ("forward", "before", "after", steps), ("backward", "after", "before", steps[::-1])
    for way, before, after, ordered in ways:
        at, maps = start, []
        for step in ordered:
            if at != end and step.about[before] == at:
                maps.append(getattr(step, way))
                at = step.about[after]
        if at == end:
            return maps
    if {*versions_of(folder).values()} >= {start, end}:
        raise UserError(f"{folder / FOLDER} lacks a file, so that no maps lead there; {RESTORE_HINT}")
    hint = "give the run that it is of, or embed the images again"
    raise UserError(f"{folder} has no maps for {what}: its encoder was never that one since maps are kept; {hint}")


def name_version(folder: Path, encoder: str) -> dict[str, str | None]:
    """run: its folder; encoder: the checksum; task: after which it is so, if that is known."""
    run = folder.absolute()
    if run.parent.name == KEPT:
        run = run.parent.parent
    results = results_if_any(run)
    last = results["tasks"][-1] if results and results["status"] == "finished" else None
    names = {checksum: name for name, checksum in versions_of(run).items()}
    return {"run": str(run), "encoder": encoder, "task": names.get(encoder, last)}


def versions_of(folder: Path) -> dict[str, str]:
    """The checksum of the encoder after each task, by the task's name, from the first that a map leads from."""
    steps = [step.about for step in read_steps(folder)]
    return {about["previous"]: about["before"] for about in steps[:1]} | {a["task"]: a["after"] for a in steps}


def find_version(folder: Path, name: str) -> str:
    """The checksum of the encoder after the task of this name; a checksum is one already."""
    if re.fullmatch("[0-9a-f]{64}", name):
        return name
    if not (known := versions_of(folder)):
        raise UserError(f"{folder} has learnt one task by `ptlf learn`, so there is no older version than today's")
    if name not in known:
        raise unknown("task", name, known)
    return known[name]
