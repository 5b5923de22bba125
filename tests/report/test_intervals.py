"""Intervals against their definition; what a run started from, and whether training helped, is said everywhere."""

from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from scipy import stats

from ptlf.evaluation import summary
from ptlf.report.intervals import images_behind, images_of_mean, neighbours_used, start_of, wilson
from ptlf.report.page import page
from ptlf.report.runs import read_comparison
from ptlf.report.tables import show_results

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(("percent", "images"), [(0.0, 10), (42.72, 66), (91.2, 2000), (100.0, 37)])
def test_wilson_solves_its_equation(percent: float, images: int) -> None:
    """Its ends are the shares q that are z of their own standard errors from the share found."""
    share, z = percent / 100, stats.norm.ppf(0.975)
    # (p - q)^2 = z^2 q (1 - q) / n
    ends = np.roots([1 + z**2 / images, -2 * share - z**2 / images, share**2])
    assert wilson(percent, images) == pytest.approx(sorted(100 * ends.real))


def test_as_how_many_images_a_mean_counts() -> None:
    assert images_of_mean([50, 50, 50]) == pytest.approx(150)
    rng, counts = np.random.default_rng(0), [20, 80]
    means = np.mean([rng.binomial(n, 0.7, 200_000) / n for n in counts], axis=0)
    assert images_of_mean(counts) == pytest.approx(0.7 * 0.3 / means.var(), rel=0.02)
    assert images_of_mean([]) is None
    results = made_up.results() | {"test_images": [10, 20, 40]}
    results["probes"]["knn_task"]["matrix"][-1] = [50.0, None, 60.0]
    assert images_behind(results, "knn_task", "accuracy") == images_of_mean([10, 40])
    assert images_behind(results, "knn_task", "untrained_accuracy") == images_of_mean([10, 20, 40])
    assert images_behind(made_up.results(), "knn_task", "accuracy") is None  # a record of an earlier version


def test_the_neighbours_used_are_named() -> None:
    values: dict[str, Any] = {"settings": {"k": 200}}
    for used, said in (([], "k = 200"), ([200, 200], "k = 200"), ([30, 12], "k = 12 to 30")):
        assert neighbours_used(values | {"used_by_task": [{"k": k} for k in used]}) == said
    assert neighbours_used({"settings": {"lr": 1}}) == ""


def told(results: dict[str, Any]) -> str:
    return made_up.printed(show_results, results, "run")


def shown(tmp_path: Path, results: dict[str, Any]) -> str:
    return " ".join(page(read_comparison([made_up.write(tmp_path / "run", results)])).split())


def test_every_accuracy_has_its_interval(tmp_path: Path) -> None:
    results = made_up.results() | {"test_images": [66, 66, 66]}
    probe = results["probes"]["knn_task"]
    low, high = wilson(probe["accuracy"], 198)
    text = told(results)
    assert f"{probe['accuracy']:.2f} ({low:.1f} to {high:.1f})" in text
    low, high = wilson(probe["matrix"][-1][0], 66)
    assert f"±{(high - low) / 2:.2f}" in next(line for line in text.splitlines() if "at 95 %" in line)
    low, high = wilson(probe["accuracy"], 198)
    start = f"{probe['untrained_accuracy']:.2f}"
    text = shown(tmp_path, results)
    assert f"<small>{low:.1f} to {high:.1f}</small><small>random encoder {start}</small>" in text


def test_the_encoder_before_training_has_its_name(tmp_path: Path) -> None:
    own = {"own_encoder": True}
    assert start_of({}) == "random encoder" and start_of(own) == "encoder before training"
    results = made_up.results() | own | {"encoder_weights": {"sha256": "x"}}
    text = told(results)
    assert "nothing (given encoder)" in text and "knn_task given encoder, %" in text
    assert "<small>given encoder " in shown(tmp_path, results)


def test_training_that_made_it_worse_is_warned_of(tmp_path: Path) -> None:
    results = made_up.results()
    assert "worse" not in told(results) + shown(tmp_path / "better", results)
    results["probes"]["knn_class"] |= summary([[42.72] * 3]) | {"untrained": [43.96] * 3, "untrained_accuracy": 43.96}
    warning = "training made knn_class worse by 1.24{} points: 43.96 % before (random encoder), 42.72 % after"
    assert warning.format("") in told(results)
    assert warning.format("") in shown(tmp_path / "worse", results)
    warning = warning.format(" ± 0.35")
    for images, warned in ((500, False), (50_000, True)):  # of which such a difference may come by chance, or not
        assert (warning in told(results | {"test_images": [images] * 3})) == warned
