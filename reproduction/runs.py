"""The runs behind the paper's tables: which there are, which are missing, and what those would take."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.planning import work
from ptlf.core.errors import UserError
from ptlf.core.phases import Watcher
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict
from ptlf.run.compat import NON_IDENTITY, describe_changes, identity_key
from ptlf.run.config import Config, from_dict, read_yaml
from ptlf.run.folder import all_text
from ptlf.run.recipes import resolve_config
from ptlf.run.results import Json, read_results
from ptlf.run.sweep import Planned, Tell, train_all
from ptlf.stream import STREAMS
from ptlf.stream.pack import data_root
from reproduction.tables import Cell, Table

Key = tuple[str, tuple[str, ...]]  # recipe and settings: `Cell.key`
SCALES = ("smoke", "short", "paper")
FEW: Mapping[str, str] = {  # images per class: 40 per task
    "split-cifar10": "20",
    "split-cifar100": "8",
    "split-tinyimagenet": "8",
    "imagenet100": "2",
}


def scale_settings(scale: str, recipe: str) -> list[str]:
    """What the scale changes in the recipe. smoke: every task of the stream with 40 images, two epochs, views of 16 px
    and a small network, to see every cell run; short: 20 epochs, all else as the paper has it."""
    words = ["--evaluation.gallery=false"]
    if scale == "short":
        words += ["--training.epochs=20"]
    if scale == "smoke":
        stream, objective, _ = recipe.split("/")
        small = {"stream.per_class": FEW.get(stream, "20"), "encoder.name": "resnet18-mini", "views.size": "16"}
        small |= {"training.epochs": "2", "training.warmup": "0", "training.batch": "20", "memory.size": "32"}
        small |= {"freezing.batches": "1", "probes.knn_class.k": "10", "checkpoint.every_minutes": "1"}
        if objective != "supervised":
            small["objective.projection"] = "64"
        if objective == "mocov2plus":
            small |= {"objective.hidden": "64", "objective.queue": "128"}
        if stream == "imagenet100":
            small["probes.linear.epochs"] = "5"
        words += [f"--{key}={value}" for key, value in small.items()]
    return words


@dataclass(frozen=True)
class Found:
    """A finished run."""

    folder: Path
    results: Json


@dataclass
class Plan:
    """What a table needs. `runs` has every run by key and seed, `found` the finished ones, of any seed."""

    runs: dict[tuple[Key, int], Planned] = field(default_factory=dict)
    found: dict[Key, dict[int, Found]] = field(default_factory=dict)
    left_out: dict[str, list[Planned]] = field(default_factory=dict)  # missing too, by the data set that is not packed
    missing: list[Planned] = field(default_factory=list)  # the cheapest first

    def there(self) -> list[Path]:
        """Folders of those of `runs` that are finished."""
        return [self.found[key][seed].folder for key, seed in self.runs if seed in self.found[key]]

    def of_other_seeds(self) -> list[Path]:
        """Folders of finished runs that were not asked for, but count in the means."""
        found = {(key, seed): one.folder for key, seeds in self.found.items() for seed, one in seeds.items()}
        return [folder for place, folder in found.items() if place not in self.runs]

    def results(self) -> dict[Key, list[Json]]:
        """By seed, in order."""
        return {key: [seeds[seed].results for seed in sorted(seeds)] for key, seeds in self.found.items()}


def kept_runs(roots: Iterable[Path], words: Sequence[str] = ()) -> dict[str, dict[int, list[Found]]]:
    """Every finished run below these folders, by its settings and seed. A setting that a record does not have is taken
    to have its default. What cannot be read, has settings that are no more, or names code that `words`, the user's, do
    not name is left out."""
    kept: dict[str, dict[int, list[Found]]] = {}
    for path in (path for root in roots for path in sorted(root.rglob("results.json"))):
        try:
            results = read_results(path.parent)
            if results["status"] != "finished":
                continue
            with settings_from(path, words):
                config = from_dict(results["config"])
        except UserError:
            continue
        alike = kept.setdefault(identity_key(as_dict(config)), {})
        alike.setdefault(config.seed, []).append(Found(path.parent, results))
    return kept


KEPT = Path(__file__).resolve().parent.parent / "results"


def remarks(root: Path) -> dict[str, str]:
    """What was found where a cell differs from the paper's: `remarks.yaml` in that folder, by `Cell.name`."""
    return {str(key): str(value) for key, value in read_yaml(root / "remarks.yaml").items()}


def full_runs(root: Path) -> list[tuple[str, Json]]:
    """Name and results of every finished run at the full protocol in that folder, and in `again` of it."""
    found = sorted([*root.glob("split-*/results.json"), *root.glob("again/split-*/results.json")])
    runs = [(path.parent.name, read_results(path.parent)) for path in found]
    return sorted((name, run) for name, run in runs if run["status"] == "finished")


def wanted(tables: Iterable[Table]) -> dict[Key, Cell]:
    """The runs of the tables' cells, and those that their costs are relative to."""
    cells: dict[Key, Cell] = {}
    for cell in (cell for table in tables for cell in table.cells):
        cells.setdefault(cell.key, cell)
        if cell.baseline:
            baseline = Cell("", cell.column, cell.baseline)
            cells.setdefault(baseline.key, baseline)
    return cells


def make_plan(
    tables: Iterable[Table],
    scale: str,
    seeds: Sequence[int],
    runs: Path,
    overrides: Sequence[str],
    kept: Iterable[Path],
) -> Plan:
    """runs: the folder that new runs go below; finished ones are also looked for in `kept`."""
    plan, there, seeds = Plan(), kept_runs([*kept, runs], overrides), list(dict.fromkeys(seeds))
    for key, cell in wanted(tables).items():
        words = [*scale_settings(scale, cell.recipe), *overrides, *cell.settings]
        config = resolve_config(cell.recipe, None, words)
        alike = there.get(identity_key(as_dict(config)), {})
        # Of several runs with one seed: one of this very recipe, then the first by name.
        plan.found[key] = {
            seed: min(some, key=lambda one: (one.results["config"]["recipe"] != cell.recipe, one.folder.name))
            for seed, some in alike.items()
        }
        for seed in seeds:
            name = f"{cell.name} seed {seed}" if len(seeds) > 1 else cell.name
            folder = runs / f"{cell.name.replace('/', '-').replace(' ', '-')}-seed{seed}"
            plan.runs[key, seed] = Planned(name, resolve_config(cell.recipe, None, [*words, f"--seed={seed}"]), folder)
    lacking = [run for (key, seed), run in plan.runs.items() if seed not in plan.found[key]]
    for run in lacking:
        if pack := not_packed(run.config):
            plan.left_out.setdefault(pack, []).append(run)
        else:
            plan.missing.append(run)
    check_folders(plan.missing)
    works = {run.folder: work(run.config) for run in plan.missing}
    plan.missing.sort(key=lambda run: works[run.folder])
    return plan


def not_packed(config: Config) -> str:
    """Which data set the stream lacks; empty if it is there."""
    root, pack = data_root(config.data_root), config.stream.pack or STREAMS.find(config.stream.name).pack
    if pack is None or (root / pack / "pack.json").exists():
        return ""
    return pack


def check_folders(runs: Sequence[Planned]) -> None:
    """A run that was begun can only be continued with its own settings."""
    for run in runs:
        path = run.folder / "config.yaml"
        if not path.exists():
            continue
        with settings_from(path, all_text(as_dict(run.config))):
            there = from_dict(read_yaml(path))
        if changed := describe_changes(as_dict(there), as_dict(run.config), NON_IDENTITY):
            hint = "choose another --runs, or remove that folder"
            raise UserError(f"{run.folder} holds a run with other settings ({changed}); {hint}")


def train_missing(
    plan: Plan, watch: Callable[[str], Watcher], tell: Tell
) -> Iterator[tuple[Planned, Json | UserError]]:
    """Each run with its results, or with why it failed; the others continue."""
    keys = {run.folder: (key, seed) for (key, seed), run in plan.runs.items()}
    for run, results in train_all(plan.missing, watch, tell, len(plan.there()), keep_going=True):
        if not isinstance(results, UserError):
            key, seed = keys[run.folder]
            plan.found[key][seed] = Found(run.folder, results)
        yield run, results
