"""What the documents show is run, not believed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ptlf.recipes import EXPECTED

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


FULL = [f"split-cifar10/simsiam/{method}" for method in ("lump", "ptlf", "ptlf-cost")]


@pytest.mark.parametrize("recipe", [*FULL, "digits/simsiam/lump", "digits/simsiam/ptlf"])
def test_figures_are_those_of_the_runs_that_are_kept(recipe: str) -> None:
    stream, _, method = recipe.split("/")
    folder = f"digits/{method}" if stream == "digits" else f"{recipe.replace('/', '-')}-seed0"
    probes = json.loads((ROOT / "results" / folder / "results.json").read_text())["probes"]
    task, classes = probes["knn_task"], probes["knn_class"]
    if recipe in FULL:
        figures = [f"{value:.2f}" for value in (task["accuracy"], task["forgetting"], classes["accuracy"])]
        assert "knn_task {}, forgetting {}, knn_class {}".format(*figures) in EXPECTED[recipe]
        assert "| {} | {} | {} |".format(*figures) in (ROOT / "README.md").read_text()
        benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
        assert all(figure in benchmarks for figure in figures)
    else:
        assert f"knn_class {classes['accuracy']:.1f}" in EXPECTED[recipe]
        assert f"│ {classes['accuracy']:19.2f} │".strip("│ ") in (ROOT / "README.md").read_text()


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
