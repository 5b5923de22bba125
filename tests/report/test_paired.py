"""Differences by seed against scipy's; what may be called better."""

import re
from pathlib import Path

import made_up
import numpy as np
import pytest
from scipy import stats

from ptlf.evaluation import summary
from ptlf.report.intervals import Interval, Ratio, cost_ratio, interval, seeds_to_tell, verdict, worsened
from ptlf.report.measures import COSTS, probe_measures, steady
from ptlf.report.page import page
from ptlf.report.runs import Comparison, Group, RunRecord, read_comparison
from ptlf.report.tables import show_runs
from ptlf.report.verdicts import group_verdicts, latest_verdicts, ranking

pytestmark = pytest.mark.usefixtures("no_pictures")

ACCURACY, FORGETTING, _ = probe_measures("knn_task")


def test_what_may_be_said() -> None:
    clear, vague = Interval(2.0, 1.9, 3), Interval(2.0, 2.1, 3)
    assert [verdict(clear, rising) for rising in (True, False)] == ["better", "worse"]
    assert [verdict(vague, rising) for rising in (True, False)] == ["", ""]
    assert FORGETTING.said(Interval(-2.0, 1.9, 3)) == "−2.00 ± 1.90 better"
    assert ACCURACY.said(vague) == "+2.00 ± 2.10"
    assert COSTS[0].said(Interval(0.0, 0.0, 3)) == "0.0 ± 0.0"
    single = interval([50.0])
    assert single == Interval(50.0, None, 1) and ACCURACY.said(single) == "+50.00"
    assert cost_ratio({0: 2.0, 1: 4.0}, {2: 6.0}) == Ratio(0.5, None, 0)
    assert cost_ratio({0: 0.0}, {0: 6.0}) == Ratio(0.0, None, 0)  # no logarithm
    assert cost_ratio({}, {0: 6.0}) is cost_ratio({0: 1.0}, {0: 0.0}) is None


def test_how_many_seeds_would_tell() -> None:
    """Of values with the same mean and deviation, with scipy's interval."""
    assert seeds_to_tell(Interval(1.0, None, 1)) is seeds_to_tell(Interval(0.0, 1.0, 3)) is None
    for half in (1.5, 4.0, 20.0):
        count = seeds_to_tell(found := Interval(1.0, half, 3))
        deviation = half * 3**0.5 / stats.t.ppf(0.975, 2)
        tells = [stats.t.interval(0.95, n - 1, 1.0, deviation / n**0.5)[0] > 0 for n in (count - 1, count)]
        assert tells == [False, True], found


def test_what_training_made_worse_is_tested_in_pairs_of_seeds() -> None:
    """Each by two points, whatever their accuracy; of one seed by as much as test images allow."""
    cases = (
        ([(80.0, 78.0), (60.0, 57.9), (70.0, 68.1)], 100, "worse by 2.00 ± 0.25 points"),
        ([(80.0, 78.0), (60.0, 68.0), (70.0, 60.0)], 100, ""),
        ([(80.0, 78.0)], 100, ""),
        ([(80.0, 78.0), (60.0, None)], 10_000, "worse by 2.00 ± 1.13 points"),
        ([(None, 78.0)], 10_000, ""),
    )
    for pairs, images, words in cases:
        scores = [{"untrained_accuracy": was, "accuracy": now} for was, now in pairs]
        said = worsened("knn", scores, "random encoder", images)
        assert words in said and bool(words) == bool(said), pairs


def runs(method: str, accuracies: list[float]) -> list[dict]:
    made = []
    for seed, accuracy in enumerate(accuracies):
        made.append(made_up.results(f"digits/simsiam/{method}", seed=seed))
        made[-1]["probes"]["knn_task"] |= summary([[accuracy] * 3])
    return made


BASE = [80.0, 82.0, 84.0]
CLEAR, VAGUE = [81.0, 83.1, 84.9], [81.0, 80.0, 87.0]  # mean differences of 1.0 and 0.67


def test_groups_are_compared_by_seed() -> None:
    """Only by those that both have; against scipy's interval of paired values."""
    base, other = (Group([RunRecord(Path(), one) for one in runs("lump", values)]) for values in (BASE, CLEAR[::-1]))
    found = ACCURACY.difference(other, base)
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 2) * np.std([4.9, 1.1, -3.0], ddof=1) / 3**0.5)
    wanted = stats.ttest_rel(CLEAR[::-1], BASE).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((wanted.low, wanted.high), rel=1e-3)
    assert ACCURACY.difference(base, base) is None
    assert Comparison([base, other], {}, base).paired == [other]
    other.runs = other.runs[:1]
    assert Comparison([base, other], {}, base).paired == []
    assert ACCURACY.difference(other, base) == Interval(pytest.approx(other.runs[0].value(ACCURACY.path) - 80), None, 1)


def test_the_table_says_better_only_of_what_is_told_apart() -> None:
    made = {"a/lump": runs("lump", BASE), "a/x": runs("ptlf", CLEAR), "a/y": runs("ptlf", VAGUE)}
    # 4.303 * 2.517 / 3 ** 0.5
    found = made_up.table_rows(show_runs, made, "a/lump")["knn_task accuracy, points"]
    assert found == ["+1.00 ± 0.25 better", "+0.67 ± 6.25"]
    single = {"a/lump": made["a/lump"], "a/x": made["a/x"][:1]}
    assert "By seed" not in made_up.printed(show_runs, single, "a/lump")


def test_what_is_highest_by_chance_is_not_called_so() -> None:
    """Vague over three seeds, and one seed of 300 test images; the random encoder of all has 60 %."""
    vague, clear = (
        Comparison([Group(runs("lump", BASE), "lump"), Group(runs("ptlf", values), "ptlf")], {}, None)
        for values in (VAGUE, CLEAR)
    )
    for comparison in (vague, clear):
        for place, group in enumerate(comparison.groups):
            group.runs = [RunRecord(Path(), one | {"test_images": [100] * 3}) for one in group.runs]
            for run in group.runs:
                run.results["probes"]["knn_task"]["untrained_accuracy"] = 60.0
            group.place = place
    said = (
        "ptlf has the highest accuracy (knn_task), 82.67 %, but is not shown to be above lump (82.00 %; about 58 seeds"
    )
    assert ranking(vague).startswith(said) and "random" not in ranking(vague)
    assert ranking(clear) == ""
    for group in clear.groups:
        group.runs = group.runs[:1]
    assert "above lump (80.00 %; about 1" in ranking(clear) and "test images would tell" in ranking(clear)


def test_verdicts_of_several_seeds_are_counted() -> None:
    test = {"images": "x", "tasks": 3, "verdict": "v.", "probes": {}}
    records = [
        RunRecord(Path(), made_up.results(seed=seed), tests=[test | {"gains": {"the start": [gain, 1.0]}}])
        for seed, gain in enumerate((2.0, 0.5, -3.0))
    ]
    assert group_verdicts(Group(records)) == ["Of 3 seeds 1 are better and 1 worse than the random encoder."]
    assert group_verdicts(Group(records[:1])) == ["v."]
    assert latest_verdicts([test, test | {"verdict": "w."}], 4) == ["After 3 of 4 tasks. w."]


SECONDS = [(100.0, 80.0), (120.0, 90.0), (90.0, 75.0)]  # lump, ptlf


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_headline_and_the_table_of_the_page_have_the_differences_by_seed(tmp_path: Path, seeds: int) -> None:
    """Against scipy's geometric mean, and its interval of the logarithms."""
    for method, accuracies in (("lump", BASE), ("ptlf", CLEAR)):
        for one, seconds in zip(runs(method, accuracies[:seeds]), SECONDS, strict=False):
            one["cost"]["learning_seconds"] = seconds[method == "ptlf"]
            made_up.write(tmp_path / f"{method}-{one['seed']}", one)
    text = page(read_comparison([tmp_path]))
    ratios = np.array([mine / base for base, mine in SECONDS[:seeds]])
    said = "+1.00 ± 0.25 better" if seeds > 1 else "+1.00"
    assert f"({said} against lump)" in text
    assert f"({stats.gmean(ratios):.2f}×{f', 95 % {ends(ratios)}' if seeds > 1 else ''})" in text
    assert ("; one seed does not tell a difference" in text) == (seeds == 1)
    table = re.search(r'<table class="paired">.*?</table>', text, re.DOTALL)
    assert (said in table.group()) if table else seeds == 1


def ends(ratios: np.ndarray) -> str:
    logarithms = np.log(ratios)
    low, high = stats.t.interval(0.95, len(ratios) - 1, loc=logarithms.mean(), scale=stats.sem(logarithms))
    return f"{np.exp(low):.2f} to {np.exp(high):.2f}"


def test_ratios_far_apart_have_a_positive_interval_and_one_number_on_the_page(tmp_path: Path) -> None:
    """Two seeds of 3.00 and 3.58: the t interval of the ratios themselves would reach below zero."""
    for seed, seconds in enumerate((30.0, 35.8)):
        for method, took in (("lump", 10.0 * (1 + 9 * seed)), ("ptlf", seconds * (1 + 9 * seed))):
            one = made_up.results(f"digits/simsiam/{method}", seed=seed)
            one["cost"]["learning_seconds"] = took
            made_up.write(tmp_path / f"{method}-{seed}", one)
    ratios = np.array([3.0, 3.58])
    assert np.mean(ratios) - 12.706 * stats.sem(ratios) < 0
    comparison = read_comparison([tmp_path])
    found = steady(COSTS[0]).ratio(comparison.groups[1], comparison.baseline)
    assert found.mean == pytest.approx(stats.gmean(ratios)) and 0 < found.ends[0] < found.mean < found.ends[1]
    made = page(comparison)
    cells = "".join(re.findall(r'data-measure="cost.steady_learning_seconds".*?</td>', made, re.DOTALL))
    shown = set(re.findall(r"<b>(\d+\.\d\d)×</b>", cells))
    assert shown == {f"{stats.gmean(ratios):.2f}"}  # the ratio of the mean seconds is 3.53
    assert f"({stats.gmean(ratios):.2f}×, 95 % {ends(ratios)})" in made
    assert "eometric mean of the ratios by seed" in " ".join(made.split())


@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)])  # in common with LUMP's, and not
def test_waiting_for_the_compiler_changes_no_ratio_and_no_difference(seeds: tuple[int, int]) -> None:
    """LUMP waits 40 and 7 s in its first epoch, PTLF 300 s with one seed: as if none did."""

    def group(method: str, seeds: tuple[int, int], waits: tuple[float, float]) -> Group:
        made = [made_up.results(f"digits/simsiam/{method}", seed=seed) for seed in seeds]
        waited = [made_up.wait_for_compiler(one, wait) for one, wait in zip(made, waits, strict=True)]
        return Group([RunRecord(Path(), one) for one in waited], method)

    without = group("lump", (0, 1), (0.0, 0.0)), group("ptlf", seeds, (0.0, 0.0))
    waiting = group("lump", (0, 1), (40.0, 7.0)), group("ptlf", seeds, (300.0, 0.0))
    for whole, measure in ((cost, steady(cost)) for cost in COSTS[:2]):
        assert waiting[1].mean(whole.path) == pytest.approx(without[1].mean(whole.path) + 150.0)
        assert waiting[1].mean(measure.path) == pytest.approx(without[1].mean(whole.path))  # as the ratio has it
        wanted, found = (measure.ratio(mine, base) for base, mine in (without, waiting))
        assert found is not None and wanted is not None
        assert (found.mean, found.count) == (pytest.approx(wanted.mean), 2 if seeds == (0, 1) else 0)
        wanted, found = (measure.difference(mine, base) for base, mine in (without, waiting))
        assert (found and (found.mean, found.half)) == (wanted and pytest.approx((wanted.mean, wanted.half)))
