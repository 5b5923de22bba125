"""The Pareto front of runs, and the runs that are made for it."""

from __future__ import annotations

from pathlib import Path

import made_up
import pytest

from ptlf.core.errors import UserError
from ptlf.report.figures.frontier import Point, costs, front, frontier
from ptlf.report.runs import Group, read_comparison
from ptlf.run.sweep import plan_frontier


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


def test_costs_are_of_the_later_tasks_relative_to_the_baseline(tmp_path: Path) -> None:
    folders = [made_up.write(tmp_path / name, made_up.results(f"digits/simsiam/{name}")) for name in ("lump", "ptlf")]
    comparison = read_comparison(folders)
    relative = costs(comparison, "bytes")
    lump, ptlf = (group.runs[0].epochs for group in comparison.groups)
    expected = [sum(line["kept_bytes"] for line in epochs if line["task"] > 1) for epochs in (lump, ptlf)]
    assert relative == {"lump": 1.0, "ptlf": pytest.approx(expected[1] / expected[0])}
    assert frontier(comparison, 1000.0) is None  # two runs have no front to speak of


def test_a_run_for_every_order_and_rising_share(tmp_path: Path) -> None:
    shares = {"initial": [0.0, 0.3], "final": [0.2, 0.4]}
    runs = plan_frontier("digits/simsiam/lump", ["cost_aware"], **shares, seeds=[0, 1], out=tmp_path, overrides=[])
    names = ["no-freezing", "cost_aware-0-0.2", "cost_aware-0-0.4", "cost_aware-0.3-0.4"]
    assert [run.folder.name for run in runs] == [f"{name}-seed{seed}" for seed in (0, 1) for name in names]
    freezing = runs[3].config.freezing
    assert (freezing.policy.name, freezing.initial, freezing.final) == ("cost_aware", 0.3, 0.4)
    with pytest.raises(UserError, match="unknown"):
        plan_frontier("digits/simsiam/lump", ["nothing-like-it"], **shares, seeds=[0], out=tmp_path, overrides=[])
