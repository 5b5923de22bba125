"""Runs read from their folders and checked; seeds of one configuration grouped; what cannot be compared refused."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

from ptlf.core.errors import UserError, unknown
from ptlf.core.reading import damaged, flatten, read_json
from ptlf.report.checks import check_gallery
from ptlf.report.intervals import images_behind, start_of, wilson, worsened
from ptlf.run.compat import describe_difference, identity_key, identity_settings, other_images, stream_settings
from ptlf.run.results import Json, compiling_seconds, epoch_lines, read_evaluations, read_results

RUN_FILES = ("results.json", "config.yaml")  # one of them makes a folder a run
RUN_COLOURS = 8
Key = TypeVar("Key", int, tuple[int, int])
LATER_KEPT = ("cost", "later_kept_bytes")
LATER_PEAK = ("cost", "later_peak_memory_bytes")
LEARNING = ("seconds", "correlation_seconds", "rebuild_seconds")  # of an epoch
LEARNING_SECONDS = ("cost", "learning_seconds")
# Seconds of the record, and the same without the wait for the compiler, as they stand beside other runs'.
STEADY_SECONDS: dict[tuple[str, ...], tuple[str, ...]] = {
    LEARNING_SECONDS: ("cost", "steady_learning_seconds"),
    ("cost", "train_seconds"): ("cost", "steady_train_seconds"),
}
RECORDED_SECONDS = {steady: recorded for recorded, steady in STEADY_SECONDS.items()}
FEATURES = {"effective_rank": "effective rank", "spread": "spread"}  # what is measured of them without labels
OLDER = "records of older versions do not hold it"  # why a figure of some runs is missing
FALLEN = 0.5  # times the best value: below that it is told


@dataclass
class RunRecord:
    folder: Path
    results: Json
    gallery: Json | None = None
    gallery_problem: str = ""
    later: Json | None = None  # the latest test on labels that came later

    @property
    def config(self) -> Json:
        return self.results["config"]

    @property
    def finished(self) -> bool:
        return self.results["status"] == "finished"

    @cached_property
    def epochs(self) -> list[Json]:
        return epoch_lines(self.results)

    def value(self, path: Sequence[str]) -> float | None:
        """The number at this path of the record, if it is there; or computed: a mean over the epochs after the first
        task, seconds without the wait for the compiler."""
        path = tuple(path)
        if path in (LATER_KEPT, LATER_PEAK):
            return later_mean(self.epochs, path[-1].removeprefix("later_"))
        value = at(self.results, RECORDED_SECONDS.get(path, path))
        return value if value is None or path not in RECORDED_SECONDS else value - compiling_seconds(self.results)

    @property
    def known(self) -> dict[str, Json]:
        """What the encoder knew before the stream, by probe."""
        return known_probes(self.results)

    @property
    def state(self) -> str:
        """Empty for a finished run, else what is there of it."""
        if self.finished:
            return ""
        word = "unfinished" if self.results["status"] == "running" else self.results["status"]
        total = len(self.results["tasks"]) * self.config["training"]["epochs"]
        return f"{word}: {len(self.epochs)} of {total} epochs written down"


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
    def joint(self) -> bool:
        """Whether it learned all tasks at once: a bound for methods that see them one by one, none of these."""
        return len(self.first["tasks"]) == 1 and len(self.first["eval_splits"]) > 1

    @property
    def first_row(self) -> str:
        """What the encoder before training is called beside the trained one."""
        return "as given" if self.first.get("encoder_weights") else "untrained"

    @property
    def state(self) -> str:
        return self.runs[0].state

    def values(self, path: Sequence[str]) -> list[float]:
        """One number per seed that has it."""
        return [float(value) for run in self.runs if (value := run.value(path)) is not None]

    def mean(self, path: Sequence[str]) -> float | None:
        values = self.values(path)
        return statistics.fmean(values) if values else None

    def spread(self, path: Sequence[str]) -> float | None:
        """Sample standard deviation over seeds."""
        values = self.values(path)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def start(self) -> str:
        return start_of(self.first)

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
        words = [f"{bounds[0]:.1f} to {bounds[1]:.1f}"] if bounds else []
        return words + ([f"{self.start} {before:.2f}"] if before is not None else [])

    def worse(self) -> Iterator[str]:
        """Of each probe by which the encoder was better before training."""
        for probe in self.first["probes"]:
            means = {key: self.mean(("probes", probe, key)) for key in ("untrained_accuracy", "accuracy")}
            if words := worsened(probe, means, self.start, images_behind(self.first, probe, "accuracy")):
                yield words

    def feature(self, key: str) -> dict[int, tuple[float | None, float]]:
        """`effective_rank` or `spread` by task: of the encoder before training, where that is known, and after the
        task, on the same images. Means over seeds."""
        before, after = (
            means([(entry["task"], entry[key]) for run in self.runs for entry in run.results.get(name) or []])
            for name in ("untrained_features", "features")
        )
        return {task: (before[task][0] if task in before else None, mean) for task, (mean, _) in after.items()}

    def falling(self) -> Iterator[str]:
        """Signs of a collapse, with labels or without: an accuracy may hide it."""
        entries = [entry for run in self.runs for entry in run.results.get("features") or []]
        counts = {entry["task"]: entry.get("images") or 0 for entry in entries}
        for key, title in FEATURES.items():
            by_task = self.feature(key)
            # Features of few images have a low rank for that alone. Older records do not say how many there were.
            comparable = {t: after for t, (_, after) in by_task.items() if 2 * counts[t] >= max(counts.values())}
            if not comparable:
                continue
            last, best, newest = max(comparable), max(comparable, key=lambda task: comparable[task]), max(by_task)
            before, after = by_task[newest]
            if comparable[last] < FALLEN * comparable[best]:
                fell = f"from {comparable[best]:.3g} after task {best} to {comparable[last]:.3g} after task {last}"
            elif before is not None and after < FALLEN * before:
                fell = f"from {before:.3g} ({self.start}) to {after:.3g} after task {newest}, on the same images"
            else:
                continue
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
    """Of a cost, the mean over the epochs of the tasks after the first, in which nothing freezes."""
    later = [value for line in epochs if line["task"] > 1 and (value := line.get(key)) is not None]
    return statistics.fmean(later) if later else None


def later_seconds(epochs: Sequence[Json]) -> float | None:
    """Of learning in the tasks after the first, in which nothing freezes: steps, correlations, rebuilds."""
    later = [line for line in epochs if line["task"] > 1]
    return sum(line.get(key) or 0.0 for line in later for key in LEARNING) if later else None


def known_probes(results: Json) -> dict[str, Json]:
    """Of `evaluation.reference`, by probe."""
    return (results.get("reference") or {}).get("probes", {})


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
    check_records_comparable(runs)
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
    run = RunRecord(folder, read_results(folder))
    run.later = next(reversed(read_evaluations(folder)), None)
    path = folder / "gallery.json"
    try:
        run.gallery = check_gallery(read_json(path))
    except FileNotFoundError:
        run.gallery_problem = "there is no gallery.json beside results.json (`--evaluation.gallery true` makes one)"
    except UserError as error:
        run.gallery_problem = str(error)
    except ValueError as error:
        run.gallery_problem = str(damaged(path, error))
    return run


def check_records_comparable(runs: Sequence[RunRecord]) -> None:
    """Figures may stand side by side only if they answer the same question: the same tests on the same images."""
    asked: list[dict[str, Json]] = []
    for run in runs:
        settings = {probe: values["settings"] for probe, values in run.results["probes"].items()}
        splits = {"number of eval_splits": len(run.results["eval_splits"])}
        asked.append({"streams": stream_settings(run.config), "eval_splits": splits, "probes": flatten(settings)})
        both = f"{run.folder} and {runs[0].folder} cannot be compared"
        for what in asked[0]:
            if found := describe_difference(asked[-1][what], asked[0][what]):
                raise UserError(f"{both}: their {what} differ ({found}); report on them separately")
        if found := other_images(run.results, runs[0].results):
            raise UserError(f"{both}: their tasks are of different images ({found}); report on them separately")


def means(pairs: Iterable[tuple[Key, float | None]]) -> dict[Key, tuple[float, float]]:
    """Mean and sample standard deviation (0 for a single one) of the known values of each key, sorted by key."""
    found: dict[Key, list[float]] = {}
    for key, value in pairs:
        if value is not None:
            found.setdefault(key, []).append(value)
    spreads = {key: statistics.stdev(values) if len(values) > 1 else 0.0 for key, values in found.items()}
    return {key: (statistics.fmean(found[key]), spreads[key]) for key in sorted(found)}


def group_seeds(runs: Iterable[RunRecord]) -> list[Group]:
    """Finished runs of one configuration, see `identity_key`, are one group; others stand alone."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        name = identity_key(run.config) if run.finished else str(run.folder)
        if any(run.config["seed"] == other.config["seed"] for other in groups.get(name, ())):
            name = str(run.folder)  # the same seed again is no further seed
        groups.setdefault(name, []).append(run)
    return [Group(sorted(group, key=lambda run: run.results.get("seed") or 0)) for group in groups.values()]


def name_groups(groups: list[Group]) -> None:
    """Recipe names without what they all begin with; where two are equal, the settings that differ and count; then the
    folder."""
    parts = [group.first["name"].split("/") for group in groups]
    while len(groups) > 1 and all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    for group, part in zip(groups, parts, strict=True):
        group.label = "/".join(part)
    for twins in same_label(groups):
        flat = [identity_settings(twin.config) for twin in twins]
        # Keys that only some have belong to a section whose name differs, which says it all.
        keys = [key for key in flat[0] if all(key in one for one in flat) and len({str(one[key]) for one in flat}) > 1]
        whole = {key: key.removesuffix(".name") for key in keys}  # objective.name is the objective
        last = Counter(name.split(".")[-1] for name in whole.values())
        for twin, values in zip(twins, flat, strict=True):
            short = {
                key: name.split(".")[-1] if last[name.split(".")[-1]] == 1 else name for key, name in whole.items()
            }
            settings = ", ".join(f"{short[key]} {values[key]}" for key in keys[:2])
            twin.label += f" ({settings or twin.runs[0].folder.name})"
    for twins in same_label(groups):
        for twin in twins:
            twin.label += f" in {twin.runs[0].folder.name}"


def same_label(groups: list[Group]) -> list[list[Group]]:
    labels = Counter(group.label for group in groups)
    return [[group for group in groups if group.label == label] for label, count in labels.items() if count > 1]


def policy_of(config: Json) -> str:
    return config["freezing"]["policy"]["name"]


def choose_baseline(groups: list[Group], name: str | None) -> Group | None:
    """The group asked for by label, recipe or folder; else the finished LUMP run without freezing, if there is one."""
    if name is None:
        return next((g for g in groups if g.first.get("baseline") and not g.state), None)
    for group in groups:
        names = {group.label, group.config.get("recipe")} | {run.folder.name for run in group.runs}
        if name in names or Path(name).resolve() in {run.folder.resolve() for run in group.runs}:
            return group
    raise unknown("baseline", name, [group.label for group in groups])
