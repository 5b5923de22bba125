"""Completion in a real shell, from the parser and the settings."""

import subprocess
import sys

import pytest
from conftest import run_cli

from ptlf.commands.parser import make_parser


def test_bash_completes_commands_options_recipes_settings_and_files(tmp_path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "$(touch${IFS}mark)").touch()  # runs nothing
    cases: dict[str, set[str]] = {
        "tr": {"train"},
        "data pack --f": {"--fit", "--folders"},
        "data pack --fit ": {"crop", "squash", "pad"},
        "data pack ph": {"photos"},
        "data pack $": {"$(touch${IFS}mark)"},
        "train --rec": {"--recipe"},
        "train --recipe digits/simsiam/ptlf": {f"digits/simsiam/ptlf{end}" for end in ("", "-cost", "-deep")},
        "sweep split-cifar10/byol/lu": {"split-cifar10/byol/lump"},
        "train --training.ep": {"--training.epochs"},
        "train --training.epochs 3 --training.ba": {"--training.batch"},
        "train --objective.na": {"--objective.name"},
        "report --training.ep": set(),  # takes no settings
        "train --log w": {"wandb"},
        "completion z": {"zsh"},
    }
    code = run_cli("completion", "bash").out
    for words in cases:
        quoted = [f"'{word}'" for word in words.split(" ")]
        code += f"\nCOMP_WORDS=(ptlf {' '.join(quoted)}); COMP_CWORD={len(quoted)}; _shtab_ptlf"
        code += '; echo "= ${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    offered = [set(line[2:].split()) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert dict(zip(cases, offered, strict=True)) == cases, done.stderr
    assert not (tmp_path / "mark").exists()


def test_every_command_and_option_is_there() -> None:
    for text in (run_cli("completion", shell).out for shell in ("bash", "zsh")):
        for name, verb in make_parser().verbs.items():
            for word in (name.split()[-1], "--probes.knn_class.k", *verb._option_string_actions):
                assert word in text, (name, word)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["sweep", "--help"], ["sweep"], []], ids=" ".join)
def test_what_is_quick_imports_nothing_slow(words: list[str]) -> None:
    code = f"""
import sys
from ptlf.cli import main
try:
    main({words!r})
except SystemExit:
    pass
slow = {{"torch", "numpy", "matplotlib", "sklearn", "PIL", "rich", "yaml", "shtab"}} & set(sys.modules)
sys.exit(f"imported: {{slow}}" if slow else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
