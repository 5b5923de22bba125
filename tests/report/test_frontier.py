"""The Pareto front of runs, and the runs that are made for it."""

import json
import re
import statistics
from pathlib import Path

import made_up
import pytest

from benchmarks.frontier import main, plan_frontier, show_frontier
from benchmarks.frontier_picture import COSTS, Point, front, frontier, leading, paths, points, relative_costs
from ptlf.core.errors import UserError
from ptlf.report.drawing import style, themed
from ptlf.report.measures import probe_measures
from ptlf.report.runs import Comparison, Group, read_comparison

TIME, MEMORY = COSTS
ACCURACY = probe_measures("knn_task")[0]


def point(cost: float, value: float) -> Point:
    return Point(Group([]), cost, value, 0.0)


@pytest.mark.parametrize("rising", [True, False])
def test_the_front_is_what_no_other_point_beats(rising: bool) -> None:
    """Against a comparison of all pairs."""
    found = [point(c / 7, (c * c * 5 + 3 * c) % 11) for c in range(1, 12)] + [point(1 / 7, 0), point(3 / 7, 10)]

    def beats(a: Point, b: Point) -> bool:
        as_good = a.value >= b.value if rising else a.value <= b.value
        return a.cost <= b.cost and as_good and (a.cost, a.value) != (b.cost, b.value)

    wanted = {(p.cost, p.value) for p in found if not any(beats(other, p) for other in found)}
    assert [(p.cost, p.value) for p in front(found, rising)] == sorted(wanted)
    equal = [Point(Group([], label), 1, 9, 0.0) for label in "ab"]
    assert leading([*equal, Point(Group([], "c"), 1, 8 if rising else 10, 0.0)], rising) == {"a", "b"}


def test_costs_are_of_the_later_tasks_relative_to_the_baseline(tmp_path: Path) -> None:
    folders = [made_up.write(tmp_path / name, made_up.results(f"digits/simsiam/{name}")) for name in ("lump", "ptlf")]
    comparison = read_comparison(folders)
    relative = relative_costs(comparison, MEMORY)
    lump, ptlf = (group.runs[0].epochs for group in comparison.groups)
    expected = [sum(line["kept_bytes"] for line in epochs if line["task"] > 1) for epochs in (lump, ptlf)]
    assert relative == {"lump": 1.0, "ptlf": pytest.approx(expected[1] / expected[0])}
    assert frontier(comparison, TIME, ACCURACY, {}) is None  # two runs have no front to speak of


def test_a_run_for_every_order_and_rising_share(tmp_path: Path) -> None:
    shares = {"initial": [0.0, 0.3], "final": [0.2, 0.4]}
    runs = plan_frontier("digits/simsiam/lump", ["cost_aware"], **shares, seeds=[0, 1], out=tmp_path, overrides=[])
    names = ["no-freezing", "cost_aware-0-0.2", "cost_aware-0-0.4", "cost_aware-0.3-0.4"]
    assert [run.folder.name for run in runs] == [f"{name}-seed{seed}" for seed in (0, 1) for name in names]
    freezing = runs[3].config.freezing
    assert (freezing.policy.name, freezing.initial, freezing.final) == ("cost_aware", 0.3, 0.4)
    with pytest.raises(UserError, match="unknown"):
        plan_frontier("digits/simsiam/lump", ["nothing-like-it"], **shares, seeds=[0], out=tmp_path, overrides=[])
    told: list[str] = []
    where = {"seeds": [0, 1], "out": tmp_path, "overrides": [], "tell": told.append}
    plan_frontier("digits/simsiam/lump", ["cost_aware", "random"], [0.0, 0.5, 0.6], [0.4, 0.5], **where)
    assert [line for line in told if "left out" in line] == [
        "left out, initial share above the final one: 0.5 to 0.4, 0.6 to 0.4, 0.6 to 0.5"
    ]
    with pytest.raises(UserError, match=r"above the final one \(0.5 to 0.4\).*give a lower --initial"):
        plan_frontier("digits/simsiam/lump", ["cost_aware"], [0.5], [0.4], **where)
    told.clear()
    plan_frontier("digits/simsiam/lump", ["cost_aware"], [0.4], [0.4], **where)
    assert not any("left out" in line for line in told)


GRID = [("none", 0.0, 0.0), *((order, 0.1, final) for order in ("ascending", "random") for final in (0.9, 0.5, 0.7))]


def grid(folder: Path, seeds: int = 1) -> Comparison:
    for policy, initial, final in GRID:
        settings = {"freezing__policy__name": policy, "freezing__initial": initial, "freezing__final": final}
        for seed in range(seeds):
            made = made_up.results("digits/simsiam/lump", seed=seed, **settings)
            for place, kept in enumerate(made["cost"]["per_epoch"]["kept_bytes"]):
                made["cost"]["per_epoch"]["kept_bytes"][place] = round(kept * (1 - final / 2))
            made_up.write(folder / f"{policy}-{final:g}-{seed}", made)
    return read_comparison([folder], "none-0-0")


def shown(comparison: Comparison) -> tuple[str, dict[tuple[str, ...], list[str]]]:
    """The table, and the cells of its rows by policy and shares."""
    text = made_up.printed(show_frontier, "digits/simsiam/lump", comparison, width=80)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return text, {tuple(row[:3]): row[3:] for row in rows}


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_table_has_every_setting_its_costs_and_the_front(tmp_path: Path, seeds: int) -> None:
    """Against the records, and a comparison of all pairs."""
    text, rows = shown(grid(tmp_path, seeds))
    assert max(map(len, text.splitlines())) <= 80
    assert ("±: half the width of the 95 % t interval over the seeds" in text) == (seeds > 1)
    values: dict[tuple[str, ...], tuple[float, ...]] = {}
    for policy, initial, final in GRID:
        runs = [json.loads((tmp_path / f"{policy}-{final:g}-{s}" / "results.json").read_text()) for s in range(seeds)]
        epochs = [run["cost"]["per_epoch"] for run in runs]
        scores = [statistics.fmean(run["probes"]["knn_task"][k] for run in runs) for k in ("accuracy", "forgetting")]
        costs = []
        for key in ("seconds", "kept_bytes"):
            later = [[v for v, task in zip(one[key], one["task"], strict=True) if task > 1] for one in epochs]
            costs.append(statistics.geometric_mean(map(sum, later)))
        name = (policy, "", "") if policy == "none" else (policy, f"{initial:g}", f"{final:g}")
        values[name] = (*scores, *costs)
    assert set(rows) == set(values)
    base = values["none", "", ""]
    for name, mine in values.items():
        assert rows[name][0].split(" ±")[0] == f"{mine[0]:.2f}"
        assert rows[name][1].split(" ±")[0] == f"{mine[1]:.2f}".replace("-", "−")
        for place in (2, 3):
            as_good = [other for other in values.values() if other[0] >= mine[0] and other[place] <= mine[place]]
            beaten = any((other[0], other[place]) != (mine[0], mine[place]) for other in as_good)
            assert rows[name][place] == f"{'' if beaten else '* '}{mine[place] / base[place]:.2f}x"


def test_without_labels_or_later_tasks_there_is_no_front(tmp_path: Path) -> None:
    comparison = grid(tmp_path)
    for group in comparison.groups:
        group.first["probes"] = {}
    text, rows = shown(comparison)
    assert "*" not in text
    assert rows["none", "", ""] == ["1.00x", "1.00x"]


def test_a_path_joins_one_order_and_initial_share_by_the_final_one(tmp_path: Path) -> None:
    comparison = grid(tmp_path)
    found = [Point(group, 1.0, 1.0, 0.0) for group in comparison.groups]
    shares = [[point.group.config["freezing"] for point in path] for path in paths(found)]
    wanted = [[(order, 0.5), (order, 0.7), (order, 0.9)] for order in ("ascending", "random")]
    assert [[(one["policy"]["name"], one["final"]) for one in path] for path in shares] == wanted
    with style(colours := themed(False, 3)):
        (axes,) = frontier(comparison, MEMORY, ACCURACY, colours).axes
    labels = {(p.cost, p.value): p.group.label for p in points(comparison, MEMORY, ACCURACY.path)}
    lines = [line.get_xydata().tolist() for line in axes.lines if line.get_linewidth() < 1]
    joined = [[f"lump + {order} freezing (final {final})" for order, final in path] for path in wanted]
    assert [[labels[tuple(at)] for at in line] for line in lines] == joined


def test_a_plan_trains_nothing_and_the_command_shows_its_table(tmp_path: Path, capsys) -> None:
    words = ["digits/simsiam/lump", "--out", str(tmp_path / "runs"), "--orders", "ascending", "--initial", "0"]
    words += ["--stream.groups=[[0,1],[2,3]]", "--encoder.name=conftest:tiny_encoder", "--training.epochs=1"]
    words += ["--training.batch=128", "--device=cpu", "--evaluation.gallery=false", "--final", "0.4"]
    assert main([*words, "--plan"]) == 0
    assert re.search(r"2 runs: 2 pending, (some seconds|at least \d)", capsys.readouterr().out)
    assert not (tmp_path / "runs").exists()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert re.search(r"│ascending *│ *0│ *0\.4│", text)
    assert text.startswith("2 runs: 2 pending\nrun 1 of 2: digits/simsiam/lump no-freezing, seed 0\n")
    assert "\nrun 2 of 2: digits/simsiam/lump ascending-0-0.4, seed 0\n" in text
    assert main([*words, "0.8", "--plan"]) == 0
    text = capsys.readouterr().out
    assert text.count("done: ") == 2
    assert "pending: digits/simsiam/lump ascending-0-0.8 seed 0" in text
    assert "3 runs: 2 done, 1 pending" in text
