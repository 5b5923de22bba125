"""Completion in a real shell, from the parser and a list of names that is up to date; nothing slow is imported."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from ptlf.cli import make_parser
from ptlf.completion import NAMES, commands, find_names


def script(shell: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ptlf", "completion", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bash() -> str:
    return script("bash")


def complete(bash: str, folder: object, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    given = " ".join(f"'{word}'" for word in words)
    code = f'{bash}\nCOMP_WORDS=(ptlf {given}); COMP_CWORD={len(words)}; _ptlf; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", code], capture_output=True, text=True, cwd=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_bash_completes_commands_options_recipes_and_settings(bash: str, tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    assert {"train", "learn", "data", "--version"} <= complete(bash, tmp_path, "")
    assert complete(bash, tmp_path, "tr") == {"train"}
    assert complete(bash, tmp_path, "data", "ve") == {"verify"}
    assert complete(bash, tmp_path, "data", "pack", "--f") == {"--fit", "--folders"}
    assert complete(bash, tmp_path, "data", "pack", "--fit", "") == {"crop", "squash", "pad"}
    assert complete(bash, tmp_path, "data", "pack", "ph") == {"photos"}
    assert complete(bash, tmp_path, "train", "--rec") == {"--recipe"}
    assert complete(bash, tmp_path, "train", "--recipe", "digits/simsiam/ptlf") == {
        "digits/simsiam/ptlf", "digits/simsiam/ptlf-cost", "digits/simsiam/ptlf-deep"
    }  # fmt: skip
    assert complete(bash, tmp_path, "sweep", "split-cifar10/byol/lu") == {"split-cifar10/byol/lump"}
    assert complete(bash, tmp_path, "train", "--training.ep") == {"--training.epochs"}
    assert complete(bash, tmp_path, "train", "--freezing.pol") >= {"--freezing.policy", "--freezing.policy.sharpness"}
    assert complete(bash, tmp_path, "report", "--training.ep") == set()  # takes no settings
    assert complete(bash, tmp_path, "train", "--log", "") == {"tensorboard", "wandb"}
    assert complete(bash, tmp_path, "learn", "runs", "--size", "") == set()  # a number
    assert complete(bash, tmp_path, "train", "--training.epochs", "") == set()
    assert complete(bash, tmp_path, "train", "--objective", "-") == set()
    assert "--out" in complete(bash, tmp_path, "train", "--training.epochs", "3", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_recipes_and_settings(tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "ptlf.fish").write_text(script("fish"))

    def offered(line: str) -> set[str]:
        code = f"source ptlf.fish; complete -C 'ptlf {line}'"
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, cwd=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        return {found.partition("\t")[0] for found in done.stdout.splitlines()}

    assert offered("tr") == {"train"}
    assert offered("data ") == {"get", "pack", "verify", "list"}
    assert offered("completion ") == {"bash", "zsh", "fish"}
    assert offered("learn runs --fit ") == {"crop", "squash", "pad"}  # and no files
    assert offered("learn runs --size ") == set()
    assert offered("learn runs ph") == {"photos/"}
    assert offered("train --training.ep") == {"--training.epochs"}
    assert offered("sweep split-cifar10/byol/lu") == {"split-cifar10/byol/lump"}


def test_names_of_files_are_offered_as_they_are_and_run_nothing(bash: str, tmp_path) -> None:
    for name in ("a", "b", "[ab]", "*", "$(touch${IFS}mark)"):
        (tmp_path / name).touch()
    assert complete(bash, tmp_path, "data", "pack", "[") == {"[ab]"}
    assert complete(bash, tmp_path, "data", "pack", "*") == {"*"}
    assert complete(bash, tmp_path, "data", "pack", "$") == {"$(touch${IFS}mark)"}
    assert complete(bash, tmp_path, "$(touch mark)", "") >= {"a", "b", "[ab]", "*"}
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_there(shell: str) -> None:
    text = script(shell)
    known = commands()
    assert {command.name for command in known if command.name.startswith("data ")} >= {"data get", "data pack"}
    for command in known:
        assert command.name.split(" ")[-1] in text
        assert all(option.lstrip("-") in text for option in command.options)
        if command.name in ("", "data"):
            continue
        (found,) = [action for action in parser_of(command.name)._actions if "--help" in action.option_strings]
        assert set(found.option_strings) <= set(command.options)


def parser_of(name: str):
    parser = make_parser()
    for word in name.split():
        (inside,) = [action for action in parser._actions if isinstance(action.choices, dict)]
        parser = inside.choices[word]
    return parser


def test_names_are_up_to_date() -> None:
    assert NAMES.read_text() == find_names(), "run `python -m ptlf.completion`"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["completion", "bash"], ["sweep", "--help"], []])
def test_what_is_quick_imports_nothing_slow(words: list[str]) -> None:
    code = f"""
import sys
from ptlf.cli import main
try:
    main({words!r})
except SystemExit:
    pass
slow = {{"torch", "numpy", "matplotlib", "sklearn", "PIL", "rich", "yaml"}} & set(sys.modules)
sys.exit(f"imported: {{slow}}" if slow else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
