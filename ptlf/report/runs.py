"""Runs read from their folders and checked; seeds of one configuration grouped; what cannot be compared refused."""

import base64
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from ptlf.core.errors import UserError, printable, unknown
from ptlf.core.reading import NUMBER, check_shape, damaged, flatten, read_json
from ptlf.report.intervals import images_behind, start_of, wilson, worsened
from ptlf.run.compat import describe_difference, identity_key, identity_settings, other_images, stream_settings
from ptlf.run.results import Json, compiling_seconds, epoch_lines, read_evaluations, read_results

RUN_FILES = ("results.json", "config.yaml")  # one of them makes a folder a run
RUN_COLOURS = 8
Key = TypeVar("Key", int, tuple[int, int])
# Computed from what the record says, see `RunRecord.value`.
LATER_KEPT = ("cost", "later_kept_bytes")
LATER_PEAK = ("cost", "later_peak_memory_bytes")
FEATURES = {"effective_rank": "effective rank", "spread": "spread"}  # what is measured of them without labels
FALLEN = 0.5  # times the best value: below that it is told
# Of gallery.json.
PLACE = (0, 10**6)
LOOK = {"neighbours": [[PLACE]], "points": [[NUMBER]]}
SPRITE = {"image": str, "size": (1, 100_000), "columns": (1, 100_000)}
GALLERY: Json = {"sprite": SPRITE, "groups": [str], "labels": [str], "looks": {"*": LOOK}}
GALLERY |= {"queries": [PLACE], "point_groups": [PLACE], "tiles": [[PLACE]], "chance?": NUMBER}


@dataclass
class RunRecord:
    folder: Path
    results: Json
    gallery: Json | None = None  # of the finished stream
    gallery_problem: str = ""  # why there is none
    tests: list[Json] = field(default_factory=list)  # of evaluations.json

    @property
    def config(self) -> Json:
        return self.results["config"]

    @property
    def later(self) -> Json | None:
        """The latest test on labels that came later."""
        return next((test for test in reversed(self.tests) if test["probes"]), None)

    @cached_property
    def losses(self) -> str:
        """Of all epochs, which no other seed repeats."""
        return str(self.results["cost"]["per_epoch"].get("loss") or "")

    @cached_property
    def epochs(self) -> list[Json]:
        return epoch_lines(self.results)

    def value(self, path: Sequence[str]) -> float | None:
        """The number at this path of the record, if it is there. "later_" before the last key: its mean over the epochs
        of the tasks after the first, in which nothing freezes; "steady_": without the wait for the compiler."""
        *place, key = path
        if key.startswith("later_"):
            return later_mean(self.epochs, key.removeprefix("later_"))
        value = at(self.results, (*place, key.removeprefix("steady_")))
        return value - compiling_seconds(self.results) if value is not None and key.startswith("steady_") else value


@dataclass
class Group:
    """Seeds of one configuration. `place` is where it stands among those compared; 0 is the baseline's."""

    runs: list[RunRecord]
    label: str = ""
    place: int = 0

    @property
    def colour(self) -> int:
        """The number of its role among the colours."""
        return self.place if self.place < RUN_COLOURS else 1 + (self.place - 1) % (RUN_COLOURS - 1)

    @property
    def first(self) -> Json:
        """The results of the first seed."""
        return self.runs[0].results

    @property
    def config(self) -> Json:
        return self.first["config"]

    @property
    def gallery(self) -> Json | None:
        """Of the first seed that has one."""
        return next((run.gallery for run in self.runs if run.gallery), None)

    @property
    def freezing(self) -> list[Json]:
        """What each seed recorded of each task."""
        return [entry for run in self.runs for entry in run.results["freezing"]]

    @property
    def joint(self) -> bool:
        """Whether it learned all tasks at once: a bound for methods that see them one by one, none of these."""
        return len(self.first["tasks"]) == 1 and len(self.first["eval_splits"]) > 1

    @property
    def start(self) -> str:
        return start_of(self.first)

    @property
    def state(self) -> str:
        """Empty for finished runs, else what is there of one."""
        status = self.first["status"]
        done, total = len(self.runs[0].epochs), len(self.first["tasks"]) * self.config["training"]["epochs"]
        word = "unfinished" if status == "running" else status
        return "" if status == "finished" else f"{word}: {done} of {total} epochs written down"

    def values(self, path: Sequence[str]) -> dict[int, float]:
        """By seed, of the runs that have it."""
        found = {run.results["seed"]: run.value(path) for run in self.runs}
        return {seed: float(value) for seed, value in found.items() if value is not None}

    def mean(self, path: Sequence[str]) -> float | None:
        values = self.values(path).values()
        return statistics.fmean(values) if values else None

    def deviation(self, path: Sequence[str]) -> float:
        """Sample standard deviation over seeds, 0 of a single one."""
        values = self.values(path).values()
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def interval(self, path: Sequence[str]) -> tuple[float, float] | None:
        """Of a probe's mean accuracy, at 95 %, from the number of test images, which seeds share."""
        if path[0] != "probes" or "accuracy" not in path[-1]:
            return None
        mean, images = self.mean(path), images_behind(self.first, path[1], path[-1])
        return None if mean is None or images is None else wilson(mean, images)

    def beside(self, path: Sequence[str]) -> list[str]:
        """The lines below a probe's accuracy: its interval, and the accuracy before training."""
        if path[0] != "probes" or path[-1] != "accuracy":
            return []
        bounds, before = self.interval(path), self.mean((*path[:-1], "untrained_accuracy"))
        words = ["{:.1f} to {:.1f}".format(*bounds)] if bounds else []
        return words + ([f"{self.start} {before:.2f}"] if before is not None else [])

    def features(self, key: str, when: str = "features") -> dict[int, tuple[float, float]]:
        """`effective_rank` or `spread` after each task, or before training: mean over seeds, standard deviation."""
        return means([(entry["task"], entry[key]) for run in self.runs for entry in run.results.get(when) or []])

    def feature(self, key: str) -> dict[int, tuple[float | None, float]]:
        """By task: of the encoder before training, where that is known, and after the task, on the same images."""
        before, after = self.features(key, "untrained_features"), self.features(key)
        return {task: (before[task][0] if task in before else None, mean) for task, (mean, _) in after.items()}

    def warnings(self) -> Iterator[str]:
        """Probes by which the encoder was better before training; signs of a collapse, which an accuracy may hide."""
        for probe in self.first["probes"]:
            scores = [run.results["probes"].get(probe, {}) for run in self.runs]
            if words := worsened(probe, scores, self.start, images_behind(self.first, probe, "accuracy")):
                yield words
        counts = {entry["task"]: entry["images"] for run in self.runs for entry in run.results.get("features") or []}
        for key, title in FEATURES.items() if counts else ():
            by_task = self.feature(key)
            # Features of few images have a low rank for that alone.
            found = {task: after for task, (_, after) in by_task.items() if 2 * counts[task] >= max(counts.values())}
            last, best, newest = max(found), max(found, key=lambda task: found[task]), max(by_task)
            before, after = by_task[newest]
            fell = ""
            if found[last] < FALLEN * found[best]:
                fell = f"from {found[best]:.3g} after task {best} to {found[last]:.3g} after task {last}"
            elif before is not None and after < FALLEN * before:
                fell = f"from {before:.3g} ({self.start}) to {after:.3g} after task {newest}, on the same images"
            if fell:
                yield f"the {title} of the features fell {fell}: a sign that they collapse"


@dataclass
class Comparison:
    groups: list[Group]
    damaged: dict[Path, str]  # folders that cannot be read, with the reason
    baseline: Group | None

    @property
    def probes(self) -> list[str]:
        return list(dict.fromkeys(probe for group in self.groups for probe in group.first["probes"]))

    @property
    def known(self) -> list[str]:
        """Probes of what the encoders knew before the stream."""
        return list(dict.fromkeys(probe for group in self.groups for probe in known_probes(group.first)))

    @property
    def seeds(self) -> bool:
        """Whether any configuration has several."""
        return any(len(group.runs) > 1 for group in self.groups)

    @property
    def paired(self) -> list[Group]:
        """Those with at least two seeds in common with the baseline."""
        own = {run.results["seed"] for run in self.baseline.runs} if self.baseline else set()
        others = [group for group in self.groups if group is not self.baseline]
        return [group for group in others if len(own & {run.results["seed"] for run in group.runs}) > 1]

    @property
    def epochs(self) -> list[int]:
        """Of a task; several if the runs differ in it. The least first."""
        return sorted({group.config["training"]["epochs"] for group in self.groups})

    @property
    def tasks(self) -> int:
        return max(max(len(group.first["tasks"]), len(group.first["eval_splits"])) for group in self.groups)


def at(results: Any, path: Sequence[str]) -> float | None:
    """The number at this path of a record, if it is there."""
    return reduce(lambda value, key: (value or {}).get(key), path, results)


def later_mean(epochs: Sequence[Json], key: str) -> float | None:
    later = [value for line in epochs if line["task"] > 1 and (value := line.get(key)) is not None]
    return statistics.fmean(later) if later else None


def known_probes(results: Json) -> dict[str, Json]:
    """Of `evaluation.reference`, by probe."""
    return (results.get("reference") or {}).get("probes", {})


def means(pairs: Iterable[tuple[Key, float | None]]) -> dict[Key, tuple[float, float]]:
    """Mean and sample standard deviation (0 for a single one) of the known values of each key, sorted by key."""
    found: dict[Key, list[float]] = {}
    for key, value in pairs:
        if value is not None:
            found.setdefault(key, []).append(value)
    spreads = {key: statistics.stdev(values) if len(values) > 1 else 0.0 for key, values in found.items()}
    return {key: (statistics.fmean(found[key]), spreads[key]) for key in sorted(found)}


def read_comparison(folders: Sequence[Path], baseline: str | None = None) -> Comparison:
    """All runs in these folders, and in the folders directly below them."""
    runs: list[RunRecord] = []
    damaged: dict[Path, str] = {}
    for folder in dict.fromkeys(found for given in folders for found in run_folders(given)):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            damaged[folder] = str(error)
    if not runs:
        raise UserError(f"no run to report on: {next(iter(damaged.values()))}")
    for run in runs[1:]:
        check_records_comparable(run, runs[0])
    groups = group_seeds(runs)
    name_groups(groups)
    base = choose_baseline(groups, baseline)
    groups.sort(key=lambda group: group is not base)
    for place, group in enumerate(groups, start=0 if base else 1):
        group.place = place
    return Comparison(groups, damaged, base)


def run_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name the folder of a run, or one that holds several")
    if any((folder / name).exists() for name in RUN_FILES):
        return [folder]
    return sorted({path.parent for name in RUN_FILES for path in folder.glob(f"*/{name}")}) or [folder]


def read_run(folder: Path) -> RunRecord:
    run, path = RunRecord(folder, read_results(folder)), folder / "gallery.json"
    run.tests = read_evaluations(folder)
    try:
        gallery, run.gallery_problem = check_gallery(read_json(path)), "it is drawn when the run has finished"
        run.gallery = gallery if "after" in gallery["looks"] else None
    except FileNotFoundError:
        run.gallery_problem = "there is no gallery.json beside results.json (--evaluation.gallery true makes one)"
    except UserError as error:
        run.gallery_problem = str(error)
    except ValueError as error:
        run.gallery_problem = str(damaged(path, error))
    return run


def check_gallery(gallery: Any) -> Json:
    """Raises a ValueError."""
    check_shape(gallery, GALLERY)
    tiles, queries, points, looks = (gallery[key] for key in ("tiles", "queries", "point_groups", "looks"))
    tile_pixels(gallery["sprite"], len(tiles))
    tile, group, label = ((0, len(gallery[name]) - 1) for name in ("tiles", "groups", "labels"))
    check_shape(gallery, {"queries": [tile], "point_groups": [group], "looks": {"*": {"neighbours": [[tile]]}}})
    for row in tiles:
        check_shape(dict(zip(("group", "label"), row, strict=True)), {"group": group, "label": label}, "tiles")
    fits = bool(queries) and ("after" not in looks or "before" in looks)
    for look in looks.values():
        fits &= len(look["neighbours"]) == len(queries) and all(look["neighbours"])
        fits &= len(look["points"]) in (0, len(points)) and all(len(point) == 2 for point in look["points"])
    if not fits:
        raise ValueError("its queries, neighbours and points do not fit together")
    return gallery


def tile_pixels(sheet: Json, count: int, most: int | None = None) -> np.ndarray:
    """The first `count` tiles (N, S, S, 3) of a sheet of images, with at most `most` pixels to a side."""
    columns, size = sheet["columns"], min(sheet["size"], most or sheet["size"])
    try:
        data = base64.b64decode(sheet["image"].partition(",")[2])
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            rows = image.height // sheet["size"]
            if columns * sheet["size"] != image.width or columns * rows < count:
                raise ValueError(f"sprite of {image.width} x {image.height} pixels has no room for {count} tiles")
            pixels = np.asarray(image.convert("RGB").resize((columns * size, rows * size)))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"sprite.image cannot be read: {error}") from None
    return pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)[:count]


def check_records_comparable(run: RunRecord, first: RunRecord) -> None:
    """Figures may stand side by side only if they answer the same question: the same tests on the same images."""
    both, asked = f"{run.folder} and {first.folder} cannot be compared", []
    shared = run.results["probes"].keys() & first.results["probes"].keys()
    for one in (run, first):
        settings = {probe: one.results["probes"][probe]["settings"] for probe in shared}
        splits = {"number of eval_splits": len(one.results["eval_splits"])}
        asked.append({"streams": stream_settings(one.config), "eval_splits": splits, "probes": flatten(settings)})
    for what, mine in asked[0].items():
        if found := describe_difference(mine, asked[1][what]):
            raise UserError(f"{both}: their {what} differ ({found}); report on them separately")
    if found := other_images(run.results, first.results):
        raise UserError(f"{both}: their tasks are of different images ({found}); report on them separately")


def group_seeds(runs: Iterable[RunRecord]) -> list[Group]:
    """Finished runs of one configuration, see `identity_key`, are one group; others stand alone."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        name = identity_key(run.config) if run.results["status"] == "finished" else str(run.folder)
        there = groups.get(name, ())
        if any(run.config["seed"] == other.config["seed"] or run.losses == other.losses != "" for other in there):
            name = str(run.folder)  # the same seed again, or a copy under another one, is no further seed
        groups.setdefault(name, []).append(run)
    return [Group(sorted(group, key=lambda run: run.results["seed"])) for group in groups.values()]


def name_groups(groups: list[Group]) -> None:
    """Recipe names without their common beginning; where two are equal, settings that differ; then the folder. A
    single run is called by its folder."""
    if len(groups) == len(groups[0].runs) == 1:
        groups[0].label = printable(groups[0].runs[0].folder.resolve().name)
        return
    for group, name in zip(groups, split_prefix([group.first["name"] for group in groups])[1], strict=True):
        group.label = name
    for twins in same_label(groups):
        flat = [identity_settings(twin.config) for twin in twins]
        # Keys that only some have belong to a section whose name differs, which says it all.
        keys = [key for key in flat[0] if all(key in one for one in flat) and len({str(one[key]) for one in flat}) > 1]
        short = [key.removesuffix(".name").rpartition(".")[2] for key in keys[:2]]  # objective.name is the objective
        for twin, values in zip(twins, flat, strict=True):
            settings = ", ".join(f"{name} {values[key]}" for name, key in zip(short, keys, strict=False))
            twin.label += f" ({settings or printable(twin.runs[0].folder.name)})"
    for twin in (twin for twins in same_label(groups) for twin in twins):
        twin.label += f" in {printable(twin.runs[0].folder.name)}"


def split_prefix(names: Sequence[str]) -> tuple[str, list[str]]:
    """What all names begin with, up to a slash, and each without it. A single one stays whole."""
    parts = [name.split("/") for name in names]
    shared = 0
    while len(parts) > 1 and min(map(len, parts)) > shared + 1 and len({part[shared] for part in parts}) == 1:
        shared += 1
    return "/".join(parts[0][:shared]), ["/".join(part[shared:]) for part in parts]


def same_label(groups: list[Group]) -> list[list[Group]]:
    labels = Counter(group.label for group in groups)
    return [[group for group in groups if group.label == label] for label, count in labels.items() if count > 1]


def choose_baseline(groups: list[Group], name: str | None) -> Group | None:
    """The group asked for by label, recipe or folder; else the finished LUMP run without freezing, if there is one."""
    if name is None:
        return next((g for g in groups if g.first.get("baseline") and not g.state), None)
    for group in groups:
        names = {group.label, group.config.get("recipe")} | {run.folder.name for run in group.runs}
        if name in names or Path(name).resolve() in {run.folder.resolve() for run in group.runs}:
            return group
    raise unknown("baseline", name, [group.label for group in groups])
