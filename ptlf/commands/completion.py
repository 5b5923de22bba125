"""Completion of commands, options, recipes and settings in bash and zsh, written by shtab: `ptlf completion SHELL`."""

from pathlib import Path

import shtab

from ptlf.commands.parser import TRACKERS, make_parser, new_file, new_page
from ptlf.core.settings import describe
from ptlf.run.config import Config
from ptlf.run.recipes import recipe_names


def completion(shell: str) -> None:
    parser, recipes, settings = make_parser(), recipe_names(), describe(Config)
    for verb in parser.verbs.values():
        for action in verb._actions:
            if action.dest in ("recipe", "recipes"):
                action.choices = recipes
            elif action.dest == "log":
                action.choices = TRACKERS
            elif action.dest in ("source", "images") or action.type in (Path, new_file, new_page):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        for key, _, about in settings if verb.get_default("takes_overrides") else ():
            for option in dict.fromkeys((f"--{key}", f"--{key.removesuffix('.name')}")):  # `--method si` is enough
                if option not in verb._option_string_actions:
                    verb.add_argument(option, help=about.replace("%", "%%"))
    print(shtab.complete(parser, shell))
