"""`ptlf report`, and what `ptlf list`, `completion` and `train --help` say, see `cached_text`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import shtab

from ptlf.commands.parser import make_parser, new_file, new_page
from ptlf.core.errors import unknown
from ptlf.core.settings import describe
from ptlf.encoders import ENCODERS
from ptlf.evaluation import PROBES
from ptlf.integrations.trackers import TRACKERS
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import POLICIES, Config
from ptlf.run.recipes import DEFAULT, VARIANTS, recipe_names
from ptlf.stream import STREAMS, fetch
from ptlf.training.optimizers import OPTIMIZERS
from ptlf.views import VIEWS


def report(folders: Sequence[Path], out: Path | None, figures: Path | None, baseline: str | None) -> None:
    """The pictures as files, the page, or both."""
    from ptlf.report.page import write_figures, write_report  # matplotlib takes a while

    if figures:
        print(f"{write_figures(folders, figures, baseline)} files in {figures}")
    if out or not figures:
        out = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        runs = write_report(folders, out, baseline)
        print(f"{out} ({runs} run{'s' * (runs > 1)})")


def settings() -> str:
    """The end of `ptlf train --help`."""
    rows = [row for row in describe(Config) if row[0] != "recipe"]
    listed = "\n".join(f"  --{key} {default}\n      {about}" for key, default, about in rows)
    return f"default recipe: {DEFAULT}\n\nsettings (default before the recipe):\n{listed}"


def list_members(what: str | None) -> str:
    """Of one family, or of all."""
    variants = {
        name: "In recipes: " + ", ".join(f"{key} {value}" for key, value in variant.items())
        for name, variant in VARIANTS.items()
    }
    families: dict[str, dict[str, str]] = {
        "streams": {name: entry.about for name, entry in STREAMS.items()},
        "data": {name: entry.about for name, entry in fetch.SOURCES.items()},
        "objectives": summaries(OBJECTIVES),
        "methods": summaries(METHODS) | variants,
        "policies": summaries(POLICIES),
        "encoders": {name: entry.about for name, entry in ENCODERS.items()},
        "optimizers": summaries(OPTIMIZERS),
        "probes": summaries(PROBES),
        "trackers": summaries(TRACKERS),
        "views": {name: about for name, (about, _) in VIEWS.items()},
        "recipes": dict.fromkeys(recipe_names(), ""),
    }
    if what is not None and what not in families:
        raise unknown("family", what, families)
    lines: list[str] = []
    for family in [what] if what else families:
        named, heading = families[family], f"{family}:"
        if what is None and family == "recipes":
            heading = f"recipes: {len(named)} of STREAM/OBJECTIVE/METHOD; `ptlf list recipes` names them"
            named = {}
        lines += [heading, *(f"  {name:<36} {about}".rstrip() for name, about in named.items())]
    if what is None:
        lines.append("A member of your own goes by PACKAGE.MODULE:ATTRIBUTE in place of a name; see CONTRIBUTING.md.")
    return "\n".join(lines)


def summaries(family: Mapping[str, type]) -> dict[str, str]:
    """The first line about each member's class."""
    return {name: (kind.__doc__ or "").strip().partition("\n")[0] for name, kind in family.items()}


def completion(shell: str) -> str:
    """A script for bash or zsh, written by shtab."""
    parser, recipes, rows = make_parser(), recipe_names(), describe(Config)
    for verb in parser.verbs.values():
        for action in verb._actions:
            if action.dest in ("recipe", "recipes"):
                action.choices = recipes
            elif action.dest == "log":
                action.choices = list(TRACKERS)
            elif action.dest in ("source", "images") or action.type in (Path, new_file, new_page):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        for key, _, about in rows if verb.get_default("takes_overrides") else ():
            for option in dict.fromkeys((f"--{key}", f"--{key.removesuffix('.name')}")):  # `--method si` is enough
                if option not in verb._option_string_actions:
                    verb.add_argument(option, help=about.replace("%", "%%"))
    return shtab.complete(parser, shell)
