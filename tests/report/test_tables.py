"""Tables in the terminal: costs stand beside their ratio to the baseline's."""

import made_up
import pytest
from made_up import table_rows as rows
from rich.console import Console

from ptlf.report import live
from ptlf.report.tables import show_results, show_runs
from ptlf.run.results import STEADY


def test_costs_side_by_side_are_relative_to_the_baseline() -> None:
    lump, ptlf = made_up.pair()
    runs = {"lump": [lump], "ptlf": [ptlf]}
    found = rows(show_runs, runs, "lump")
    for title, cells in {
        "training time without compiling": ["100.0 s", "25.0 s  0.25×"],
        "backward FLOPs": ["4.000 T", "2.000 T  0.50×"],
        "activation memory, mean": ["80.0 MiB", "64.0 MiB  0.80×"],
        "activation memory, last epoch": ["80.0 MiB", "60.0 MiB  0.75×"],
        "evaluation": ["2.0 s", "2.0 s"],
        "activation memory, mean after task 1": ["80.0 MiB", "48.0 MiB  0.60×"],
    }.items():
        assert found[title] == cells, title
    assert "peak GPU memory, last epoch" not in found
    accuracies = [run["probes"]["knn_class"]["untrained_accuracy"] for run in (lump, ptlf)]
    assert found["knn_class random encoder, %"] == [f"{value:.2f}" for value in accuracies]
    assert rows(show_runs, runs, "ptlf")["training time without compiling"] == ["100.0 s  4.00×", "25.0 s"]
    assert rows(show_runs, runs)["training time without compiling"] == ["100.0 s", "25.0 s"]


@pytest.mark.parametrize("names", [("a/lump", "a/ptlf"), ("a/lump", "a/ptlf", "a/third", "a/fourth")])
def test_seconds_and_ratios_leave_the_wait_for_the_compiler_out(names: tuple[str, ...]) -> None:
    """Side by side and as a list; and it is said. A run alone has its whole seconds."""
    lump, ptlf = made_up.pair()
    runs = {name: [made_up.wait_for_compiler(lump, 60.0) if name == "a/lump" else ptlf] for name in names}
    found = rows(show_runs, runs, "a/lump")
    if len(names) == 2:
        assert found["training time without compiling"] == ["100.0 s", "25.0 s  0.25×"]
    else:
        assert found["lump"][4:] == ["100.0 s", "80.0 MiB", "4.000 T"]
        assert found["ptlf"][4:] == ["0.25×", "0.60×", "0.50×"]
    for shown in (runs, {"a/lump": runs["a/lump"]}):
        assert (f"without compiling: {STEADY}" in made_up.printed(show_runs, shown, "a/lump")) == (len(shown) > 1)
    assert rows(show_runs, {"a/lump": runs["a/lump"]})["training time"] == ["2.7 min"]


def test_seeds_are_shown_as_mean_and_interval() -> None:
    seeds = [made_up.results(seed=seed) for seed in (0, 1, 2)]
    for run, accuracy, seconds in zip(seeds, (80.0, 81.0, 85.0), (10.0, 20.0, 60.0), strict=True):
        run["probes"]["knn_task"]["accuracy"] = accuracy
        run["cost"]["learning_seconds"] = seconds
        run["features"] = [{"task": 1, "images": 9, "effective_rank": 99.0, "spread": 9.0}]
        run["features"] += [{"task": 2, "images": 9, "effective_rank": seconds, "spread": seconds / 100}]
    found = rows(show_runs, {"ptlf": seeds})
    assert found["knn_task accuracy, %"] == ["82.00 ±6.57"]  # 4.303 times the root of (4 + 1 + 9) / 2 / 3
    assert found["training time"] == ["30.0 s"]
    assert found["effective rank of the features, last task"] == ["30.00"]
    assert found["spread of the features, last task"] == ["0.30"]


@pytest.mark.parametrize("names", [("a/b", "a/c"), ("a/b", "a/c", "a/d", "a/e")])  # side by side, as a list
def test_it_is_said_what_stands_behind_a_plus_minus_and_in_brackets(names: tuple[str, ...]) -> None:
    text = made_up.printed(show_runs, {name: [made_up.results()] for name in names}, width=80)
    assert "±" not in text and "brackets" not in text
    more = {"test_images": [100] * 3}
    runs = {name: [made_up.results(seed=seed) | more for seed in range(2)] for name in names}
    text = made_up.printed(show_runs, runs, width=80)
    assert "±: half the width of the 95 % t interval over the seeds" in text
    assert ("in brackets: 95 % interval from the number of test images" in text) == (len(names) == 2)


def test_names_stay_whole_in_80_columns(capsys) -> None:
    lump, _ = made_up.pair()
    names = ["simsiam/lump", "simsiam/ptlf", "barlow_twins/ptlf-cost", "byol/ptlf"]
    show_runs(Console(width=80), {f"digits/{name}": [lump] for name in names})
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(cells[1].strip(), cells[-2].strip()) for cells in lines] == [(name, "4.000 T") for name in names]
    lump, ptlf = made_up.pair()
    show_runs(Console(width=80), {"digits/simsiam/lump": [lump], "digits/simsiam/ptlf": [ptlf]}, "digits/simsiam/lump")
    title, _, heading, *_ = capsys.readouterr().out.splitlines()
    assert title.strip() == "Summary: digits/simsiam"
    assert [cell.strip() for cell in heading.split("┃")[2:4]] == ["lump", "ptlf"]


def test_what_looks_like_markup_in_a_record_is_shown_as_it_is(capsys) -> None:
    results = made_up.results()
    results["name"] = results["eval_splits"][0] = "[/a]"
    results["probes"]["knn_task"]["settings"]["bank"] = "[bold] :smile:"
    show_results(live.console, results, "[/b]")
    text = capsys.readouterr().out
    assert text.count("[/a]") == 3
    assert "bank: [bold] :smile:" in text
    assert "files: [/b]/results.json" in text


def test_days_stand_in_the_rows_of_a_matrix(tmp_path) -> None:
    results = made_up.results(tasks=2) | {"arrived": 2, "tasks": ["monday", "tuesday"]}
    found = rows(show_results, results, tmp_path)
    assert {"task 1, monday", "task 2, tuesday"} <= set(found)
