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
    assert done.stdout == "torch.Size([3, 3, 16, 16])\n(3, 64)\n", done.stderr


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


def table_rows(text: str, heading: str) -> dict[str, list[str]]:
    """The cells of the Markdown table whose head holds `heading`, by the first cell."""
    (table,) = [found for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) if heading in found.splitlines()[0]]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def numbers(words: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", words)


def kept(pattern: str) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted((ROOT / "results").glob(f"{pattern}/results.json"))]


def later(runs: list[dict], key: str) -> float:
    """Mean over seeds of the sum over all tasks but the first."""
    return statistics.fmean(sum(task[key] for task in run["cost"]["per_task"][1:]) for run in runs)


def training(runs: list[dict]) -> float:
    return sum(later(runs, f"{part}_seconds") for part in ("train", "correlation", "rebuild"))


def kept_later(runs: list[dict]) -> float:
    """Bytes for backward, mean over the epochs of all tasks but the first, and over seeds."""
    columns = [run["cost"]["per_epoch"] for run in runs]
    return statistics.fmean(
        statistics.fmean(kept for kept, task in zip(one["kept_bytes"], one["task"], strict=True) if task > 1)
        for one in columns
    )


def wall_seconds(recipe: str) -> float | None:
    files = [ROOT / "results" / "bench" / f"run-h200{seed}.json" for seed in ("", "-seed1", "-seed2")]
    runs = [run for file in files for run in json.loads(file.read_text())["runs"] if run["run"] == recipe]
    return statistics.fmean(run["overheads"]["wall_seconds"] for run in runs) if runs else None


@pytest.mark.parametrize(("row", "recipe"), [
    ("LUMP, here", FULL[0]), ("PTLF, here", FULL[1]), ("(`ptlf-cost`)", FULL[2]), ("(`ptlf-deep`", FULL[3]),
])  # fmt: skip
def test_the_readme_s_figures_of_the_full_protocol_are_found_in_results(row: str, recipe: str) -> None:
    """Time, memory and their ratios to LUMP; the accuracies are tested above."""
    rows = table_rows((ROOT / "README.md").read_text(), "kept for backward: tasks' last epochs")
    (cells,) = [cells for name, cells in rows.items() if row in name]
    base, mine = (kept(f"{name.replace('/', '-')}-seed*") for name in (FULL[0], recipe))
    seconds, ends = training(mine), later(mine, "kept_bytes")
    if recipe == FULL[0]:
        wanted = [[f"{seconds:.0f}"], [f"{ends / 4 / 2**20:.0f}"], [f"{kept_later(mine) / 2**20:.0f}"]]
    else:
        times = [seconds / training(base), ends / later(base, "kept_bytes"), kept_later(mine) / kept_later(base)]
        wanted = [[f"{seconds:.0f}", f"{times[0]:.2f}"], *([f"{value:.2f}"] for value in times[1:])]
    assert [numbers(cells[place]) for place in (3, 5, 6)] == wanted
    whole = wall_seconds(recipe)
    if whole is not None:  # a run of its own does not write it down
        assert numbers(cells[4]) == [f"{whole:.0f}"]


def test_the_readme_s_figures_of_every_method_are_found_in_results() -> None:
    rows = table_rows((ROOT / "README.md").read_text(), "all in all")
    (base,) = kept("small-table/lump")
    assert set(rows) == {path.name for path in (ROOT / "results" / "small-table").iterdir()}
    for method, cells in rows.items():
        (run,) = kept(f"small-table/{method}")
        probes = run["probes"]
        scores = [probes["knn_task"]["accuracy"], probes["knn_task"]["forgetting"], probes["knn_class"]["accuracy"]]
        costs = ("train_seconds", "learning_seconds", "backward_flops", "kept_bytes")
        wanted = ["-" if score is None else f"{score:.2f}" for score in scores]
        wanted += [f"{run['cost'][key] / base['cost'][key]:.2f}x" for key in costs]
        assert cells == wanted, method


def test_the_readme_s_figures_of_freezing_are_found_in_results() -> None:
    made = json.loads((ROOT / "results" / "bench" / "freezing-cpu.json").read_text())["rows"]
    keys = ("kept_bytes_ratio", "backward_flops_ratio", "seconds_ratio")
    wanted = [[f"{row[key]:.{digits}f}" for key, digits in zip(keys, (2, 3, 2), strict=True)] for row in made]
    (table,) = re.findall(r"\| frozen \| how \|.*\n\|-.*\n((?:\|.*\n)+)", (ROOT / "README.md").read_text())
    assert [[cell.strip() for cell in line.strip("|").split("|")][2:] for line in table.splitlines()] == wanted


def test_the_paper_s_figures_in_the_readme_are_the_paper_s() -> None:
    from ptlf.run.paper import TABLES

    rows = table_rows((ROOT / "README.md").read_text(), "kept for backward: tasks' last epochs")
    for method in ("LUMP", "PTLF"):
        cell = TABLES["main"].cell(f"SimSiam, {method}", "Split CIFAR-10")
        assert cell is not None
        assert rows[f"{method}, the paper"][:2] == [f"{cell.paper[key]:.2f}" for key in ("accuracy", "forgetting")]


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
