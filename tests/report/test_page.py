"""The page: its numbers are those of results.json, damage stays in its place, and it needs nothing but itself."""

import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import made_up
import pytest
from rich.console import Console
from scipy import stats

from ptlf.cli import main
from ptlf.core.errors import UserError
from ptlf.evaluation import summary
from ptlf.report.figures import freeze_events, mean_line
from ptlf.report.page import page
from ptlf.report.runs import FEATURES, Group, RunRecord, at, read_comparison
from ptlf.report.tables import show_results, show_runs
from ptlf.run.results import epoch_lines, to_columns

pytestmark = pytest.mark.usefixtures("no_pictures")

PIXELS = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAMAAAABCAIAAACUgoPjAAAAEklEQVR4nGOM6jnBwMDAwMAAAA0WAbBJCw2IAAAAAElFTkSuQmCC"
)
GALLERY = {
    "groups": ["0, 1", "2, 3", "4, 5"],
    "labels": ["zero", "one"],
    "sprite": {"image": PIXELS, "size": 1, "columns": 3, "width": 3, "height": 1},
    "tiles": [[0, 0], [0, 1], [1, 1]],
    "queries": [0, 1],
    "point_groups": [0, 1, 2],
    "looks": {
        moment: {"neighbours": [[1, 2], [2, 0]], "points": [[0, 0], [0.5, 0.5], [1, 1]]}
        for moment in ("before", "after")
    },
}


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    lump = made_up.write(tmp_path / "lump", made_up.results("digits/simsiam/lump"), GALLERY)
    return [lump, made_up.write(tmp_path / "ptlf", made_up.results("digits/simsiam/ptlf"), GALLERY)]


def html(folders: list[Path], baseline: str | None = None) -> str:
    return page(read_comparison(folders, baseline))


def section(text: str, name: str) -> str:
    return text[text.index(f'<section id="{name}">') :].split("</section>")[0]


def rows(text: str) -> dict[str, dict[str, tuple[float, str]]]:
    """By run and measure: the number behind the cell and the words in it."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    tables = "".join(re.findall(r'<table class="answer">.*?</table>', text, re.S))
    for row in re.findall(r'<tr><th scope="row">.*?</tr>', tables, re.S):
        cells = re.findall(r'data-measure="([^"]+)" data-value="([^"]+)"><span>([^<]+)', row)
        (name,) = re.findall(r"<span class=\"f-run\d\">([^<]+)", row)
        found.setdefault(name, {}).update({m: (float(v), w.strip()) for m, v, w in cells})
    return found


def test_the_table_holds_the_numbers_of_results_json(two: list[Path]) -> None:
    found = rows(html(two))
    for folder in two:
        results = json.loads((folder / "results.json").read_text())
        cells = found[folder.name]
        assert len(cells) == 7
        for measure, (value, words) in cells.items():
            if measure == "cost.later_kept_bytes":
                lines = [line["kept_bytes"] for line in epoch_lines(results) if line["task"] > 1]
                assert value == statistics.fmean(lines)
            else:  # nothing was compiled
                assert value == at(results, measure.replace("steady_", "").split("."))
            unit = {"later_kept_bytes": 2**20, "backward_flops": 1e12}.get(measure.split(".")[-1], 1)
            digits = len(words.split(".")[-1])
            shown = float(words.replace(",", "").replace("−", "-"))
            assert shown == pytest.approx(value / unit, abs=0.51 * 10**-digits)


def run_of(method: str, **settings: Any) -> dict:
    return made_up.results(f"digits/simsiam/{method}", **settings)


def page_of(root: Path, runs: Mapping[str, dict] | Sequence[dict], gallery: dict | None = None) -> str:
    """Of runs in new folders, with single spaces."""
    named = runs if isinstance(runs, Mapping) else {str(number): run for number, run in enumerate(runs)}
    new = root / f"page{len(list(root.glob('page*')))}"
    return " ".join(html([made_up.write(new / name, run, gallery) for name, run in named.items()]).split())


def change(folder: Path, edit: Callable[[dict], object]) -> dict:
    """A run's record in its file."""
    made = json.loads((folder / "results.json").read_text())
    edit(made)
    (folder / "results.json").write_text(json.dumps(made))
    return made


def test_costs_are_relative_to_lump(two: list[Path]) -> None:
    lump, ptlf = (json.loads((folder / "results.json").read_text())["cost"]["learning_seconds"] for folder in two)
    for text, ratio in ((html(two[::-1]), ptlf / lump), (html(two, "ptlf"), lump / ptlf)):  # whatever the order
        assert f" s ({ratio:.2f}×)" in headline(text)
        assert f" <b>{ratio:.2f}×</b></span>" in text
    with pytest.raises(UserError, match="unknown baseline 'lumb'; did you mean 'lump'"):
        html(two, "lumb")


def headline(text: str) -> str:
    return re.findall('<ul class="headline">.*?</ul>', text, re.S)[0]


def test_what_makes_seconds_and_bytes_hard_to_compare_is_said(two: list[Path]) -> None:
    assert "of different" not in html(two)
    change(two[0], lambda made: (made["environment"].update(device_name="another"), made.update(commit="other")))
    text = html(two)
    assert "different machines (&lt;machine&gt;, another)" in text and "of different commits" in text
    assert "the peak of a whole run is mostly that of its first epochs" in text


def test_joint_training_is_a_bound(tmp_path: Path) -> None:
    joint = run_of("multitask")
    joint["tasks"] = [", ".join(joint["tasks"])]
    for values in joint["probes"].values():
        values |= summary([[99.98, 99.99, 100.0]])
    text = headline(page_of(tmp_path, [run_of("lump"), joint]))
    assert "accuracy 99.99 %" in text and text.count("a bound for continual methods, not one of them") == 1


def test_seeds_become_mean_and_interval(tmp_path: Path) -> None:
    made = [made_up.results(seed=seed) for seed in (0, 1, 2)]
    accuracies = [results["probes"]["knn_task"]["accuracy"] for results in made]
    text = page_of(tmp_path, made)
    (cells,) = rows(text).values()
    value, words = cells["probes.knn_task.accuracy"]
    assert value == pytest.approx(statistics.fmean(accuracies))
    assert words == f"{value:.2f} ± {stats.t.ppf(0.975, 2) * stats.sem(accuracies):.2f}"
    assert "±: half the width of the 95 % t interval over the seeds." in text and "3 seeds" in text
    assert "standard deviation over the seeds" not in text


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    other_k = made_up.results()
    other_k["probes"]["knn_class"]["settings"]["k"] = 5
    for other, reason in (
        (made_up.results(stream__classes=4), "their streams differ (classes: 4 and None)"),
        (made_up.results(tasks=4), "their eval_splits differ"),
        (other_k, "their probes differ (knn_class.k: 5 and 20)"),
    ):
        with pytest.raises(UserError, match=re.escape(reason)):
            page_of(tmp_path, [made_up.results(), other])


def test_runs_of_different_epochs_stand_side_by_side_and_the_page_says_so(tmp_path: Path) -> None:
    """In the charts the epochs of the shorter run stand in their task."""
    words, runs = "trained for 4 or 6 epochs of a task", [run_of("lump"), run_of("ptlf")]
    assert words not in page_of(tmp_path, runs)
    text = page_of(tmp_path, [*runs, run_of("ptlf", training__epochs=4)])
    assert words in text and "4 or 6 epochs each" in text
    assert set(rows(text)) == {"lump", "ptlf (epochs 6)", "ptlf (epochs 4)"}
    shorter = Group([RunRecord(Path(), made_up.results(training__epochs=4))])
    places = list(mean_line(shorter, lambda line: line["seconds"], 6))
    assert {(place - 1) // 6 + 1 for place in places} == {1, 2, 3} and places[:5] == [1, 2, 3, 4, 7]
    events = [6 * (one["task"] - 1) + event["epoch"] for one in shorter.first["freezing"] for event in one["events"]]
    assert freeze_events(shorter, 6) == events


ARRIVED: list[tuple[tuple, tuple, str]] = [  # names, checksums, why they are refused
    (("cats", "dogs"), ("1", "2"), "number 1 of those that arrived: cats and dogs"),
    (("day", "day"), ("1", "2"), "number 1 of those that arrived: day has others in each"),
    (("cats", "dogs"), ("1", "1"), ""),
]


def test_tasks_of_different_images_are_refused(tmp_path: Path) -> None:
    for names, sums, reason in ARRIVED:
        runs = []
        for seed, (name, checksum) in enumerate(zip(names, sums, strict=True)):
            runs.append(made_up.results(seed=1 - seed, tasks=2) | {"tasks": ["first", name], "arrived": 1})
            runs[-1] |= {"arrived_sha256": [checksum]}
        if reason:
            with pytest.raises(UserError, match=re.escape(reason.split(": ")[0])) as told:
                page_of(tmp_path, runs[::-1])
            assert "their tasks are of different images" in str(told.value), reason
        else:
            assert "2 seeds" in page_of(tmp_path, runs)


DAMAGED: dict[str, Callable[[dict], object]] = {
    "words in the matrix": lambda results: results["probes"]["knn_task"]["matrix"][0].__setitem__(0, "good"),
    "short row": lambda results: results["probes"]["knn_task"]["matrix"][1].pop(),
    "an accuracy that is not its row's": lambda results: results["probes"]["knn_task"].update(accuracy=99.99),
    "another schema": lambda results: results.__setitem__("schema", 99),
    "an epoch without seconds": lambda results: results["cost"]["per_epoch"]["seconds"].pop(),
    "no seconds": lambda results: results["cost"]["per_epoch"].pop("seconds"),
}


def test_damage_is_named_and_the_rest_is_there(two: list[Path], tmp_path: Path) -> None:
    texts = {"cut off": json.dumps(made_up.results())[:500], "a list": "[]"}
    for how, edit in DAMAGED.items():
        results = made_up.results(freezing__final=0.6)
        edit(results)
        texts[how] = json.dumps(results)
    bad = made_up.write(tmp_path / "bad", made_up.results())
    for how, text in texts.items():
        (bad / "results.json").write_text(text)
        shown = html([*two, bad])
        problem, *_ = re.findall(r'<p class="problem">(.*?)</p>', shown)
        assert problem.startswith("<b>bad</b> is left out: ") and str(bad / "results.json") in unescape(problem), how
        assert set(rows(shown)) == {"lump", "ptlf"}, how
        with pytest.raises(UserError, match=r"no run to report on: .*bad/results\.json"):
            read_comparison([bad])
    assert html(two).count('id="neighbours-') == 2
    for moment in ("before", "after"):  # without one of its maps a run shows none
        look = {**GALLERY["looks"][moment], "points": []}
        (two[0] / "gallery.json").write_text(json.dumps({**GALLERY, "looks": {**GALLERY["looks"], moment: look}}))
        text = html(two)
        assert (text.count('id="neighbours-'), text.count('id="features-')) == (2, 1), moment
    (two[0] / "gallery.json").write_text('{"sprite": {}}')
    (two[1] / "gallery.json").write_text(json.dumps(GALLERY).replace(PIXELS, "https://example.org/a.png"))
    text = html(two)
    assert section(text, "gallery").count("is damaged") == 2
    assert "example.org" not in text and "Accuracy matrix" in text


def test_an_unfinished_run_says_how_far_it_got(tmp_path: Path) -> None:
    half, new = run_of("ptlf", seed=1) | {"status": "running", "freezing": []}, made_up.results()
    half["cost"]["per_epoch"] = to_columns(epoch_lines(half)[:6])
    start = {"accuracy": None, "forgetting": None, "accuracy_by_task": [], "forgetting_by_task": []}
    for values in half["probes"].values():
        values |= summary(values["matrix"][:1])
    text = page_of(tmp_path, [run_of("lump"), run_of("ptlf"), half])
    assert "unfinished: 6 of 18 epochs" in text
    assert len(rows(text)) == 3  # no mean with the finished seed
    new |= {"status": "running", "freezing": []}
    costs = {"kept_bytes": None, "learning_seconds": 0.0, "train_seconds": 0.0, "backward_flops": 0}
    new["cost"] |= {"per_epoch": {}, **costs}
    for values in new["probes"].values():
        values |= {"matrix": [], **start}
    assert "No epoch has been written down yet" in page_of(tmp_path, [new])


def test_what_is_missing_is_named_with_what_would_fill_it(tmp_path: Path) -> None:
    text = page_of(tmp_path, [run_of("lump") | {"probes": {}}])
    for name, words in {
        "accuracy": "Not evaluated: 0. That needs labelled test images",
        "correlation": "a run with --freezing.policy correlation does",
        "freezing": "No unit froze in 0.",
        "gallery": "no gallery.json beside",
    }.items():
        assert words in section(text, name), name
    old, new = run_of("lump"), run_of("der") | {"test_images": [66, 66, 66]}
    new["features"] = [{"task": task, "images": 9, "spread": 0.4, "effective_rank": 9.0} for task in (1, 2, 3)]
    assert "95 % interval (Wilson)" not in page_of(tmp_path, [old])
    assert "95 % interval (Wilson)" in page_of(tmp_path, [old, new])
    assert [len(Group([RunRecord(Path(), run)]).features("spread")) for run in (old, new)] == [0, 3]


def test_the_k_of_the_neighbours_is_said_once_and_where_it_grows(tmp_path: Path) -> None:
    """A run of three tasks, one of all at once, and a record of an older version."""
    runs = {"lump": [1, 2, 3], "multitask": [3], "si": []}
    made = {method: run_of(method) for method in runs}
    for method, used in runs.items():
        made[method]["probes"]["knn_task"]["settings"]["k"] = "min(200, tasks seen)"
        made[method]["probes"]["knn_task"] |= {"used_by_task": [{"k": k} for k in used]} if used else {}
    accuracy = section(page_of(tmp_path, made), "accuracy")
    found = dict(re.findall(r"<h3>([^<]+)</h3><p>([^<]+)</p>", accuracy))
    how = found["Accuracy matrix, kNN within the task"]
    assert how.endswith(" k = 1 to 3.") and how.count("k = ") == 1
    assert found["Accuracy matrix, kNN among all classes"].endswith(" k = 20.")


def test_every_picture_is_there_once_with_a_sentence(two: list[Path], pictures: None) -> None:
    text = html(two)
    figures = re.findall(r"<figure.*?</figure>", text, re.S)
    assert len(figures) >= 12
    for figure in figures:
        assert re.search(r"<figcaption><h3>[^<]+</h3><p>[^<]{30,}\.</p>", figure)
        svgs = re.findall(r'<svg viewBox="[^"]*" role="img".*?</svg>\s*</div>', figure, re.S)
        assert len(svgs) == figure.count('class="picture"') >= 1, figure[:200]
        assert all(svg.count("<path") + svg.count("<image") > 2 for svg in svgs), figure[:200]
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))


def test_the_page_needs_nothing_but_itself_and_quotes_what_it_shows(tmp_path: Path, pictures: None) -> None:
    results = made_up.results()
    wicked = "<script>alert(1)</script>"
    results["tasks"][0] = results["eval_splits"][0] = results["units"][0] = results["config"]["recipe"] = wicked
    for entry in results["freezing"]:
        entry["ratios"][wicked] = 0.9
    text = page_of(tmp_path, [results], GALLERY)
    assert wicked not in text and escape(wicked) in text
    assert "<script" not in text and "@import" not in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text) and not re.search(r"url\((?!#)", text)


def test_the_command_that_repeats_it(two: list[Path]) -> None:
    text = section(html(two), "details")
    for folder in two:
        assert f"ptlf train --config {folder}/config.yaml --out again" in text
    assert text.count("c0ffee") == 2
    assert "freezing.policy" in text.split("<details>")[0]


@pytest.mark.slow
def test_eight_runs_of_twenty_tasks_stay_small(pictures: None) -> None:
    text = made_up.page_of_eight()
    assert len(text.encode()) < 5e6
    assert len(rows(text)) == 8


def labels(root: Path, *runs: dict) -> dict[str, int]:
    """Of the groups, with the number of their seeds."""
    new = root / f"labels{len(list(root.glob('labels*')))}"
    folders = [made_up.write(new / name, run) for name, run in zip("abcd", runs, strict=False)]
    return {group.label: len(group.runs) for group in read_comparison(folders).groups}


def test_seeds_are_grouped_and_named_by_the_settings_that_count(tmp_path: Path) -> None:
    make = made_up.results
    beside = [make(), make(seed=1, checkpoint__keep=1), make(seed=2, evaluation__batch=64, evaluation__gallery=False)]
    assert labels(tmp_path, *beside, make(seed=3, memory__size=9)) == {"ptlf (size 64)": 3, "ptlf (size 9)": 1}
    assert labels(tmp_path, make(), make(evaluation__batch=64)) == {"ptlf (a)": 1, "ptlf (b)": 1}  # the same seed again
    tests = [make(seed=seed, evaluation__tasks=tasks) for seed, tasks in enumerate(("all", "all", "last:1"))]
    assert labels(tmp_path, *tests) == {"ptlf (tasks all)": 2, "ptlf (tasks last:1)": 1}


def test_nothing_is_said_of_compiling_where_every_step_was_eager(two: list[Path], capsys) -> None:
    for engine in ("eager", "captured"):
        runs = {f.name: [change(f, lambda made, e=engine: made["environment"].update(engine=e))] for f in two}
        show_runs(Console(), runs)
        for said in (html(two), capsys.readouterr().out):
            assert ("compiling" in said) == (engine == "captured")


def test_the_command(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "ptlf against lump" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path}/page.html (2 runs)\n"
    assert main(["report", str(two[0])]) == 0
    assert (two[0] / "report.html").exists()
    assert "report.html (1 run)" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def without_labels(ranks: list[float], untrained: list[float]) -> dict:
    results = made_up.results(tasks=len(ranks)) | {"probes": {}}
    for name, values in {"features": ranks, "untrained_features": untrained}.items():
        entries = enumerate(values, start=1)
        results[name] = [{"task": task, "images": 9, "spread": 0.4, "effective_rank": rank} for task, rank in entries]
    return results


RANKS: list[tuple[list[float], list[float], str]] = [  # after each task, before training, what is told
    ([30.0, 19.0, 5.0], [8.0, 8.0, 8.0], "from 30 after task 1 to 5 after task 3: a sign that they collapse"),
    ([9.0, 9.0, 9.0], [10.0, 10.0, 20.0], "from 20 (random encoder) to 9 after task 3, on the same images"),
    ([30.0, 29.0, 16.0], [20.0, 20.0, 20.0], ""),
    ([9.0], [], ""),  # a record without the untrained encoder's
]


def test_features_that_fall_are_told_but_of_few_images(tmp_path: Path, capsys) -> None:
    for labelled, (ranks, untrained, told) in itertools.product((False, True), RANKS):
        results = without_labels(ranks, untrained)
        results["probes"] = made_up.results(tasks=len(ranks))["probes"] if labelled else {}
        text = page_of(tmp_path, [results], GALLERY)
        show_results(Console(width=200), results, "run")
        for shown in (text, capsys.readouterr().out):
            assert ("the effective rank of the features fell" in shown) == bool(told), ranks
            assert told in shown and "the spread of the features fell" not in shown, ranks
    results = without_labels([30.0, 29.0, 3.0], [8.0, 8.0, 2.0])
    for entry in (*results["features"][:2], *results["untrained_features"][:2]):
        entry["images"] = 80
    assert "a sign that they collapse" not in page_of(tmp_path, [results])
    results["features"][1]["effective_rank"] = 5.0
    assert "fell from 30 after task 1 to 5 after task 2: a sign that they collapse" in page_of(tmp_path, [results])


def test_every_figure_of_the_features_names_its_measure_where_rows_are_stacked(tmp_path: Path) -> None:
    text = page_of(tmp_path, [without_labels([5.0, 6.0], [7.0, 8.0])])
    (table,) = re.findall(r'<table class="features">.*?</table>', text)
    names = [f"{title}, {when}" for title in FEATURES.values() for when in ("random encoder", "after the task")]
    assert re.findall(r'data-label="([^"]+)"', table) == 2 * names
    assert re.findall(r"<td[^>]*>([^<]+)", table) == ["7", "5", "0.4", "0.4", "8", "6", "0.4", "0.4"]
