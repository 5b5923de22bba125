"""Completion of commands, options, recipes and settings in bash, zsh and fish: `ptlf completion SHELL`.

Commands and options are those of the parser. Names of recipes and settings are in completion.txt, because finding them
takes seconds; `python -m ptlf.completion` writes that file anew.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ptlf.cli import TRACKERS, folder, make_parser, new_file, new_page

NAMES = Path(__file__).with_suffix(".txt")
FILES, RECIPES, VALUE = "@files", "@recipes", "@value"  # in place of words: names of files; a number or name


@dataclass
class Command:
    name: str  # as "bench step"; empty for `ptlf` itself
    about: str
    words: list[str] = field(default_factory=list)  # what may stand here: commands, or values of a positional
    options: dict[str, list[str]] = field(default_factory=dict)  # with the words that may follow each
    settings: bool = False  # it takes settings too


def commands() -> list[Command]:
    return list(below(make_parser(), "", ""))


def below(parser: argparse.ArgumentParser, name: str, about: str) -> Iterator[Command]:
    """The command of this parser, and those inside it."""
    command = Command(name, about, settings=bool(parser.get_default("takes_overrides")))
    inside: list[tuple[str, str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            inside = [(word, helps.get(word, ""), made) for word, made in action.choices.items()]
            command.words += action.choices
        elif action.option_strings:
            command.options |= dict.fromkeys(action.option_strings, values(action))
        else:
            command.words += values(action)
    yield command
    for word, text, made in inside:
        yield from below(made, f"{name} {word}".strip(), text)


def values(action: argparse.Action) -> list[str]:
    """What may follow an option, or stand for a positional; nothing for an option without a value."""
    if action.nargs == 0:
        return []
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in ("recipe", "recipes"):
        return [RECIPES]
    if action.dest == "log":
        return [*TRACKERS]
    paths = action.dest in ("source", "images") or action.type in (Path, folder, new_file, new_page)
    return [FILES] if paths else [VALUE]


def known_names() -> tuple[list[str], list[str]]:
    """Recipes and settings, as completion.txt has them."""
    recipes, settings = NAMES.read_text().split("\n\n")
    return recipes.split(), settings.split()


def completion(shell: str) -> None:
    print(fish() if shell == "fish" else shared() + {"bash": BASH, "zsh": ZSH}[shell], end="")


def shared() -> str:
    """For bash and zsh: functions that set `candidates`, one word a line, to what may follow."""
    recipes, settings = known_names()
    cases, following = [], []
    for command in commands():
        words = list(dict.fromkeys([*command.words, *command.options]))
        cases.append(f"    {quoted(command.name)}) candidates={lines(words)}{' settings=1' * command.settings};;")
        for option, after in command.options.items():
            if after:
                following.append(f"    {quoted(f'{command.name} {option}')}) candidates={lines(after)};;")
    families = "|".join(sorted({command.name.split()[0] for command in commands() if " " in command.name}))
    listed = {
        "RECIPES": lines(recipes),
        "SETTINGS": lines([f"--{name}" for name in settings]),
        "CASES": "\n".join(cases),
        "FOLLOWING": "\n".join(following),
        "FAMILIES": families,
    }
    text = SHARED
    for name, content in listed.items():
        text = text.replace(f"@{name}@", content)
    return text


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def lines(words: Sequence[str]) -> str:
    return quoted("\n".join(words))


SHARED = """# Completion of ptlf. `ptlf completion SHELL` prints it.
_ptlf_recipes=@RECIPES@
_ptlf_settings=@SETTINGS@

# Of the first two words after `ptlf`, the word before, and the word to complete.
_ptlf_candidates() {
  local command="$1" settings=''
  candidates=''
  case "$1" in
    @FAMILIES@) [ -n "$2" ] && command="$1 $2";;
  esac
  case "$command $3" in
@FOLLOWING@
  esac
  case "
$_ptlf_settings
" in
    *"
$3
"*) candidates='@value';;
  esac
  [ -n "$candidates" ] || case "$command" in
@CASES@
    *) candidates='@files';;
  esac
  case "$4" in
    -*) [ -z "$settings" ] || candidates="$candidates
$_ptlf_settings";;
  esac
  case "$candidates" in
    *@recipes*) candidates="$candidates
$_ptlf_recipes";;
  esac
}
"""

BASH = """
_ptlf() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" first='' second='' candidates
  [ "$COMP_CWORD" -gt 1 ] && first="${COMP_WORDS[1]}"
  [ "$COMP_CWORD" -gt 2 ] && second="${COMP_WORDS[2]}"
  _ptlf_candidates "$first" "$second" "$before" "$current"
  local IFS=$'\\n' word files=''
  case "$candidates" in
    *@files*)
      compopt -o filenames 2> /dev/null
      files=1;;
  esac
  COMPREPLY=()
  # Line by line: as a list of words, a file called [ab] would stand for others.
  while IFS= read -r word; do
    COMPREPLY+=("$word")
  done < <(
    compgen -W "$candidates" -- "$current" | command grep -v '^@'
    [ -z "$files" ] || compgen -f -- "$current"
  )
}
complete -F _ptlf ptlf
"""

ZSH = """
_ptlf() {
  local first='' second='' candidates
  [ "$CURRENT" -gt 2 ] && first="${words[2]}"
  [ "$CURRENT" -gt 3 ] && second="${words[3]}"
  _ptlf_candidates "$first" "$second" "${words[CURRENT-1]}" "${words[CURRENT]}"
  local -a found
  found=(${${(f)candidates}:#@*})
  compadd -- $found
  case "$candidates" in
    *@files*) _files;;
  esac
}
compdef _ptlf ptlf
"""


def fish() -> str:
    recipes, settings = known_names()
    known = commands()
    (top,) = [command for command in known if not command.name]
    text = ["# Completion of ptlf. `ptlf completion fish` prints it.", "complete -c ptlf -f"]
    text += [f"set -g _ptlf_{name} {' '.join(words)}" for name, words in (("recipes", recipes), ("settings", settings))]
    text += [f"complete -c ptlf -n __fish_use_subcommand -l {option[2:]}" for option in top.options if "--" in option]
    for command in known:
        if not command.name:
            continue
        *family, last = command.name.split()
        here = f"__fish_seen_subcommand_from {family[0]}" if family else "__fish_use_subcommand"
        text.append(f"complete -c ptlf -n {quoted(here)} -a {last} -d {quoted(command.about)}")
        inside = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        if any(other.name.startswith(f"{command.name} ") for other in known):
            continue
        begin = f"complete -c ptlf -n {quoted(inside)}"
        if command.words:
            text.append(begin + argument(command.words))
        for option, after in command.options.items():
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            text.append(f"{begin} {name}{argument(after, option=True) if after else ''}")
        if command.settings:
            text.append(f"{begin} -a '--$_ptlf_settings'")
    return "\n".join(text) + "\n"


def argument(words: Sequence[str], option: bool = False) -> str:
    """What may follow a command or an option, as an argument of fish's `complete`."""
    if FILES in words:
        return " -r -F" if option else " -F"
    alone = " -x" if option else ""  # a value, and no file
    if VALUE in words:
        return alone
    return alone + (" -a '$_ptlf_recipes'" if RECIPES in words else f" -a {quoted(' '.join(words))}")


def find_names() -> str:
    """The content of completion.txt."""
    from ptlf.core.settings import describe
    from ptlf.run.config import Config
    from ptlf.run.recipes import recipe_names

    keys = [key for key, _, _ in describe(Config) if key not in ("recipe", "log")]  # options of their own
    sections = [key.removesuffix(".name") for key in keys if key.endswith(".name")]  # `--method si` is enough
    settings = dict.fromkeys(sorted([*keys, *sections]))
    return "\n".join(recipe_names()) + "\n\n" + "\n".join(settings) + "\n"


if __name__ == "__main__":
    NAMES.write_text(find_names())
