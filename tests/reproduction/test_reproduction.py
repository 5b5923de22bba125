"""The paper's tables filled from records, docs/reproduction.md, and the paper's figures."""

import collections
import io
import itertools
import math
import re
import shlex
import statistics
from pathlib import Path

import made_up
import numpy as np
import pytest
from paper_runs import kept_document, paper_results
from PIL import Image
from rich.console import Console
from scipy import stats

from ptlf.core.errors import UserError
from ptlf.report.drawing import style, themed
from ptlf.report.intervals import interval
from ptlf.report.runs import Group, RunRecord
from reproduction.__main__ import make_parser
from reproduction.figures import later_entries, task_overlaps, updated_units, write_paper_figures
from reproduction.page import (
    DIFFERENCES,
    difference_to,
    differences,
    document,
    figure,
    number,
    ours,
    section,
    show_table,
)
from reproduction.runs import make_plan, remarks
from reproduction.tables import ELSEWHERE, FIGURES, TABLES, Cell, Table

T_OF_ONE = 12.706204736  # quantile of Student's t for two values
ROOT = Path(__file__).parent.parent.parent
LUMP = Cell("LUMP", "digits", "digits/simsiam/lump")
PTLF = Cell("PTLF", "digits", "digits/simsiam/ptlf", baseline=LUMP.recipe)
TABLE = Table("Some", ("accuracy", "time", "memory"), (LUMP, PTLF))


def found() -> dict:
    """LUMP with seeds 0 and 1, PTLF with 1 and 2; of the costs only seed 1 can be a ratio."""
    made: dict = {LUMP.key: [], PTLF.key: []}
    for cell, seeds, accuracies, seconds in (
        (LUMP, (0, 1), (80.0, 84.0), (100.0, 200.0)),
        (PTLF, (1, 2), (85.0, 87.0), (150.0, 1.0)),
    ):
        for seed, accuracy, took in zip(seeds, accuracies, seconds, strict=True):
            run = made_up.results(cell.recipe, seed=seed)
            run["probes"]["knn_task"]["accuracy"] = accuracy
            run["cost"] |= {"learning_seconds": took, "mean_kept_bytes": 2.0**20 * took}
            epochs = run["cost"]["per_epoch"]
            epochs["seconds"] = [took / len(epochs["seconds"])] * len(epochs["seconds"])
            made[cell.key].append(run)
    return made


def test_figures_are_means_over_seeds_and_costs_ratios_by_seed() -> None:
    made = found()
    accuracy = figure(TABLE, PTLF, "accuracy", made)
    assert (accuracy.mean, accuracy.half) == (86.0, pytest.approx(T_OF_ONE * 2**0.5 / 2**0.5, rel=1e-5))
    time = figure(TABLE, PTLF, "time", made)
    assert (time.mean, time.ends, time.count) == (pytest.approx(0.75), None, 1)
    assert figure(TABLE, LUMP, "time", made).mean == 1.0
    waited = made_up.wait_for_compiler(made[LUMP.key][1], 50.0)["cost"]
    assert figure(TABLE, PTLF, "time", made).mean == pytest.approx(0.75)
    waited["per_epoch"]["seconds"] = waited["per_epoch"]["seconds"][:1]  # nothing to compare a single epoch with
    assert figure(TABLE, PTLF, "time", made).mean == pytest.approx(150 / 250)
    made[PTLF.key][0]["environment"]["device_name"] = "another"
    assert figure(TABLE, PTLF, "time", made) is None
    assert figure(TABLE, PTLF, "memory", made).mean == pytest.approx(0.75)
    made[PTLF.key][1]["seed"] = 0  # 1 s to 100 s, beside 150 to 200
    memory = figure(TABLE, PTLF, "memory", made)
    assert memory.mean == pytest.approx((0.75 * 0.01) ** 0.5)
    half = T_OF_ONE * math.log(0.75 / 0.01) / 2  # the standard error of two values is half their difference
    assert memory.ends == pytest.approx((memory.mean / math.exp(half), memory.mean * math.exp(half)))
    assert figure(TABLE, PTLF, "accuracy", {}) is None


def test_seconds_of_different_commits_carry_a_dagger() -> None:
    made = found()
    console = Console(width=80, file=io.StringIO())
    show_table(console, TABLE, made)
    text = section("some", TABLE, made, {}, set())
    assert "†" not in text + console.file.getvalue()
    made[LUMP.key][0]["commit"] = "decade"  # of a seed that PTLF does not have
    assert "†" not in section("some", TABLE, made, {}, set())
    made[LUMP.key][1]["commit"] = "decade"
    changed = section("some", TABLE, made, {}, set())
    line = next(line for line in changed.splitlines() if line.startswith("| PTLF"))
    assert [cell.strip() for cell in line.split("|")][6:10] == ["0.75x†", "", "", "0.75x"]  # time, not memory
    assert changed.count("†") == 2
    assert "† runs of different commits; compare with care" in changed
    show_table(console, TABLE, made)
    assert "0.75x†" in console.file.getvalue()
    assert "† runs of different commits; compare with care" in console.file.getvalue()
    made[PTLF.key][0]["environment"]["device_name"] = "another"  # whose seconds are not compared
    assert "†" not in section("some", TABLE, made, {}, set())


def test_differences_need_two_seeds_in_common() -> None:
    recipes = ("split-cifar10/simsiam/lump", "split-cifar10/simsiam/ptlf")
    made = {(recipe, ()): [made_up.results(recipe, seed=seed) for seed in range(3)] for recipe in recipes}
    for runs, accuracies in zip(made.values(), ((80.0, 81.0, 82.0), (82.0, 83.1, 83.9)), strict=True):
        for run, accuracy in zip(runs, accuracies, strict=True):
            run["probes"]["knn_task"]["accuracy"] = accuracy
            columns = run["cost"]["per_epoch"]
            epochs = len(columns["task"]) // 3  # of each of three tasks
            seconds = {"seconds": accuracy / epochs, "correlation_seconds": 1.0, "rebuild_seconds": 0.5}
            columns |= {key: [value] * (3 * epochs) for key, value in seconds.items()}
    ((title, rows),) = differences(made).items()
    assert title == "Split CIFAR-10, SimSiam"
    by_name = dict(zip(DIFFERENCES, rows["PTLF"], strict=True))
    said, accuracy, _ = by_name["accuracy, points"]
    assert (said, accuracy.mean, accuracy.half) == ("better", pytest.approx(2.0), pytest.approx(0.2484, abs=1e-3))
    said, seconds, mixed = by_name["training of later tasks, s"]
    assert (said, seconds.mean, mixed) == ("worse", pytest.approx(4.0), False)
    made[recipes[0], ()][1]["commit"] = "decade"
    marked = {name for name, cell in zip(DIFFERENCES, differences(made)[title]["PTLF"], strict=True) if cell.mixed}
    assert marked == {"training of later tasks, s"}
    for run in made[recipes[1], ()]:
        run["environment"]["device_name"] = "another"
    again = dict(zip(DIFFERENCES, differences(made)[title]["PTLF"], strict=True))
    assert again["training of later tasks, s"][1] is None
    made[recipes[1], ()] = made[recipes[1], ()][:1]
    assert differences(made) == {}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [80, 300])
def test_no_figure_of_a_table_is_broken(name: str, width: int) -> None:
    """With three seeds of every run, so that every cell has an interval."""
    table = TABLES[name]
    keys = {cell.key for cell in table.cells} | {(cell.baseline, ()) for cell in table.cells if cell.baseline}
    made = {key: [made_up.results(key[0], seed=seed) for seed in range(3)] for key in sorted(keys)}
    for place, runs in enumerate(made.values()):
        for run, shift in zip(runs, (0.0, 1.0, 3.0), strict=True):
            forgetting = dict.fromkeys(("forgetting", "forgetting_just_learned"), 5.0 + place / 9 + shift)
            run["probes"][table.probe] = {"accuracy": 80.0 + place / 7 + shift, **forgetting}
            costs = ("learning_seconds", "mean_kept_bytes", "backward_flops")
            run["cost"] |= dict.fromkeys(costs, 300.0 + 3 * place + shift)
    console = Console(width=width, file=io.StringIO())
    show_table(console, table, made)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    expected = collections.Counter()
    for cell in table.cells:
        for measure in table.measures:
            expected.update(ours(figure(table, cell, measure, made), measure))
            expected[number(cell.paper.get(measure), measure)] += 1
    shown = collections.Counter(cell.strip() for line in text.splitlines() for cell in line.split("│"))
    assert all(shown[figures] >= count for figures, count in expected.items() if figures)
    assert width == 80 or text.count("┏") == 1  # as in the paper


def test_the_document_is_what_the_kept_runs_say() -> None:
    """`python -m reproduction all --write docs/reproduction.md` writes it. Remarks are told once, of runs it has."""
    assert (ROOT / "docs" / "reproduction.md").read_text() == kept_document()
    assert kept_document().count(remarks(ROOT / "results")["split-cifar10/simsiam/der"]) == 1
    with pytest.raises(UserError, match="no table has: nothing"):
        document({}, {"nothing": "said"})


def test_figures_of_the_paper_as_files(tmp_path: Path) -> None:
    made = {}
    for cell in FIGURES.cells:
        pairs = [word.removeprefix("--").split("=") for word in cell.settings]
        dotted = {key.replace(".", "__"): value for key, value in pairs}
        made[cell.key] = [made_up.results(cell.recipe, tasks=5, units=20, **dotted)]
    assert write_paper_figures(made, tmp_path) == 6
    for name in ("paper-correlation", "paper-overlap", "paper-units"):
        assert (tmp_path / f"{name}.svg").read_text().count("<svg") == 1
        assert Image.open(tmp_path / f"{name}.png").width > 500
    svg = (tmp_path / "paper-correlation.svg").read_text()
    assert [f"task {task - 1} to {task}" in svg for task in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    assert ">self-supervised<" in svg and ">supervised<" in svg
    alone = {FIGURES.cells[0].key: made[FIGURES.cells[0].key] * 3}
    assert write_paper_figures(alone, tmp_path / "alone") == 4, "ratios and units of PTLF alone"
    one = (tmp_path / "alone" / "paper-correlation.svg").read_text()
    assert ">supervised<" not in one
    units, tasks = 20, 4
    assert one.count("<use") >= 4 * units * tasks > svg.count("<use"), "every seed, and their mean"
    assert "final ratio 0.4" in (tmp_path / "alone" / "paper-units.svg").read_text()
    assert write_paper_figures({}, tmp_path / "none") == 0
    assert not (tmp_path / "none").exists()


def test_units_and_overlaps_by_task() -> None:
    group = Group([RunRecord(Path(), made_up.results(tasks=3, units=6))], "", 1)
    with style(colours := themed(False, 20)):
        hollow, filled = updated_units([group], colours).axes[0].lines
    assert (hollow.get_markerfacecolor(), filled.get_markerfacecolor()) == ("none", colours["frozen"])
    frozen = {(e["task"], group.first["units"].index(unit)) for e in group.first["freezing"] for unit in e["order"]}
    assert {tuple(place) for place in hollow.get_xydata().astype(int)} == frozen
    assert len(hollow.get_xdata()) + len(filled.get_xdata()) == 3 * 6
    results = made_up.results(tasks=2, units=4, freezing__update="per-epoch")
    (entry,) = results["freezing"]
    entry["order"], entry["ratios"] = ["a", "c"], {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}
    entry["events"] = [{"epoch": 2, "frozen": ["a"]}, {"epoch": 4, "frozen": ["c"]}]
    # Epoch 2 chooses a and b, as before; epoch 4, with a frozen, c in place of b.
    entry["ratios_by_epoch"] = {"4": {"b": 0.5, "c": 0.6, "d": 0.1}, "2": {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}}
    group = Group([RunRecord(Path(), results)], "", 1)
    assert list(later_entries(group)) == [2]
    # By chance: of two units drawn among four one is kept in two draws; with one frozen, it and a third of the other.
    assert task_overlaps(group) == {2: pytest.approx(((1.0 + 0.5) / 2, (0.5 + (1 + 1 / 3) / 2) / 2))}


def test_remarks_are_of_runs_that_are_kept() -> None:
    """Numbers with two decimals in a remark are the paper's, or of a run, or a mean over seeds, LUMP's included."""
    cells = {cell.name: cell for table in TABLES.values() for cell in table.cells}
    found = paper_results()
    for name, text in remarks(ROOT / "results").items():
        cell = cells[name]
        assert found[cell.key], name
        known = {*cell.paper.values(), *cell.spread.values()}
        if name.endswith("/cassle"):
            known |= {value for streams in ELSEWHERE.values() for pair in streams for value in pair if value}
        for runs in (found[cell.key], found[f"{cell.recipe.rpartition('/')[0]}/lump", ()]):
            for probe, key in itertools.product(("knn_task", "knn_class"), ("accuracy", "forgetting")):
                values = [run["probes"][probe][key] for run in runs]
                known |= set() if None in values else {*values, statistics.fmean(values)}
        assert set(re.findall(r"\d+\.\d\d\b", text)) <= {f"{value:.2f}" for value in known}, name


def test_the_figures_are_drawn_from_kept_runs_by_the_command_in_the_document(tmp_path: Path) -> None:
    """And what the document says of them is what they show."""
    text = (ROOT / "docs" / "reproduction.md").read_text()
    (command,) = re.findall(r"```sh\n#.*?\n(python -m reproduction figures.*?)```", text, re.DOTALL)
    arguments, settings = make_parser().parse_known_args(shlex.split(command.replace("\\\n", " "))[3:])
    plan = make_plan([FIGURES], arguments.scale, arguments.seeds, tmp_path, settings, [ROOT / "results"])
    runs = plan.results()
    assert [len(runs[cell.key]) for cell in FIGURES.cells] == [1] * 5
    own, labelled = ({e["task"]: e["ratios"] for e in runs[cell.key][0]["freezing"]} for cell in FIGURES.cells[:2])
    pairs = [(own[task][unit], labelled[task][unit]) for task in own for unit in own[task]]
    above = sum(with_labels > without for without, with_labels in pairs)
    assert f"in {above} of {len(pairs)} places" in " ".join(text.split())
    assert statistics.stdev(one for one, _ in pairs) > statistics.stdev(other for _, other in pairs)
    overlaps = task_overlaps(Group([RunRecord(Path(), run) for run in runs[FIGURES.cells[2].key]]))
    said = ", ".join(f"{overlaps[task][0]:.2f}" for task in sorted(overlaps))
    assert f"here {said} in tasks 2 to 5" in " ".join(text.split())
    (chance,) = {f"{chance:.2f}" for _, chance in overlaps.values()}
    assert f"drawn at random it would be {chance}." in " ".join(text.split())


def test_a_difference_to_printed_values_is_welch_s() -> None:
    """Degrees of freedom are rounded down, so the interval is no narrower than that of scipy."""
    for count in (2, 3, 5):
        values = np.random.default_rng(count).normal(90, 1, count)
        found = difference_to(interval(values.tolist()), 89.0, 0.7, 3)
        told = stats.ttest_ind_from_stats(values.mean(), values.std(ddof=1), count, 89.0, 0.7, 3, equal_var=False)
        error = (values.mean() - 89) / told.statistic
        variances = values.var(ddof=1) / count, 0.7**2 / 3
        degrees = sum(variances) ** 2 / (variances[0] ** 2 / (count - 1) + variances[1] ** 2 / 2)
        assert found.mean == pytest.approx(values.mean() - 89)
        assert found.half == pytest.approx(stats.t.ppf(0.975, int(degrees)) * error, rel=1e-3)
        assert found.half >= stats.t.ppf(0.975, degrees) * error * 0.999
    one = interval([93.95])  # a single value is taken to spread as the printed ones
    found = difference_to(one, 91.04, 0.24, 3)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 2) * 0.24 * (1 + 1 / 3) ** 0.5, rel=1e-3)
    assert found.excludes_zero
    assert difference_to(one, 91.04, None, 3).half is None
