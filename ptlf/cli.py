"""The command `ptlf` calls the function that its words name. Bad input ends with one sentence and exit code 2."""

import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from ptlf.commands.parser import make_parser, parse_words
from ptlf.core.errors import UserError, logger, printable, quoted, short_repr
from ptlf.core.files import cached_text
from ptlf.core.registry import working_folder_on_path
from ptlf.training.process import InterruptOnce, Stopped


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, InterruptOnce())
    parser = make_parser()
    options, unexpected = parse_words(parser, [word for word in words if word != "--debug"])
    if "run" not in options:
        parser.print_help()
        return 0
    run, verb, cached = (options.pop(name) for name in ("run", "verb", "cached"))

    def work() -> None:
        if unexpected:
            raise UserError(f"unexpected argument {short_repr(unexpected[0])}; see `ptlf {verb} --help`")
        if cached:
            return print(cached_text(run, *options.values()))
        module, function = run.split(":")  # imported only now: torch takes seconds
        getattr(import_module(module), function)(**options)

    return exit_code(work, "ptlf", words, several=verb == "sweep")


def exit_code(work: Callable[[], object], command: str, words: Sequence[str], *, several: bool = False) -> int:
    """Of a program that does the `work`: the user's mistakes and signals become one sentence on stderr.

    command, words: as they were typed. several: it trains several runs, and the same command continues.
    """
    debug = os.environ.get("PTLF_DEBUG", "") not in ("", "0") or "--debug" in words
    again = f"`{command} {' '.join(map(quoted, words))}` continues from here"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        show_messages()
        with working_folder_on_path():
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
            error.__suppress_context__ = False  # what led to it, also what the sentence stands for
            traceback.print_exception(error)
        say(sentence)
        return 2
    return 0


def users_mistake(error: Exception, words: Sequence[str]) -> str | None:
    """Bad input, a file that the words name, or memory, as a sentence. None for errors of the program or a plugin."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str):  # a file that the words name, or below one
        named = [*words, *(word.partition("=")[2] for word in words), os.environ.get("PTLF_DATA") or "~/.cache/ptlf"]
        places = [os.path.abspath(os.path.expanduser(word)) for word in named if word]
        below = any(Path(os.path.abspath(error.filename)).is_relative_to(place) for place in places)
        return f"{error.filename}: {error.strerror or error}" if below else None
    from ptlf.core.memory import too_large

    if (trouble := too_large(error)) is None:
        return None
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{trouble}; {notes or 'ask for less: fewer or smaller images, a smaller batch'}"


def process() -> int:
    """Which of the processes that torchrun started this is; 0 for one on its own."""
    return int(os.environ.get("RANK", "0"))


def say(trouble: str) -> None:
    trouble = printable(" ".join(trouble.split()))
    print(f"ptlf: process {process()}: {trouble}" if process() else f"ptlf: {trouble}", file=sys.stderr)


class MessageHandler(logging.Handler):
    """Lines on stderr, which rich's progress bars let through above them."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "ptlf: warning" if record.levelno >= logging.WARNING else "note"
        print(f"{kind}: {record.getMessage()}", file=sys.stderr)


def show_messages() -> None:
    """What ptlf logs goes to stderr from now on: warnings, and notes."""
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        logger.addHandler(MessageHandler())


if __name__ == "__main__":  # else `python -m ptlf.cli` would do nothing, silently
    sys.exit(main())
