"""The command lines of the benchmarks."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ptlf.cli import exit_code
from ptlf.commands.parser import DEBUG, Parser, add_option, new_file, parse_options, pixels, positive

Add = Callable[..., None]  # adds an option


def script(command: str, about: str, *, settings: bool = True, **texts: Any) -> tuple[Parser, Add]:
    """The parser of a script, and what adds an option to it.

    about: the script's docstring. settings: it takes settings of a run, as `overrides`.
    """
    parser = Parser(command, description=about.partition("\n")[0], allow_abbrev=False, **texts)
    parser.set_defaults(takes_overrides=settings)
    parser.add_argument("--debug", help=DEBUG, action="store_true")
    return parser, partial(add_option, parser)


def add_steps(add: Add) -> None:
    add("--size", "side of the images in pixels", pixels, default=32)
    add("--steps", "timed steps of each", positive, default=100)


def add_json(add: Add) -> None:
    add("--json", "also write the figures to this file", partial(new_file, ends=[".json"]))


def run_script(
    parser: Parser, work: Callable[..., object], argv: Sequence[str] | None, *, several: bool = False
) -> int:
    """Call `work` with the options. several: it trains several runs, and the same command continues."""
    words = list(sys.argv[1:] if argv is None else argv)
    options, unexpected = parse_options(parser, [word for word in words if word != "--debug"])
    if unexpected:
        parser.error(f"unexpected argument {unexpected[0]!r}")
    return exit_code(lambda: work(**options), parser.prog, words, several=several)
