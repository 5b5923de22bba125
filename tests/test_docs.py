"""What the documents show is run, not believed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_guide_runs_and_is_short(tmp_path) -> None:
    (code,) = blocks(ROOT / "docs" / "guide.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) < 25
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "task 1: frozen ()"
    assert lines[1].count("'") == 4  # two of three units


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_that_documents_name_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_paper_notes_name_code_that_exists() -> None:
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (ROOT / "docs" / "paper-notes.md").read_text()):
        assert (ROOT / "ptlf" / name).exists(), name


def test_every_command_in_the_readme_parses() -> None:
    from ptlf.cli import make_parser

    lines = [
        line.strip() for block in blocks(ROOT / "README.md", "sh") for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = [
        line.removeprefix(".venv/bin/").split("#")[0].split()
        for line in lines
        if re.match(r"(\.venv/bin/)?ptlf ", line)
    ]
    assert commands
    for words in commands:
        arguments, _ = make_parser().parse_known_args(words[1:])
        assert hasattr(arguments, "run"), words
