"""Differences by seed against scipy's; what may be called better."""

from __future__ import annotations

import io
import re
from pathlib import Path

import made_up
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from ptlf.report.measures import COSTS, probe_measures, steady
from ptlf.report.page import page
from ptlf.report.paired import (
    Interval,
    Ratio,
    compared,
    cost_ratio,
    difference,
    interval,
    ratio,
    several_seeds,
    verdict,
    words,
)
from ptlf.report.runs import Group, RunRecord, read_comparison
from ptlf.report.tables import show_runs

pytestmark = pytest.mark.usefixtures("no_pictures")

TIME = steady(COSTS[:1], [Group([]), Group([])])[0]
ACCURACY, FORGETTING, _ = probe_measures("knn_task")


@pytest.mark.parametrize("count", [2, 3, 10])
def test_interval_of_paired_differences(count: int) -> None:
    mine, base = np.random.default_rng(count).normal(90, 2, (2, count))
    found = difference(dict(enumerate(mine)), dict(enumerate(base)))
    wanted = stats.ttest_rel(mine, base).confidence_interval(0.95)
    assert found is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((wanted.low, wanted.high), rel=1e-3)
    assert found.count == count
    assert found.excludes_zero == (wanted.low > 0 or wanted.high < 0)


def test_only_seeds_that_both_have_count() -> None:
    assert difference({0: 5.0, 1: 7.0, 2: 100.0}, {1: 6.0, 0: 3.0, 3: -100.0}) == interval([2.0, 1.0])
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_a_single_seed_has_no_interval_and_allows_no_verdict() -> None:
    found = interval([50.0])
    assert found == Interval(50.0, None, 1)
    assert verdict(found, rising=True) == ""
    assert words(found, ACCURACY) == "+50.00"


def test_what_may_be_said() -> None:
    clear, vague = Interval(2.0, 1.9, 3), Interval(2.0, 2.1, 3)
    assert [verdict(clear, rising) for rising in (True, False)] == ["better", "worse"]
    assert [verdict(vague, rising) for rising in (True, False)] == ["", ""]
    assert words(Interval(-2.0, 1.9, 3), FORGETTING) == "−2.00 ± 1.90 better"
    assert words(vague, ACCURACY) == "+2.00 ± 2.10"
    assert words(Interval(0.0, 0.0, 3), COSTS[0]) == "0.0 ± 0.0"


def runs(method: str, accuracies: list[float]) -> list[dict]:
    made = []
    for seed, accuracy in enumerate(accuracies):
        made.append(made_up.results(f"digits/simsiam/{method}", seed=seed))
        made[-1]["probes"]["knn_task"]["accuracy"] = accuracy
    return made


BASE = [80.0, 82.0, 84.0]
CLEAR, VAGUE = [81.0, 83.1, 84.9], [81.0, 80.0, 87.0]  # mean differences of 1.0 and 0.67


def test_groups_are_compared_by_seed() -> None:
    base, other = (Group([RunRecord(Path(), one) for one in runs("lump", values)]) for values in (BASE, CLEAR[::-1]))
    found = compared(other, base, ACCURACY)
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 2) * np.std([4.9, 1.1, -3.0], ddof=1) / 3**0.5)
    assert compared(base, base, ACCURACY) is None
    assert several_seeds([base, other], base) == [other]
    other.runs = other.runs[:1]
    assert several_seeds([base, other], base) == []


def test_the_table_says_better_only_of_what_is_told_apart() -> None:
    console = Console(width=160, file=io.StringIO())
    show_runs(console, {"a/lump": runs("lump", BASE), "a/x": runs("ptlf", CLEAR), "a/y": runs("ptlf", VAGUE)}, "a/lump")
    line = next(line for line in console.file.getvalue().splitlines() if "knn_task accuracy, points" in line)
    assert [cell.strip() for cell in line.split("│")[2:4]] == [
        "+1.00 ± 0.25 better",
        "+0.67 ± 6.25",
    ]  # 4.303 * 2.517 / 3 ** 0.5
    alone = Console(width=160, file=io.StringIO())
    show_runs(alone, {"a/lump": runs("lump", BASE), "a/x": runs("ptlf", CLEAR)[:1]}, "a/lump")
    assert "By seed" not in alone.file.getvalue()


def made_page(tmp_path: Path, accuracies: list[float], others: int = 1) -> str:
    for place in range(others):
        for one in runs("ptlf", [value - place for value in accuracies]):
            one["config"]["freezing"]["final"] = 0.4 + place / 10
            made_up.write(tmp_path / f"ptlf-{place}-{one['seed']}", one)
    for one in runs("lump", BASE):
        made_up.write(tmp_path / f"lump-{one['seed']}", one)
    return page(read_comparison([tmp_path]))


def test_the_page_has_differences_by_seed_and_names_the_highest_with_what_seeds_allow(tmp_path: Path) -> None:
    table = re.search(r'<table class="paired">.*?</table>', made_page(tmp_path / "table", CLEAR), re.DOTALL)
    assert table is not None and "+1.00 ± 0.25 better" in table.group()
    for accuracies, said in (
        (CLEAR, "; better than lump by seed"),
        (VAGUE, "; 3 seeds do not tell it from lump"),
        ([99.0], "; one seed does not tell it from lump"),
    ):
        text = made_page(tmp_path / said, accuracies, 3)
        (item,) = re.findall(r"<li>Highest accuracy.*?</li>", text, re.DOTALL)
        assert item.endswith(f"{said}</li>")


SECONDS = [(100.0, 80.0), (120.0, 90.0), (90.0, 75.0)]  # lump, ptlf


def ends(ratios: np.ndarray) -> str:
    logarithms = np.log(ratios)
    low, high = stats.t.interval(0.95, len(ratios) - 1, loc=logarithms.mean(), scale=stats.sem(logarithms))
    return f"{np.exp(low):.2f} to {np.exp(high):.2f}"


def headline(tmp_path: Path, seeds: int, others: int = 1) -> str:
    """Of 198 test images."""
    for seed, (base, mine) in enumerate(SECONDS[:seeds]):
        for place in range(others):
            one = made_up.results("digits/simsiam/ptlf", seed=seed, freezing__final=0.4 + place / 10)
            one["cost"] |= {"learning_seconds": mine + place, "peak_memory_bytes": 9 * 2**20}
            one["test_images"] = [66, 66, 66]
            made_up.write(tmp_path / f"ptlf-{place}-{seed}", one)
        one = made_up.results("digits/simsiam/lump", seed=seed)
        one["cost"] |= {"learning_seconds": base, "peak_memory_bytes": 10 * 2**20}
        made_up.write(tmp_path / f"lump-{seed}", one)
    return headline_of(tmp_path)


def headline_of(tmp_path: Path) -> str:
    found = re.search(r'<ul class="headline">.*?</ul>', page(read_comparison([tmp_path])), re.DOTALL)
    assert found is not None
    return " ".join(re.sub(r"<[^>]*>", "", found.group()).split())


def test_the_time_ratio_of_the_headline_has_its_interval_by_seed(tmp_path: Path) -> None:
    """Against scipy's geometric mean, and its interval of the logarithms."""
    ratios = np.array([mine / base for base, mine in SECONDS])
    words = f"training time without compiling {stats.gmean(ratios):.2f}× (95 %: {ends(ratios)}, 3 seeds)"
    assert words in headline(tmp_path, 3)
    assert "training time without compiling 0.80× (one seed); activation memory" in headline(tmp_path / "one", 1)


def scores(method: str, key: str, seeds: int = 3) -> np.ndarray:
    made = [made_up.results(f"digits/simsiam/{method}", seed=seed, **FINAL.get(method, {})) for seed in range(seeds)]
    return np.array([one["probes"]["knn_task"][key] for one in made])


FINAL = {"ptlf": {"freezing__final": 0.4}}


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_headline_has_the_differences_by_seed(tmp_path: Path, seeds: int) -> None:
    """Against scipy's interval of paired values."""
    words = []
    for key in ("accuracy", "forgetting"):
        mine, base = scores("ptlf", key, seeds), scores("lump", key, seeds)
        low, high = stats.ttest_rel(mine, base).confidence_interval(0.95)
        better, worse = (low > 0, high < 0) if key == "accuracy" else (high < 0, low > 0)
        said = " better" if better else " worse" if worse else ""
        words.append(f"{key} {(mine - base).mean():+.2f} ± {(high - low) / 2:.2f}{said}".replace("-", "−"))
    lump = [f"{scores('lump', key, seeds).mean():.2f}".replace("-", "−") for key in ("accuracy", "forgetting")]
    said = headline(tmp_path, seeds)
    assert f"Against lump ({lump[0]} %, {lump[1]} points), by seed: {', '.join(words)} (95 %, {seeds} seeds)." in said
    assert "test images" not in said


def test_the_headline_of_one_seed_has_the_interval_of_the_test_images_by_name(tmp_path: Path) -> None:
    accuracy = scores("ptlf", "accuracy", 1)[0]
    ends = stats.binomtest(round(198 * accuracy / 100), 198).proportion_ci(method="wilson")
    said = headline(tmp_path, 1)
    found = re.search(r"right \(knn_task; 95 % from the number of test images: (.*?) to (.*?)\)", said)
    assert found is not None
    assert [float(end) for end in found.groups()] == pytest.approx([100 * ends.low, 100 * ends.high], abs=0.4)
    assert f"One seed does not tell it from lump ({scores('lump', 'accuracy', 1)[0]:.2f} %, " in said


def test_the_headline_without_a_baseline_has_the_interval_over_seeds(tmp_path: Path) -> None:
    values = scores("ptlf", "accuracy")
    low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=stats.sem(values))
    for seed in range(3):
        made = made_up.results("digits/simsiam/ptlf", seed=seed, **FINAL["ptlf"]) | {"test_images": [66, 66, 66]}
        made_up.write(tmp_path / str(seed), made)
    said = headline_of(tmp_path)
    assert f"{values.mean():.2f} % right (knn_task; 95 % over 3 seeds: {low:.1f} to {high:.1f})" in said
    assert "test images" not in said


def test_what_cannot_be_compared_by_seed_is_said(tmp_path: Path) -> None:
    untested = made_up.results("digits/simsiam/lump")
    for values in untested["probes"].values():
        values |= {"matrix": [], "accuracy": None, "forgetting": None}
    lump, ptlf = ([made_up.results(f"digits/simsiam/{m}", seed=n) for n in (0, 1)] for m in ("lump", "ptlf"))
    for number, (made, pattern) in enumerate((
        ([*lump, ptlf[0]], r"One seed does not tell it from lump \(.* points, means of 2 seeds\)\."),
        ([lump[0], ptlf[1]], r"No seed in common with lump \((?!.*by seed)"),
        ([untested, ptlf[0]], r"points\. lump was not evaluated\. Costs relative to lump: "),
    )):  # fmt: skip
        for place, one in enumerate(made):
            made_up.write(tmp_path / str(number) / str(place), one)
        assert re.search(pattern, headline_of(tmp_path / str(number))), pattern


def test_the_memory_of_the_headline_is_that_of_the_run(tmp_path: Path) -> None:
    """Kept for backward: mean over the epochs after the first task. GPU memory: the run's peak, 9 of 10 MiB."""
    kept = []
    for method in ("ptlf", "lump"):
        epochs = made_up.results(f"digits/simsiam/{method}", **FINAL.get(method, {}))["cost"]["per_epoch"]
        kept.append(np.mean([b for b, task in zip(epochs["kept_bytes"], epochs["task"], strict=True) if task > 1]))
    said = headline(tmp_path, 1)
    assert f"activation memory, mean after task 1 {kept[0] / kept[1]:.2f}×; " in said
    assert "peak GPU memory, whole run 0.90×; " in said
    assert "last epoch" not in said


def test_the_least_time_of_many_runs_has_its_interval_too(tmp_path: Path) -> None:
    ratios = np.array([mine / base for base, mine in SECONDS[:2]])
    found = re.search(r"Least training time without compiling: .*? 85\.0 s \((.*?)\)", headline(tmp_path, 2, others=3))
    assert found is not None
    assert found.group(1) == f"{stats.gmean(ratios):.2f}×, 95 %: {ends(ratios)}, 2 seeds"


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
    found = ratio(comparison.groups[1], comparison.baseline, TIME)
    assert found is not None
    assert found.mean == pytest.approx(stats.gmean(ratios))
    assert found.ends is not None
    assert 0 < found.ends[0] < found.mean < found.ends[1]
    made = page(comparison)
    cells = "".join(re.findall(r'data-measure="cost.steady_learning_seconds".*?</td>', made, re.DOTALL))
    shown = set(re.findall(r"<b>(\d+\.\d\d)×</b>", cells))
    assert shown == {f"{stats.gmean(ratios):.2f}"}  # the ratio of the mean seconds is 3.53
    assert f"training time without compiling <b>{stats.gmean(ratios):.2f}×</b> (95 %: {ends(ratios)}, 2 seeds)" in made
    assert "geometric mean over the seeds of the ratios to lump" in " ".join(made.split())


@pytest.mark.parametrize("seeds", [(0, 1), (2, 3)])  # in common with LUMP's, and not
def test_waiting_for_the_compiler_changes_no_ratio_and_no_difference(seeds: tuple[int, int]) -> None:
    """LUMP waits 40 and 7 s in its first epoch, PTLF 300 s with one seed: as if none did."""

    def group(method: str, seeds: tuple[int, int], waits: tuple[float, float]) -> Group:
        made = [made_up.results(f"digits/simsiam/{method}", seed=seed) for seed in seeds]
        waited = [made_up.wait_for_compiler(one, wait) for one, wait in zip(made, waits, strict=True)]
        return Group([RunRecord(Path(), one) for one in waited], method)

    without = group("lump", (0, 1), (0.0, 0.0)), group("ptlf", seeds, (0.0, 0.0))
    waiting = group("lump", (0, 1), (40.0, 7.0)), group("ptlf", seeds, (300.0, 0.0))
    for whole, measure in zip(COSTS[:2], steady(COSTS[:2], waiting), strict=True):
        assert waiting[1].mean(whole.path) == pytest.approx(without[1].mean(whole.path) + 150.0)
        assert waiting[1].mean(measure.path) == pytest.approx(without[1].mean(whole.path))  # as the ratio has it
        wanted, found = (ratio(mine, base, measure) for base, mine in (without, waiting))
        assert found is not None and wanted is not None
        assert (found.mean, found.count) == (pytest.approx(wanted.mean), 2 if seeds == (0, 1) else 0)
        wanted, found = (compared(mine, base, measure) for base, mine in (without, waiting))
        assert (found and (found.mean, found.half)) == (wanted and pytest.approx((wanted.mean, wanted.half)))


def test_without_a_seed_in_common_it_is_the_ratio_of_the_means() -> None:
    assert cost_ratio({0: 2.0, 1: 4.0}, {2: 6.0}) == Ratio(0.5, None, 0)
    assert cost_ratio({0: 0.0}, {0: 6.0}) == Ratio(0.0, None, 0)  # no logarithm
    assert cost_ratio({}, {0: 6.0}) is cost_ratio({0: 1.0}, {0: 0.0}) is None
