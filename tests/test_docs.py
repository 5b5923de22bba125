"""What the documents show is run, not believed."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_config

from ptlf.run.loop import Run
from ptlf.run.recipes import EXPECTED

pytestmark = pytest.mark.slow

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


def test_the_calls_of_the_freezer_run(tmp_path) -> None:
    (code,) = blocks(ROOT / "docs" / "freezer.md", "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 of 3 units frozen"


def test_figures_of_frozen_encoders_are_those_of_the_benchmark() -> None:
    rows = json.loads((ROOT / "results" / "bench" / "encoders-cpu.json").read_text())["rows"]
    text = (ROOT / "docs" / "freezer.md").read_text()
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        pairs.setdefault((row["network"], row["frozen"]), {})[row["way"]] = f"{row['kept_bytes_ratio']:.2f}"
        said = row.get("estimated_kept_bytes", row["kept_bytes"]), row.get("estimated_flops", row["backward_flops"])
        assert said == pytest.approx((row["kept_bytes"], row["backward_flops"]), rel=0.03)
    for (network, frozen), found in pairs.items():
        if frozen != "nothing":
            plain, ours = found["requires_grad_(False)"], found["ptlf.Freezer"]
            assert f"| {network} | {frozen} | {plain} | {ours} |" in text


def test_a_run_s_encoder_is_read_as_the_guide_says(tmp_path) -> None:
    (code,) = blocks(ROOT / "docs" / "guide.md", "py")
    Run(tiny_config(encoder__name="resnet18-mini", training__epochs=1), tmp_path / "runs" / "one").train()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "torch.Size([3, 64])\n", done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_that_documents_name_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


FULL = [f"split-cifar10/simsiam/{method}" for method in ("lump", "ptlf", "ptlf-cost", "ptlf-deep")]


def kept_probes(pattern: str) -> list[dict[str, dict[str, float]]]:
    return [
        json.loads(file.read_text())["probes"] for file in sorted((ROOT / "results").glob(f"{pattern}/results.json"))
    ]


@pytest.mark.parametrize("recipe", FULL)
def test_figures_of_the_full_protocol_are_those_of_the_runs_that_are_kept(recipe: str) -> None:
    """Every seed's in benchmarks, their means elsewhere."""
    seeds = kept_probes(f"{recipe.replace('/', '-')}-seed*")
    asked = (
        ("knn_task", "accuracy"),
        ("knn_task", "forgetting"),
        ("knn_class", "accuracy"),
        ("knn_class", "forgetting"),
    )
    values = {(probe, what): [run[probe][what] for run in seeds] for probe, what in asked}
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    for found in values.values():
        assert f" {', '.join(f'{value:.2f}' for value in found)} |" in benchmarks
    figures = [f"{statistics.fmean(found):.2f}" for found in values.values()][:3]
    assert "knn_task {}, forgetting {}, knn_class {}".format(*figures) in EXPECTED[recipe]
    readme = (ROOT / "README.md").read_text()
    assert "| {} | {} | {} |".format(*figures) in readme
    assert f"{statistics.fmean(values['knn_class', 'forgetting']):.1f}" in readme


@pytest.mark.parametrize("method", ["lump", "ptlf"])
def test_figures_of_the_digits_are_those_of_the_runs_that_are_kept(method: str) -> None:
    (probes,) = kept_probes(f"digits/{method}")
    accuracy = probes["knn_class"]["accuracy"]
    assert f"knn_class {accuracy:.1f}" in EXPECTED[f"digits/simsiam/{method}"]
    assert f"│ {accuracy:19.2f} │".strip("│ ") in (ROOT / "README.md").read_text()


def test_paper_notes_name_code_that_exists() -> None:
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", (ROOT / "docs" / "paper-notes.md").read_text()):
        assert (ROOT / "ptlf" / name).exists(), name


def test_every_command_in_the_readme_parses() -> None:
    """With its settings, on top of each of its recipes."""
    from ptlf.cli import make_parser
    from ptlf.run.recipes import resolve_config

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
        arguments, settings = make_parser().parse_known_args(words[1:])
        assert hasattr(arguments, "run"), words
        assert arguments.takes_overrides or not settings, words
        for recipe in getattr(arguments, "recipes", None) or [getattr(arguments, "recipe", None)]:
            resolve_config(recipe, None, settings)
