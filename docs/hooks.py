"""What MkDocs cannot find in docs/: pages that are elsewhere in the repository, and references made from the code.

Links are written for a reader of the repository. Here those to a page of the site lead there; those to other files of
the repository become the file's name.
"""

import argparse
import html
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Pages of the site by what they are made of.
ELSEWHERE = {"README.md": "index.md", "CONTRIBUTING.md": "extending.md", "benchmarks/README.md": "measurements.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
WIDE = ("reproduction.md",)  # pages whose tables need the place of the table of contents
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
LONG_CODE = re.compile(r"(?<=<code>)[^<>\s]{25,}(?=</code>)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    made = {page: (ROOT / source).read_text() for source, page in ELSEWHERE.items()}
    made |= {"commands.md": commands_page(), "settings.md": settings_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    source = next((source for source, made in ELSEWHERE.items() if made == page.file.src_uri), "")
    place = Path(source or f"docs/{page.file.src_uri}").parent
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else relink(part, place) for part in parts)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Long names in tables may break after an underscore, a dot or a slash; options nowhere."""
    content = re.sub(r"<code>(-[^<\s]{1,30})</code>", r'<code class="option">\1</code>', content)

    def breaking(name: re.Match[str]) -> str:
        return re.sub(r"([_./])", r"\1<wbr>", name[0])

    return CELL.sub(lambda cell: LONG_CODE.sub(breaking, cell[0]), content)


def relink(text: str, place: Path) -> str:
    """Links from a file in the folder `place` of the repository, as links of the site."""

    def changed(found: re.Match[str]) -> str:
        picture, words, address = found.groups()
        path, hash_, anchor = address.partition("#")
        if "://" in address or not path:
            return found[0]
        target = os.path.normpath(place / path).replace(os.sep, "/")
        page = ELSEWHERE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if page is not None:
            return f"{picture}[{words}]({page}{hash_}{anchor})"
        name = f"`{target}`"
        return name if words.strip("`") == target else f"{words} ({name})"

    return LINK.sub(changed, text)


def commands_page() -> str:
    from ptlf.commands.parser import make_parser

    lines = [
        "# Commands",
        "",
        "Made from the code of this version; `ptlf COMMAND --help` says the same. Bad input ends with one sentence and "
        "exit code 2. Commands that take [settings](settings.md) take them as `--key value`, such as "
        "`--training.epochs 20`.",
    ]
    for parser in verbs(make_parser()):
        usage = parser.usage or parser.format_usage().removeprefix("usage: ")
        usage = " ".join(usage.replace("%(prog)s", parser.prog).split()).replace(" [-h]", "")
        taken = " Takes settings." if parser.get_default("takes_overrides") else ""
        about = f"{cell(parser.description or '')}{taken}"
        lines += ["", f"## {parser.prog}", "", about, "", "```text", usage, "```", ""]
        rows = [row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        if rows:
            lines += ["| argument | what it is |", "|---|---|", *rows]
        if parser.epilog and parser.prog != "ptlf train":  # whose epilog is the page of the settings
            lines += ["", *(f"{cell(line)}  " for line in parser.epilog.splitlines())]
    return "\n".join(lines) + "\n"


def verbs(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """All commands below the parser, those of families after the others."""
    found: list[argparse.ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = list(action.choices.values())
            plain = [each for each in below if each.get_default("run")]
            found += plain + [verb for each in below if each not in plain for verb in verbs(each)]
    return found


def row(action: argparse.Action) -> str:
    takes = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = "" if action.nargs == 0 else f" `{takes}`" if names else f"`{takes}`"
    several = " ..." if action.nargs in ("+", "*") else ""
    needed = " Required." if action.required and names else ""
    return f"| {names}{value}{several} | {cell(action.help or '')}{needed} |".replace("%%", "%")


def settings_page() -> str:
    from ptlf.core.settings import describe
    from ptlf.run.config import Config
    from ptlf.run.recipes import DEFAULT

    lines = [
        "# Settings",
        "",
        "Made from the code of this version; `ptlf train --help` says the same. A setting is given as `--key value` on "
        "the command line, or in a YAML file (`-c FILE`), with a section for each part before a dot. The command line "
        "wins over the file, the file over the recipe; the defaults here are those before the recipe. An unknown key "
        "is an error. A run's `config.yaml` holds all of them.",
        "",
        f"The default recipe is `{DEFAULT}`. Where a section is chosen by its name, the name alone will do: "
        "`--objective simclr`. Help that begins with names is of a setting that only those members have.",
    ]
    before = None
    for key, default, about in describe(Config):
        section = key.split(".")[0] if "." in key else "the run"
        if section != before:
            lines += ["", f"## {section}", "", "| setting | default | what it is |", "|---|---|---|"]
            before = section
        lines.append(f"| `{key}` | {f'`{default}`' if default else ''} | {cell(about)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Plain text as Markdown: in code, which begins and ends with a backtick, nothing has to be escaped."""
    pieces = " ".join(text.split()).split("`")
    if len(pieces) % 2 == 0:
        pieces = ["".join(pieces)]
    escaped = [re.sub(r"([*_\[\]|])", r"\\\1", html.escape(piece, quote=False)) for piece in pieces[::2]]
    code = [f"`{piece}`".replace("|", "\\|") for piece in pieces[1::2]]
    return "".join(part for pair in zip(escaped, [*code, ""], strict=True) for part in pair)
