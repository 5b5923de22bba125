"""The commands of `ptlf` and their options. Importing this file is quick: it imports no torch."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ptlf import __version__
from ptlf.core.errors import printable, short_repr
from ptlf.core.files import cached_text

Verb = Callable[..., Callable[..., None]]  # declares a command; what it returns adds an option to it
DEBUG = "show the traceback of every error, as PTLF_DEBUG=1 does"
TRACKERS = ("tensorboard", "wandb")
FITS = ("crop", "squash", "pad")


class Parser(argparse.ArgumentParser):
    """Of `ptlf`, or of one of its commands."""

    verbs: dict[str, Parser]  # of `ptlf`: the parsers of its commands

    def format_help(self) -> str:
        if self.prog == "ptlf train":
            self.epilog = cached_text("ptlf.commands.show:settings")
        return super().format_help()

    def error(self, message: str) -> Any:
        print(f"ptlf: {printable(message)}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


def parse_words(parser: Parser, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options of the command that the words begin with, and words that have no place. Without one: help or an error."""
    verb = next((name for name in (" ".join(words[:2]), *words[:1]) if name in parser.verbs), None)
    if verb is None:
        return vars(parser.parse_args(words)), []
    return parse_options(parser.verbs[verb], words[len(verb.split()) :])


def parse_options(parser: Parser, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The same of one command's words, in any order. An option that is none of the parser's is a setting."""
    if "" in words:
        parser.error("an argument is empty, as of a shell variable that is not set")
    settings: list[str] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            others += [word, *rest]
            break
        name, equals, text = word.partition("=")
        option = name.replace("_", "-")  # either spelling will do, as for settings
        if not word.startswith("--") or option in parser._option_string_actions:
            others.append(option + equals + text if word.startswith("--") else word)
            continue
        settings.append(word)
        if "=" not in word and rest and not re.match("-(?![0-9.]|$)", rest[0]):
            settings.append(rest.pop(0))
        others.append("--debug")  # in the setting's place: ends the values of an option before it
    arguments, unexpected = parser.parse_known_intermixed_args(others)
    parsed = vars(arguments)
    parsed.pop("debug")
    if log := parsed.pop("log", None):
        settings.append(f"--log=[{', '.join(log)}]")
    if not parsed.pop("takes_overrides"):
        return parsed, [*settings, *unexpected]
    return parsed | {"overrides": [*unexpected, *settings]}, []  # refused later, where names of recipes are known


def add_option(parser: Parser, names: str, about: str, kind: Callable[[str], Any] = str, **more: Any) -> None:
    """The help ends with the default."""
    if default := more.get("default"):
        about += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
    if kind is bool:
        parser.add_argument(names, help=about, action="store_true")
    else:
        parser.add_argument(*names.split(), help=about, type=kind, **more)


def bounded(kind: type[int] | type[float], ge: float, le: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        with suppress(ValueError):
            if ge <= (value := kind(text)) <= le:
                return value
        noun = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"must be a {noun} from {ge} to {le}, not {short_repr(text)}")

    return read


seed = bounded(int, 0, 2**63 - 1)
positive = bounded(int, 1, 1_000_000)
pixels = bounded(int, 1, 8192)
share = bounded(float, 0, 1)


def new_file(text: str, ends: Sequence[str] = ()) -> Path:
    """Refused before the work it is for: a file in a folder that is not there, or with another ending."""
    path = Path(text)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file, not the folder {short_repr(text)}")
    if ends and path.suffix not in ends:
        raise argparse.ArgumentTypeError(f"must name a file that ends with {' or '.join(ends)}, not {short_repr(text)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


new_page = partial(new_file, ends=(".html", ".htm"))


def make_parser() -> Parser:
    parser = Parser(prog="ptlf", description="Self-supervised continual learning with progressive layer freezing.")
    parser.verbs = {}
    parser.add_argument("--version", action="version", version=f"ptlf {__version__}")
    commands: dict[str, Any] = {"title": "commands", "metavar": "COMMAND"}
    families = {"": parser.add_subparsers(**commands)}
    data = families[""].add_parser("data", help="Get, pack, check and list data sets.")
    families["data"] = data.add_subparsers(required=True, **commands)

    def verb(
        name: str, file: str, about: str, *, overrides: bool = False, cached: bool = False, **texts: Any
    ) -> Callable[..., None]:
        """Declare a command. file: of `ptlf.commands`, with a function of the command's name; or MODULE:FUNCTION.
        overrides: it also takes settings, such as --training.epochs 2. cached: the function returns what is printed,
        the same each time."""
        family, _, last = name.rpartition(" ")
        texts |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        made = families[family].add_parser(last, help=about, description=about, **texts)
        run = file if ":" in file else f"ptlf.commands.{file}:{name.replace(' ', '_')}"
        made.set_defaults(run=run, verb=name, cached=cached, takes_overrides=overrides)
        made.add_argument("--debug", help=DEBUG, action="store_true")
        parser.verbs[name] = made
        return partial(add_option, made)

    for add_verbs in (add_training_verbs, add_encoder_verbs, add_showing_verbs, add_data_verbs):
        add_verbs(verb)
    return parser


def add_shared(add: Callable[..., None], *options: str) -> None:
    """Options that several commands have."""
    if "log" in options:
        about = f"also send what goes into metrics.jsonl to trackers: {', '.join(TRACKERS)}, PACKAGE.MODULE:CLASS"
        add("--log", about, nargs="+", action="extend", metavar="TRACKER")
    if "trust" in options:
        add("--trust-code", "allow the run's config to import your own classes (this executes code)", bool)
    if "on-error" in options:
        add("--on-error", "what to do with broken images", choices=("refuse", "skip"), default="refuse")
    if "workers" in options:
        add("--workers", "decoding threads (default: one per core, at most 16)", bounded(int, 1, 1024))


def add_training_verbs(verb: Verb) -> None:
    add = verb("train", "train", "Train an encoder on a stream and test it after every task.", overrides=True)
    add("--recipe", "STREAM/OBJECTIVE/METHOD (see `ptlf list recipes`; default: see below)")
    add("-c --config", "YAML file whose settings override the recipe's, such as a run's config.yaml", Path)
    add("--out", "folder for results.json, metrics.jsonl, the encoder and checkpoints", Path)
    add("--resume", "continue the run in this folder, with its own settings", Path, metavar="DIR")
    add_shared(add, "log", "trust")

    about = "Learn a folder of images as a run's next task. The first one starts the run, later ones continue it."
    epilog = (
        "SOURCE: a folder of images; train/ and test/ with a folder per class; a packed set; an .npz with `images`.\n"
        "Labels are used for testing only. Without SOURCE, a task that was interrupted is finished.\n"
        "--stream.labelled FOLDER, for a new run: a folder per class on which every task is judged.\n"
        "A new run takes settings, as `ptlf train` does. Later only --device, --log, --evaluation.tasks may be given."
    )
    usage = "%(prog)s RUN [SOURCE] [--recipe ...] [--watch DIR] [...]"
    add = verb("learn", "train", about, overrides=True, usage=usage, epilog=epilog)
    add("folder", "the run's folder; made with the first task", Path, metavar="RUN")
    add("source", "the images of the next task", nargs="?", metavar="SOURCE")
    default = "arriving/vicreg/continue for a given encoder, else arriving/vicreg/ptlf"
    add("--recipe", f"for a new run: STREAM/OBJECTIVE/METHOD; its stream is not used (default: {default})")
    add("-c --config", "for a new run: YAML file whose settings override the recipe's", Path)
    add("--size", "for a new run: side of the square images in pixels (default: the images' own, or 32)", positive)
    add_shared(add, "log", "trust", "on-error", "workers")
    add("--name", "name of the task (default: the folder's)")
    add("--undo", "take the last task back", bool)
    add("--again", "learn SOURCE even if all its images were learnt before", bool)
    add("--new-only", "leave out images that earlier tasks have, as of a folder that has grown", bool)
    about = "learn SOURCE only if `ptlf drift` finds it at least that new (alone: shifted)"
    add("--if-drift", about, nargs="?", const="shifted", choices=("shifted", "new"))
    add("--keep-encoders", "keep the encoder of after this task, and from then on of all: RUN@TASK names it", bool)
    add("--test-fraction", "where SOURCE has a folder per class: share of each to test on", share, default=0.0)
    add("--fit", "for a new run: how images become squares, see `ptlf data pack` (default: crop)", choices=FITS)
    add("--watch", "learn every subfolder of DIR when it appears, the oldest first", Path, metavar="DIR")
    add("--settle", "with --watch: seconds without a change before a subfolder is learnt", float, default=30.0)
    add("--every", "with --watch: seconds between looks at DIR", float, default=10.0)
    add("--once", "with --watch: learn what is there, then exit", bool)

    about = "Train several recipes with several seeds, and compare them."
    usage = "%(prog)s RECIPE [RECIPE ...] --out DIR [--seeds SEED [SEED ...]] [...]"
    epilog = "Settings, such as --training.epochs 20, apply to all runs."
    add = verb("sweep", "train", about, overrides=True, usage=usage, epilog=epilog)
    add("recipes", "STREAM/OBJECTIVE/METHOD (see `ptlf list recipes`)", nargs="+", metavar="RECIPE")
    add("--out", "folder for a folder per run; finished runs are kept", Path, required=True, metavar="DIR")
    add("--seeds", "every recipe is trained with every seed", seed, nargs="+", default=[0], metavar="SEED")
    add_shared(add, "log")
    add("--cluster", "submit every run as a job of submitit, here or to Slurm", choices=("local", "slurm"))
    add("--jobs", "with --cluster: jobs at the same time (default: all)", positive)
    add("--job-options", "for submitit, such as slurm_partition=gpu", nargs="+", default=[], metavar="KEY=VALUE")
    add("--baseline", "the recipe, or its end, that costs are relative to (default: lump, if it is there)")


def add_encoder_verbs(verb: Verb) -> None:
    epilog = (
        "Settings of the probes may be changed: --probes.knn_class.k 50\n"
        "--stream.labelled PACK or FOLDER tests on these labelled images instead of the run's own.\n"
        "The scores are kept in DIR/evaluations.json, and `ptlf report DIR` shows the latest."
    )
    add = verb("evaluate", "encoder", "Test the encoder of a finished run again.", overrides=True, epilog=epilog)
    add("folder", "the run's folder", Path, metavar="DIR")
    add_shared(add, "trust", "on-error")
    add("--probe", "probes to run (see `ptlf list probes`; default: those the run used)", nargs="+", metavar="NAME")

    add = verb("embed", "encoder", "Write the features of any images, by the encoder of a run, to one file.")
    add("folder", "the run's folder, or its encoder.safetensors", Path, metavar="RUN")
    add("images", "folders of any depth, packed sets, .npz or .npy files", nargs="+", metavar="IMAGES")
    about = "FILE.npz (names, features, labels if there are folders per class) or FILE.parquet (name, label, features)"
    add("--out", about, new_file, required=True, metavar="FILE")
    about = "a task: vectors like those of the encoder after it, to add to older ones (default: after the last)"
    add("--as", about, dest="as_of", metavar="TASK")
    add("--batch", "images per forward pass", positive, default=256)
    add("--device", "cpu or cuda; auto is cuda where there is a GPU", default="auto")
    add_shared(add, "trust", "on-error")

    add = verb("upgrade", "encoder", "Move vectors of an older version of a run's encoder to today's, without images.")
    add("folder", "the run's folder", Path, metavar="RUN")
    add("vectors", "a file that `ptlf embed` wrote after an earlier task", Path, metavar="FILE")
    add("--out", "FILE.npz or FILE.parquet, as `ptlf embed` writes them", new_file, required=True, metavar="FILE")

    about = "Find the images nearest to a query, by their vectors."
    usage = "%(prog)s FILE [FILE ...] QUERY [--run RUN] [--count N] [--out PAGE]"
    add = verb("search", "ptlf.commands.encoder:show_nearest", about, usage=usage)
    add("words", "files that `ptlf embed` wrote, then an image or a folder of images", nargs="+", metavar="FILE")
    add("--run", "the run whose encoder encodes queries (default: the vectors' own)", Path, dest="encoder")
    add("--count", "images to show for each query", positive, default=10)
    add("--out", "also write a page with small pictures", new_page, metavar="PAGE.html")
    add("--device", "cpu or cuda; auto is cuda where there is a GPU", default="auto")
    add_shared(add, "trust")

    about = "Say whether a folder of images is new to a run's encoder, shifted or as usual, without labels."
    add = verb("drift", "encoder", about)
    add("folder", "the run's folder", Path, metavar="RUN")
    add("images", "a folder of any depth, a packed set, an .npz or .npy file", metavar="IMAGES")
    add("--device", "cpu or cuda; auto is cuda where there is a GPU", default="auto")
    add_shared(add, "trust")

    add = verb("export", "encoder", "Write the encoder of a run for other programs, and check it against PyTorch.")
    add("folder", "the run's folder", Path, metavar="RUN")
    add("--to", "FILE.onnx, or FILE.pt2 (torch.export)", Path, required=True, metavar="FILE")
    add("--license", "the encoder's license, for the file's metadata, such as mit or cc-by-4.0", dest="licence")
    add("--overwrite", "replace an earlier export", bool)
    add_shared(add, "trust")


def add_showing_verbs(verb: Verb) -> None:
    add = verb("report", "show", "Draw one or more runs as a page of tables and pictures.")
    add("folders", "a run's folder, or a folder of runs", Path, nargs="+", metavar="DIR")
    add("--out", "the page (default: report.html in DIR; for several DIR, in this folder)", new_page, metavar="FILE")
    add("--figures", "folder for the pictures, as SVG and as PNG", Path, metavar="DIR")
    add("--baseline", "the run that costs are relative to: a recipe or a folder (default: LUMP)")

    add = verb("watch", "ptlf.report.watch:watch", "Follow a run from its files: loss, speed, frozen units, time left.")
    add("folder", "the run's folder, here or on a shared disk", Path, metavar="DIR")
    add("--once", "show the state once, then exit", bool)

    families = "streams, data, objectives, methods, policies, encoders, optimizers, probes, trackers, views, recipes"
    add = verb("list", "ptlf.commands.show:list_members", f"List the members of every family: {families}.", cached=True)
    add("what", "list this family only", nargs="?", metavar="FAMILY")

    epilog = (
        "bash: ptlf completion bash > ~/.local/share/bash-completion/completions/ptlf\n"
        "zsh: ptlf completion zsh > DIR/_ptlf, where DIR is a folder of $fpath\n"
        "Run it again after an update, or when a plugin adds recipes or settings."
    )
    add = verb("completion", "show", "Print a script that completes commands and settings.", epilog=epilog, cached=True)
    add("shell", "bash or zsh", choices=("bash", "zsh"), metavar="SHELL")


def add_data_verbs(verb: Verb) -> None:
    get = verb("data get", "data", "Download a data set and pack it.")
    get("name", "the data set (see `ptlf list data`)")
    get("--source", "an unpacked image folder, or the official archive, already on disk", Path)
    get("--url", "another address of the official archive")
    get("--keep-archive", "keep the downloaded archive", bool)
    epilog = "SOURCE: a folder per class or task, perhaps in train/ and test/; a Hugging Face data set; .parquet; .npz."
    pack = verb("data pack", "data", "Pack images into memory-mapped files.", epilog=epilog)
    pack("source", "a folder or file, see below", Path, metavar="SOURCE")
    pack("--name", "name of the packed set; a stream reads it with --stream.pack NAME", required=True)
    pack("--size", "side of the square images in pixels", pixels, required=True)
    about = "how images become squares: crop (the centre), squash (all, distorted), pad (all, between grey bars)"
    pack("--fit", about, choices=FITS, default="crop")
    pack("--folders", "tasks are sorted by name, 2 before 10", choices=("classes", "tasks"), default="classes")
    pack("--test-fraction", "share of each class held out for testing", share, default=0.0)
    for add in (get, pack):
        add_shared(add, "on-error", "workers")
        add("--overwrite", "replace the packed set if it exists", bool)
    verify = verb("data verify", "data", "Check packed sets against their checksums.")
    verify("names", "packed sets (default: all)", nargs="*", metavar="NAME")
    for add in (get, pack, verify, verb("data list", "data", "List the packed sets.")):
        add("--data-root", "folder of packed sets (default: $PTLF_DATA, else ~/.cache/ptlf)", metavar="DIR")
