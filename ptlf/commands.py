"""What the commands do: a function for each, which takes the command's options by name, calls, and prints."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ptlf.core import processes
from ptlf.core.errors import UserError, unknown
from ptlf.core.settings import as_dict, merge, parse_overrides
from ptlf.core.words import short_repr
from ptlf.encoders import ENCODERS
from ptlf.evaluation import PROBES
from ptlf.integrations.trackers import TRACKERS
from ptlf.learner import Learner
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.report.intervals import RANDOM, images_of_mean, start_of, worsened
from ptlf.report.live import Live, console, tell
from ptlf.report.runs import read_comparison
from ptlf.report.tables import (
    show_matrix,
    show_results,
    show_runs,
)
from ptlf.run import sweep as sweeps
from ptlf.run.cluster import train_as_jobs
from ptlf.run.config import Config, read_yaml
from ptlf.run.embedding import embed_images
from ptlf.run.evaluate import evaluate_labelled, evaluate_run, may_change
from ptlf.run.export import export_run
from ptlf.run.fitting import free_settings
from ptlf.run.folder import check_vacant, has_finished, has_finished_as
from ptlf.run.freezing import POLICIES
from ptlf.run.loop import Run
from ptlf.run.recipes import VARIANTS, name_of, recipe_names, resolve_config
from ptlf.run.results import read_results, refuse_folder_of_runs
from ptlf.stream import STREAMS, fetch
from ptlf.stream.disk import quote_names
from ptlf.stream.folders import pack_folder, subfolders
from ptlf.stream.images import is_image_folder
from ptlf.stream.pack import Folders, Pack, list_packs, verify_pack
from ptlf.stream.packing import pack_images
from ptlf.stream.squares import OnError
from ptlf.training.optimizers import OPTIMIZERS
from ptlf.training.process import Stopped
from ptlf.views import VIEWS

NO_PACKS = "no packed data sets in {}; `ptlf data get cifar10` gets one"
LEARN = "arriving/simsiam/ptlf"
Words = Sequence[str]  # overrides are settings, such as --training.epochs 2


def train(
    recipe: str | None,
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    log: Words | None,
    trust_code: bool,
    overrides: Words,
) -> None:
    overrides = with_log(overrides, log)
    with processes.process_group():
        if resume:
            named = [name for name, value in {"--out": out, "--recipe": recipe, "-c": config}.items() if value]
            named += [word.partition("=")[0] for word in overrides if word.startswith("--")]
            for word in named:
                if word not in ("--device", "--log"):  # these may change: the machine, and who tracks the run
                    raise UserError(f"--resume takes the settings of {resume / 'config.yaml'}; leave out {word}")
            # Where several machines share the run, only the first has its folder.
            settings: Any = None
            if processes.is_first():
                if not (resume / "config.yaml").exists():
                    refuse_folder_of_runs(resume)
                settings = resolve_config("", resume / "config.yaml", overrides, trust_code=trust_code)
            train_in(resume, processes.broadcast_object(settings), resume=True, strict=False)
        elif out:
            # After a restart by torchrun the command is the same, and the run is there already.
            said = tell if processes.is_first() and not (out / "config.yaml").exists() else unsaid
            chosen = resolve_config(recipe, config, overrides, trust_code=trust_code, tell=said)
            train_in(out, processes.broadcast_object(chosen), resume=processes.restarts() > 0)
        else:
            raise UserError("`ptlf train` needs --out DIR, the folder for the run, or --resume DIR, one to go on with")


def unsaid(line: str) -> None: ...


def train_in(folder: Path, config: Config, *, resume: bool, strict: bool = True) -> None:
    """Train, show and draw. A run to resume must have these very settings, if `strict`."""
    first = processes.is_first()
    if resume and processes.broadcast_object(
        first and (has_finished_as(folder, config) if strict else has_finished(folder))
    ):
        return tell(f"{folder}: already finished")
    if first and not resume:
        check_vacant(folder)  # before tasks that arrived there are taken for the new run's
    run = Run(config, folder)
    results = run.train(Live(name_of(as_dict(run.config))), resume=resume)
    if first:
        show_results(console, results, folder)
        write_page([folder], folder / "report.html")


def learn(
    folder: Path,
    source: str | None,
    recipe: str | None,
    config: Path | None,
    size: int | None,
    name: str | None,
    watch: Path | None,
    settle: float,
    every: float,
    once: bool,
    log: Words | None,
    trust_code: bool,
    overrides: Words,
    **how: Any,
) -> None:
    """how: `again`, `new_only`, and how images are packed, for `Learner.learn`."""
    check_alone("ptlf learn")
    if source and overrides and not overrides[0].startswith("-"):
        one = f"`ptlf learn` takes one folder of images per call, and {short_repr(overrides[0])} is a second one"
        raise UserError(f"{one}; call it once for each, or give --watch DIR to learn every subfolder of DIR")
    if watch and (source or name):
        raise UserError(f"--watch takes its tasks from {watch}; leave out {'SOURCE' if source else '--name'}")
    if watch and how["new_only"]:
        one = f"`ptlf learn {folder} FOLDER --new-only`"
        raise UserError(f"--watch learns a folder once; for one that has grown call {one}")
    if not watch and once:
        raise UserError("--once is for --watch DIR")
    learner = open_learner(folder, recipe, config, size, trust_code, with_log(overrides, log))
    if watch:
        results = None
        for results in learner.watch(watch, settle=settle, every=every, once=once, **how):
            show_results(console, results, folder, brief=True)
            write_page([folder], folder / "report.html")
        if results:
            return show_runs(console, {results["name"]: [results]})
        young = f"its subfolders were learnt or hold no images{f', or changed in the last {settle:g} s' * bool(settle)}"
        return tell(f"nothing new in {watch}: {young if subfolders(watch) else 'it has no subfolders to learn'}")
    if source is None and learner.exists and has_finished(folder):
        return tell(f"{folder}: nothing to finish; give images to learn")
    try:
        results = learner.learn(source, name, **how)
    except KeyboardInterrupt:  # before training, or in it without checkpoints: the task may not be in the run yet
        raise Stopped(folder, signal.SIGINT, "nothing more is saved; give the same command again") from None
    show_results(console, results, folder)
    write_page([folder], folder / "report.html")


def open_learner(
    folder: Path, recipe: str | None, config: Path | None, size: int | None, trust_code: bool, overrides: Words
) -> Learner:
    """The run in the folder, or a new one with these settings."""
    if not (folder / "config.yaml").exists():
        words = [word.partition("=")[0] for word in overrides if word.startswith("--stream.")]
        for word in words:
            if word not in ("--stream.labelled", "--stream.resident"):
                raise UserError(f"`ptlf learn` takes tasks as they arrive; leave out {word}")
        values = read_yaml(config) if config else {}
        recipe = recipe or (None if values.get("recipe") else LEARN)  # None: the one that the file names
        chosen = resolve_config(recipe, config, overrides, trust_code=trust_code)
        given = merge(Config, values, parse_overrides(Config, overrides))
        own = STREAMS.find(chosen.recipe.partition("/")[0]).own
        return Learner.new(chosen, folder, size, free_settings(given) if own else ())
    given = {"--recipe": recipe, "-c": config, "--size": size}
    for word in [word for word, value in given.items() if value]:
        raise UserError(f"{folder} has settings of its own, in config.yaml; leave out {word}")
    return Learner.load(folder, trust_code=trust_code, **parse_overrides(Config, overrides))


def with_log(overrides: Words, log: Words | None) -> list[str]:
    """The settings, with the trackers of --log."""
    return [*overrides, f"--log=[{', '.join(log)}]"] if log else [*overrides]


def sweep(
    recipes: Words,
    seeds: list[int],
    out: Path,
    baseline: str | None,
    log: Words | None,
    overrides: Words,
    **jobs: Any,
) -> None:
    """jobs: `cluster`, `jobs` and `job_options`, for `cluster.train_as_jobs`."""
    overrides = with_log(overrides, log)
    if any(word.partition("=")[0] == "--seed" for word in overrides):
        raise UserError("`ptlf sweep` takes --seeds, such as --seeds 0 1 2, in place of --seed")
    if baseline:
        ends = [recipe for recipe in recipes if f"/{recipe}".endswith(f"/{baseline}")]
        if not ends:
            raise unknown("baseline", baseline, recipes)
        baseline = ends[0]
    if not jobs["cluster"] and any(jobs.values()):
        raise UserError("--jobs and --job-options are for --cluster local or slurm; without it runs follow one another")
    check_alone("ptlf sweep")
    runs = sweeps.plan(recipes, seeds, out, overrides, tell_once())
    missing = [run for run in runs if not has_finished_as(run.folder, run.config)]
    for run in runs:
        if run not in missing:
            tell(f"{run.name}: already finished in {run.folder}")
    watch = tell_count(len(runs) - len(missing), missing)
    if jobs["cluster"]:
        train_as_jobs(missing, out / "jobs", **jobs, tell=tell)
    else:
        for run, results in sweeps.train_all(missing, watch):
            show_results(console, results, run.folder, brief=True)
    several = f", means of {len(set(seeds))} seeds" if len(set(seeds)) > 1 else ""
    groups: dict[str, list[dict[str, Any]]] = {}  # by recipe
    for run in runs:
        groups.setdefault(run.config.recipe, []).append(read_results(run.folder))
    base = baseline or next((name for name, some in groups.items() if some[0].get("baseline")), None)
    show_runs(console, groups, base, f"Summary{several}")
    write_page(with_others([run.folder for run in runs], out), out / "report.html", baseline)


def with_others(folders: list[Path], out: Path) -> list[Path]:
    """The runs of a sweep, and those that earlier ones finished in the same folder, if they can be compared."""
    found = [*folders]
    for folder in sorted({path.parent for path in out.glob("*/results.json")} - {*folders}):
        with suppress(UserError):
            if has_finished(folder) and read_comparison([folders[0], folder]):
                found.append(folder)
    return found


def tell_count(done: int, missing: Sequence[sweeps.Planned], left_out: str = "") -> sweeps.Watch:
    """Tells how many runs are done and how many are missing. What is returned tells with each which one it is."""
    tell(sweeps.describe_runs(done, missing) + left_out)
    return sweeps.announced(done, missing, Live, tell)


def tell_once() -> Callable[[str], None]:
    """Tells a line the first time: what is chosen is the same for all runs."""
    told: set[str] = set()

    def say(line: str) -> None:
        if line not in told:
            tell(line)
        told.add(line)

    return say


def check_alone(command: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"torchrun can share one run among processes: start `ptlf train` with it, not `{command}`")


def write_page(folders: Sequence[Path], out: Path, baseline: str | None = None) -> None:
    """The runs are done and saved: a page that cannot be made is worth a sentence, not a failure."""
    from ptlf.report.page import write_report  # matplotlib takes a while

    try:
        write_report(folders, out, baseline)
        tell(f"report: {out}")
    except UserError as error:
        tell(f"no report: {error}")


def evaluate(
    folder: Path,
    probe: Sequence[str] | None,
    on_error: OnError,
    trust_code: bool,
    overrides: Words,
) -> None:
    for word in (word.partition("=")[0] for word in overrides if word.startswith("--")):
        if not may_change(word[2:].replace("-", "_")):
            raise UserError(f"`ptlf evaluate` changes the probes only; leave out {word}")
    for name in probe or ():
        PROBES.find(name)
    if not (folder / "config.yaml").exists():
        refuse_folder_of_runs(folder)
    config = resolve_config("", folder / "config.yaml", overrides, trust_code=trust_code)
    if any(word.startswith("--stream.labelled") for word in overrides) and config.stream.labelled:
        probes, eval_splits = evaluate_labelled(folder, config, config.stream.labelled, probe, on_error=on_error)
    else:
        probes, eval_splits = evaluate_run(folder, config, probe)
    start = start_of(read_results(folder)) if (folder / "results.json").exists() else RANDOM
    for name, values in probes.items():
        show_matrix(console, name, values, eval_splits, values["test_images"], start)
    for name, values in probes.items():
        if words := worsened(name, values, start, images_of_mean(values["test_images"])):
            console.print(words, style="yellow", soft_wrap=True)


def embed(folder: Path, images: Words, out: Path, **how: Any) -> None:
    """how: the arguments of `embed_images`."""
    count, dim, skipped = embed_images(folder, images, out, **how)
    left_out = f", {len(skipped)} skipped" if skipped else ""
    tell(f"{out}: features of {count} image{'s' * (count != 1)}, {dim} numbers each{left_out}")


def export(folder: Path, to: Path, **how: Any) -> None:
    """how: the arguments of `export_run`."""
    difference, greatest = export_run(folder, to, **how)
    tell(
        f"{to}: checked on random images; differs from PyTorch by {difference:.1e} where features reach {greatest:.2g}"
    )


def list_members(what: str | None) -> None:
    families: dict[str, dict[str, str]] = {
        "streams": {name: entry.about for name, entry in STREAMS.items()},
        "data": {name: entry.about for name, entry in fetch.SOURCES.items()},
        "objectives": summaries(OBJECTIVES),
        "methods": summaries(METHODS) | {name: with_freezing(**variant) for name, variant in VARIANTS.items()},
        "policies": summaries(POLICIES),
        "encoders": {name: entry.about for name, entry in ENCODERS.items()},
        "optimizers": summaries(OPTIMIZERS),
        "probes": summaries(PROBES),
        "trackers": summaries(TRACKERS),
        "views": {name: " ".join((make.__doc__ or "").split()) for name, make in VIEWS.items()},
        "recipes": dict.fromkeys(recipe_names(), ""),
    }
    if what is not None and what not in families:
        raise unknown("family", what, families)
    for family in [what] if what else families:
        members, heading = families[family], f"{family}:"
        if what is None and family == "recipes":
            heading = f"recipes: {len(members)} of STREAM/OBJECTIVE/METHOD; `ptlf list recipes` names them"
            members = {}
        print(heading)
        for name, about in members.items():
            print(f"  {name:<36} {about}".rstrip())
    if what is None:
        print("A member of your own goes by PACKAGE.MODULE:ATTRIBUTE in place of a name; see CONTRIBUTING.md.")


def with_freezing(method: str, policy: str, **settings: Any) -> str:
    shares = "".join(f", freezing.{key} {value}" for key, value in settings.items())
    return f"In recipes: {method} with freezing, freezing.policy {policy}{shares}"


def summaries(family: Mapping[str, type]) -> dict[str, str]:
    """What each member is: the first paragraph about its class, or about its file if that is ours and has no other."""
    files = [kind.__module__ for kind in family.values()]
    texts = {}
    for name, kind in family.items():
        alone = kind.__module__.startswith("ptlf.") and files.count(kind.__module__) == 1
        text = (sys.modules[kind.__module__].__doc__ if alone else kind.__doc__) or kind.__doc__ or ""
        texts[name] = " ".join(text.split("\n\n")[0].split())
    return texts


def data_get(name: str, data_root: str | None, **how: Any) -> None:
    show_pack(fetch.get(name, fetch.data_root(data_root), **how))


def data_pack(source: Path, name: str, data_root: str | None, folders: Folders, **how: Any) -> None:
    root = fetch.data_root(data_root)
    if is_image_folder(source):
        pack = pack_folder(source, root, name, folders=folders, **how)
        show_pack(pack)
        if folders == "tasks":
            print(f"  the order of the tasks, by their names: {quote_names(pack.names)}")
    elif folders == "tasks":
        raise UserError(f"--folders tasks is for a folder of image folders, and {source} is none; leave it out")
    else:
        show_pack(pack_images(source, root / name, **how))
    if how["fit"] == "crop":
        print("  what lies outside an image's centre square was cut off; --fit squash or pad keeps it")


def data_verify(names: Sequence[str], data_root: str | None) -> None:
    root = fetch.data_root(data_root)
    names = names or [pack.name for pack in list_packs(root)]
    if not names:
        raise UserError(NO_PACKS.format(root))
    problems = {name: verify_pack(root, name) for name in names}
    for name, found in problems.items():
        print(f"{name}: {'; '.join(found) if found else 'as packed'}")
    if any(problems.values()):
        raise UserError("damaged: " + ", ".join(name for name, found in problems.items() if found))


def data_list(data_root: str | None) -> None:
    root = fetch.data_root(data_root)
    packs = list_packs(root)
    if not packs:
        print(NO_PACKS.format(root))
    for pack in packs:
        show_pack(pack)


def show_pack(pack: Pack) -> None:
    counts = ", ".join(f"{split.count} {name}" for name, split in pack.splits.items())
    images = f"{counts} images of {pack.size} px{'' if pack.fit == 'crop' else f', {pack.fit}'}"
    print(f"{pack.name}: {images}, {len(pack.names)} {pack.folders}, in {pack.path}")
