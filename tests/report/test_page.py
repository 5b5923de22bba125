"""The page: its numbers are those of results.json, damage stays in its place, and it needs nothing but itself."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path

import made_up
import pytest
from rich.console import Console
from scipy import stats

from ptlf.cli import main
from ptlf.commands.train import with_others
from ptlf.core.errors import UserError
from ptlf.evaluation import summary
from ptlf.methods import METHODS
from ptlf.report.figures.lines import features_by_task, freeze_events, mean_line
from ptlf.report.measures import MEANS
from ptlf.report.page import page
from ptlf.report.runs import Group, RunRecord, read_comparison, unsteady
from ptlf.report.tables import show_results, show_runs
from ptlf.run.recipes import VARIANTS
from ptlf.run.results import STEADY, epoch_lines, to_columns

pytestmark = pytest.mark.usefixtures("no_pictures")

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAMAAAABCAIAAACUgoPjAAAAEklEQVR4nGOM6jnBwMDAwMAAAA0WAbBJCw2IAAAAAElFTkSuQmCC"
)
GALLERY = {
    "groups": ["0, 1", "2, 3", "4, 5"],
    "labels": ["zero", "one"],
    "sprite": {"image": PIXEL, "size": 1, "columns": 3, "width": 3, "height": 1},
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


def by_label(root: Path) -> dict[str, Group]:
    return {group.label: group for group in read_comparison([root]).groups}


def section(text: str, name: str) -> str:
    return text[text.index(f'<section id="{name}">') :].split("</section>")[0]


def look_up(results: dict, path: str) -> float:
    value = results
    for key in path.split("."):
        value = value[key]
    return value  # type: ignore[return-value]


def mean_after_the_first_task(results: dict, key: str) -> float:
    return statistics.fmean(line[key] for line in epoch_lines(results) if line["task"] > 1)


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
            kept = measure == "cost.later_kept_bytes"
            recorded = measure.replace("steady_", "")  # nothing was compiled
            assert value == (mean_after_the_first_task(results, "kept_bytes") if kept else look_up(results, recorded))
            unit = {"later_kept_bytes": 2**20, "backward_flops": 1e12}.get(measure.split(".")[-1], 1)
            digits = len(words.split(".")[-1])
            assert float(words.replace(",", "").replace("−", "-")) == pytest.approx(
                value / unit, abs=0.51 * 10**-digits
            )


def test_many_probes_take_several_tables(tmp_path: Path) -> None:
    results = made_up.results()
    for probe in ("linear_task", "linear", "ridge"):
        results["probes"][probe] = results["probes"]["knn_task"]
    text = html([made_up.write(tmp_path / "run", results)])
    assert text.count('<table class="answer">') == 2
    (cells,) = rows(text).values()
    assert len(cells) == 13


def test_costs_are_relative_to_lump(two: list[Path]) -> None:
    costs = [json.loads((folder / "results.json").read_text())["cost"] for folder in two]
    ratio = f"<b>{costs[1]['learning_seconds'] / costs[0]['learning_seconds']:.2f}×</b>"
    inverse = f"<b>{costs[0]['learning_seconds'] / costs[1]['learning_seconds']:.2f}×</b>"
    for text, expected in ((html(two[::-1]), ratio), (html(two, "ptlf"), inverse)):  # whatever the order
        assert f": training time without compiling {expected}" in " ".join(text.split())
        assert f" {expected}</span>" in text
    with pytest.raises(UserError, match="unknown baseline 'lumb'; did you mean 'lump'"):
        html(two, "lumb")


def test_seconds_and_ratios_leave_the_wait_for_the_compiler_out(tmp_path: Path) -> None:
    """In headline and table, with 60 s more in LUMP's first epoch and with none; the page says so. A run
    alone has its whole seconds."""
    pages = []
    for wait in (0.0, 60.0):
        lump, ptlf = made_up.pair()
        runs = {"lump": made_up.wait_for_compiler(lump, wait), "ptlf": ptlf}
        folders = [made_up.write(tmp_path / f"{wait}" / name, run) for name, run in runs.items()]
        pages.append(" ".join(html(folders).split()))
    for text in pages:
        assert rows(text)["lump"]["cost.steady_learning_seconds"] == (pytest.approx(100.0), "100.0")
        assert "training time without compiling <b>0.25×</b> (one seed)" in text
        assert re.search(r'data-measure="cost.steady_learning_seconds" data-value="25.0"><span>25.0 <b>0.25×</b>', text)
        assert f" Without compiling: {STEADY}." in unescape(text)
    (alone,) = rows(html([folders[0]])).values()
    assert alone["cost.learning_seconds"] == (160.0, "160.0")
    assert "compiling" not in html([folders[0]])


def test_seconds_of_different_commits_are_marked(tmp_path: Path) -> None:
    """In headline, table and differences by seed, for the run of another commit only, and explained."""
    for method, commit in {"lump": "a", "si": "a", "ptlf": "b"}.items():
        for seed in (0, 1):
            made_up.write(tmp_path / f"{method}-{seed}", made_up.results(f"digits/simsiam/{method}", seed=seed))
            path = tmp_path / f"{method}-{seed}" / "results.json"
            path.write_text(path.read_text().replace("c0ffee", commit))
    text = " ".join(html([tmp_path]).split())
    cells = re.findall(r'data-measure="([^"]+)"[^>]*><span>(?:(?!</td>).)*?<b>[^<]*×(†?)</b>', section(text, "answer"))
    assert [measure for measure, mark in cells if mark] == ["cost.steady_learning_seconds"]
    headline = text.split('<ul class="headline">')[1].split("</ul>")[0]
    assert re.findall(r"([a-z ]+) <b>[^<]*×†</b>", headline) == [" training time without compiling"]
    differences = text.split('<table class="paired">')[1].split("</table>")[0]
    assert re.findall(r'data-label="(\w+)">[^<]*†</td>', differences) == ["ptlf"]
    assert text.count("† runs of different commits; compare with care.") == 4
    assert "†" not in html([tmp_path / "lump-0", tmp_path / "si-0"])


def test_the_least_cost_of_many_runs_is_relative_to_lump(tmp_path: Path) -> None:
    lump, ptlf = made_up.pair()
    others = [made_up.results(f"digits/simsiam/{method}") | {"cost": lump["cost"]} for method in ("si", "der")]
    folders = [made_up.write(tmp_path / str(number), run) for number, run in enumerate((lump, ptlf, *others))]
    least = re.findall(r"<li>Least (.*?): .*?, <b>.*?</b> \((.*?)\)</li>", " ".join(html(folders).split()))
    kept = [mean_after_the_first_task(run, "kept_bytes") for run in (lump, ptlf)]
    relative = ["0.25×, one seed", f"{kept[1] / kept[0]:.2f}×", "0.50×"]
    assert [times for title, times in least if title != "forgetting"] == relative


@pytest.mark.parametrize("others", [(), ("si", "der")])
def test_bytes_are_means_after_the_first_task_and_the_peak_is_explained(tmp_path: Path, others: tuple) -> None:
    """What is shown as a result is no state of one epoch."""
    lump, ptlf = made_up.pair()
    why = "The peak of a whole run is that of its first epochs, with nothing frozen yet: freezing does not lower it."
    runs = {"lump": made_up.on_gpu(lump, 100, 90), "ptlf": made_up.on_gpu(ptlf, 100, 63)}
    ptlf["cost"]["per_epoch"]["kept_bytes"][-1] = ptlf["cost"]["kept_bytes"] = 2**20  # the last epoch alone
    runs |= {method: made_up.results(f"digits/simsiam/{method}") for method in others}
    for name, run in runs.items():
        made_up.write(tmp_path / name, run)
    text = " ".join(html([tmp_path]).split())
    assert "last epoch" not in text and "last peak" not in text
    cells = {measure.split(".")[-1]: words for measure, (_, words) in rows(text)["ptlf"].items()}
    assert (cells["later_kept_bytes"], cells["later_peak_memory_bytes"]) == ("44.1", "63")  # 48 in 11 of 12 epochs
    assert f"Means of bytes: {MEANS}." in text
    assert text.count(why) == (1 if others else 2)  # below the table, and in the headline beside the run's peak
    if not others:
        assert "peak GPU memory, whole run <b>1.00×</b>" in text
    assert why not in " ".join(html([tmp_path / "lump"]).split())
    ptlf["cost"]["per_epoch"]["frozen"][0] = 1  # a memory of given images lets the first task freeze, too
    assert why not in " ".join(html([made_up.write(tmp_path / "frozen" / "at first", ptlf)]).split())


def joint() -> dict:
    """All tasks at once, better and cheaper than any other run."""
    made = made_up.results("digits/simsiam/multitask")
    made["tasks"] = [", ".join(made["tasks"])]
    for values in made["probes"].values():
        values |= summary(values["matrix"][-1:]) | {"accuracy": 99.99}
    made["cost"]["learning_seconds"] = 1e-3
    return made


@pytest.mark.parametrize("others", [("lump",), ("lump", "si", "der")])
def test_joint_training_is_a_bound_and_wins_nothing(tmp_path: Path, others: tuple[str, ...]) -> None:
    for method in others:
        made_up.write(tmp_path / method, made_up.results(f"digits/simsiam/{method}"))
    made_up.write(tmp_path / "joint", joint())
    text = " ".join(
        re.sub("<[^>]*>", "", re.findall('<ul class="headline">.*?</ul>', html([tmp_path]), re.S)[0]).split()
    )
    if len(others) == 1:
        assert "multitask gets 99.99 % right" in text
        assert "It learned all tasks at once: a bound for continual methods, not one of them." in text
    else:
        assert text.count("multitask") == 1
        assert "multitask learned all tasks at once, a bound for continual methods and not one of them: 99.99 %" in text
        assert "Highest accuracy" in text


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ({"lump": 100.0, "si": 99.0, "der": 150.0, "ptlf": 120.0}, ""),  # 1 % below the baseline's
        ({"lump": 100.0, "si": 97.0, "der": 150.0, "ptlf": 96.5}, "ptlf"),
        ({"lump": 100.0, "si": 101.0, "der": 150.0, "ptlf": 120.0}, ""),  # the next one has 1 % more
        ({"lump": 100.0, "si": 103.0, "der": 150.0, "ptlf": 120.0}, "lump"),
        ({"finetune": 99.0, "si": 100.0, "der": 150.0}, ""),  # without a baseline
        ({"finetune": 97.0, "si": 100.0, "der": 150.0}, "finetune"),
    ],
)
def test_costs_that_differ_by_noise_have_no_least(tmp_path: Path, seconds: dict[str, float], told: str) -> None:
    for method, value in seconds.items():
        made = made_up.results(f"digits/simsiam/{method}")
        made["cost"]["learning_seconds"] = value
        made_up.write(tmp_path / method, made)
    found = re.findall(r"<li>Least training time.*?: <b[^>]*>(\w+)</b>", html([tmp_path]))
    assert found == [told] * bool(told)


def test_seeds_become_mean_and_interval(tmp_path: Path) -> None:
    made = [made_up.results(seed=seed) for seed in (0, 1, 2)]
    folders = [made_up.write(tmp_path / str(seed), results) for seed, results in enumerate(made)]
    accuracies = [results["probes"]["knn_task"]["accuracy"] for results in made]
    text = html(folders)
    (cells,) = rows(text).values()
    value, words = cells["probes.knn_task.accuracy"]
    assert value == pytest.approx(statistics.fmean(accuracies))
    half = stats.t.ppf(0.975, 2) * stats.sem(accuracies)
    assert words == f"{statistics.fmean(accuracies):.2f} ± {half:.2f}"
    assert "±: half the width of the 95 % t interval over the seeds." in text
    assert "standard deviation over the seeds" not in text
    assert "3 seeds" in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stream__classes": 4}, "their streams differ (classes: 4 and None)"),
        ({"tasks": 4}, "their eval_splits differ"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, change: dict, reason: str) -> None:
    folders = [
        made_up.write(tmp_path / "a", made_up.results()),
        made_up.write(tmp_path / "b", made_up.results(**change)),
    ]
    with pytest.raises(UserError, match=re.escape(reason)):
        read_comparison(folders)


def test_runs_of_different_epochs_stand_side_by_side_and_the_page_says_so(tmp_path: Path) -> None:
    words = "trained for 4 or 6 epochs of a task"
    made_up.write(tmp_path / "a", made_up.results("digits/simsiam/lump"))
    made_up.write(tmp_path / "b", made_up.results("digits/simsiam/ptlf"))
    assert words not in html([tmp_path])
    made_up.write(tmp_path / "c", made_up.results("digits/simsiam/ptlf", training__epochs=4))
    text = html([tmp_path])
    assert words in text and "4 or 6 epochs each" in text
    groups = read_comparison([tmp_path]).groups
    assert [group.label for group in groups] == ["lump", "ptlf (epochs 6)", "ptlf (epochs 4)"]


def test_the_epochs_of_a_shorter_run_stand_in_their_task(tmp_path: Path) -> None:
    for epochs in (4, 6):
        made_up.write(tmp_path / f"{epochs}", made_up.results(training__epochs=epochs))
    shorter, _ = read_comparison([tmp_path]).groups
    places = list(mean_line(shorter, lambda line: line["seconds"], 6))
    assert {(place - 1) // 6 + 1 for place in places} == {1, 2, 3} and places[:5] == [1, 2, 3, 4, 7]
    events = [6 * (one["task"] - 1) + event["epoch"] for one in shorter.first["freezing"] for event in one["events"]]
    assert freeze_events(shorter, 6) == events


@pytest.mark.parametrize(
    ("names", "sums", "reason"),
    [
        (("cats", "dogs"), ("1", "2"), "number 1 of those that arrived: cats and dogs"),
        (("day", "day"), ("1", "2"), "number 1 of those that arrived: day has others in each"),
        (("cats", "dogs"), (None, "2"), "number 1 of those that arrived: cats and dogs"),
        (("cats", "dogs"), ("1", "1"), ""),
        (("day", "day"), (None, "2"), ""),
    ],
)
def test_tasks_of_different_images_are_refused(tmp_path: Path, names: tuple, sums: tuple, reason: str) -> None:
    for folder, name, checksum in zip("ba", names, sums, strict=True):
        made = made_up.results(seed=ord(folder), tasks=2) | {"tasks": ["first", name], "arrived": 1}
        made |= {"arrived_sha256": [checksum]} if checksum else {}
        made_up.write(tmp_path / folder, made)
    folders = [tmp_path / "a", tmp_path / "b"]
    if reason:
        with pytest.raises(UserError, match=re.escape(f"their tasks are of different images ({reason})")):
            read_comparison(folders)
    else:
        assert len(read_comparison(folders).groups) == 1


def test_other_probe_settings_are_refused(two: list[Path]) -> None:
    results = json.loads((two[1] / "results.json").read_text())
    results["probes"]["knn_class"]["settings"]["k"] = 5
    (two[1] / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match=r"their probes differ \(knn_class.k: 5 and 20\)"):
        read_comparison(two)


DAMAGED: dict[str, Callable[[dict], object]] = {
    "no probes": lambda results: results.pop("probes"),
    "words in the matrix": lambda results: results["probes"]["knn_task"]["matrix"][0].__setitem__(0, "good"),
    "short row": lambda results: results["probes"]["knn_task"]["matrix"][1].pop(),
    "another schema": lambda results: results.__setitem__("schema", 99),
    "an epoch without seconds": lambda results: results["cost"]["per_epoch"]["seconds"].pop(),
    "no seconds": lambda results: results["cost"]["per_epoch"].pop("seconds"),
    "no status": lambda results: results.pop("status"),
}


def test_a_damaged_run_is_named_and_the_rest_is_there(two: list[Path], tmp_path: Path) -> None:
    texts = {"cut off": json.dumps(made_up.results())[:500], "a list": "[]"}
    for how, change in DAMAGED.items():
        results = made_up.results(freezing__final=0.6)
        change(results)
        texts[how] = json.dumps(results)
    bad = made_up.write(tmp_path / "bad", made_up.results())
    for how, text in texts.items():
        (bad / "results.json").write_text(text)
        shown = html([*two, bad])
        (problem,) = re.findall(r'<p class="problem">(.*?)</p>', shown)
        assert problem.startswith("<b>bad</b> is left out: ") and str(bad / "results.json") in unescape(problem), how
        assert set(rows(shown)) == {"lump", "ptlf"}, how
        with pytest.raises(UserError, match=r"no run to report on: .*bad/results\.json"):
            read_comparison([bad])


def test_an_unfinished_run_says_how_far_it_got(two: list[Path], tmp_path: Path) -> None:
    results = made_up.results("digits/simsiam/ptlf", seed=1)
    results["status"] = "running"
    results["cost"]["per_epoch"] = to_columns(epoch_lines(results)[:6])
    results["freezing"] = []
    for values in results["probes"].values():
        values |= {
            "matrix": values["matrix"][:1],
            "forgetting": None,
            "accuracy_by_task": [80.0],
            "forgetting_by_task": [None],
        }
    half = made_up.write(tmp_path / "half", results)
    text = html([*two, half])
    assert "unfinished: 6 of 18 epochs" in text
    assert len(rows(text)) == 3  # no mean with the finished seed


def test_a_run_of_which_nothing_is_known_yet(tmp_path: Path) -> None:
    results = made_up.results()
    results |= {"status": "running", "freezing": []}
    results["cost"] |= {
        "per_epoch": {},
        "kept_bytes": None,
        "learning_seconds": 0.0,
        "train_seconds": 0.0,
        "backward_flops": 0,
    }
    for values in results["probes"].values():
        values |= {"matrix": [], "accuracy": None, "forgetting": None, "accuracy_by_task": [], "forgetting_by_task": []}
    text = html([made_up.write(tmp_path / "new", results)])
    assert "No epoch has been written down yet" in text


def test_what_is_missing_is_named_with_what_would_fill_it(tmp_path: Path) -> None:
    results = made_up.results("digits/simsiam/lump")
    results["probes"] = {}
    text = html([made_up.write(tmp_path / "run", results)])
    assert "Not evaluated: digits/simsiam/lump. That needs labelled test images" in section(text, "accuracy")
    assert "<code>--freezing.policy correlation</code>" in section(text, "correlation")
    assert "No unit froze in digits/simsiam/lump (<code>freezing.policy none</code>)." in section(text, "freezing")
    assert "no gallery.json beside" in section(text, "gallery")


def test_intervals_are_explained_only_where_the_number_of_test_images_is_known(tmp_path: Path) -> None:
    changes: list[dict] = [{"test_images": [66, 66, 66]}, {}, {"probes": {}}]
    folders = [made_up.write(tmp_path / str(n), made_up.results() | change) for n, change in enumerate(changes)]
    assert ["95 % interval (Wilson)" in html([folder]) for folder in folders] == [True, False, False]


def test_what_older_records_lack_is_said_once_and_not_drawn(tmp_path: Path) -> None:
    """One record with the number of test images and the features, two without."""
    for method in ("lump", "si", "der"):
        made = made_up.results(f"digits/simsiam/{method}")
        if method == "der":
            features = [{"task": task, "spread": 0.4, "effective_rank": 9.0} for task in (1, 2, 3)]
            made |= {"test_images": [66, 66, 66], "features": features}
        made_up.write(tmp_path / method, made)
    text = " ".join(unescape(html([tmp_path])).split())
    assert text.count("do not hold it") == 2
    assert "number of test images alone (records of older versions do not hold it), and" in text
    learning = section(text, "learning")
    assert "No effective rank and no spread of lump, si: records of older versions do not hold it." in learning
    found = {name: features_by_task(group, "spread") for name, group in by_label(tmp_path).items()}
    assert {name: bool(series) for name, series in found.items()} == {"lump": False, "si": False, "der": True}
    made = html([tmp_path / "der"])
    assert "do not hold it" not in made
    assert section(text, "gallery").count("No pictures of ") == 1
    assert "No pictures of lump, der, si: there is no gallery.json" in section(text, "gallery")


@pytest.mark.parametrize(("seeds", "dot"), [
    ((1, 1), "one run"), ((2, 2), "the mean over seeds"), ((2, 1), "one run or a mean over seeds")
])  # fmt: skip
def test_a_dot_is_a_run_or_a_mean(tmp_path: Path, seeds: tuple[int, int], dot: str) -> None:
    for method, count in zip(("lump", "ptlf"), seeds, strict=True):
        for seed in range(count):
            made_up.write(tmp_path / f"{method}-{seed}", made_up.results(f"digits/simsiam/{method}", seed=seed))
    assert f"Each dot is {dot}: " in html([tmp_path])


def test_a_k_that_grows_with_the_tasks_is_said_where_it_matters(tmp_path: Path) -> None:
    results = made_up.results()
    results["probes"]["knn_task"]["settings"]["k"] = "min(200, tasks seen)"
    part = section(html([made_up.write(tmp_path / "run", results)]), "accuracy")
    captions = dict(re.findall(r"<h3>([^<]+)</h3><p>([^<]+)</p>", part))
    growing = {title for title, how in captions.items() if "number of tasks seen so far" in how}
    assert growing == {title for title in captions if title.endswith("kNN within the task")}
    assert len(growing) == 3
    assert captions["Accuracy matrix, kNN among all classes"].endswith(" k = 20.")


def test_the_k_of_all_runs_is_said_once(tmp_path: Path) -> None:
    """A run of three tasks, one of all at once, and a record of an older version."""
    runs = (("lump", [1, 2, 3]), ("multitask", [3]), ("si", []))
    for method, used in runs:
        results = made_up.results(f"digits/simsiam/{method}")
        results["probes"]["knn_task"]["settings"]["k"] = "min(200, tasks seen)"
        results["probes"]["knn_task"] |= {"used_by_task": [{"k": k} for k in used]} if used else {}
        made_up.write(tmp_path / method, results)
    captions = dict(re.findall(r"<h3>([^<]+)</h3><p>([^<]+)</p>", section(html([tmp_path]), "accuracy")))
    how = captions["Accuracy matrix, kNN within the task"]
    assert how.endswith(" k = 1 to 3 (number of tasks seen so far, at most 200).")
    assert how.count("k = ") == 1


def test_lines_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    part = section(html([made_up.write(tmp_path / "one", made_up.results(tasks=1))]), "accuracy")
    assert "No line of forgetting, kNN within the task: it needs forgetting_by_task" in part
    assert "No line of accuracy" not in part
    results = made_up.results()
    del results["probes"]["knn_task"]["accuracy_by_task"]
    part = section(html([made_up.write(tmp_path / "old", results)]), "accuracy")
    assert "No line of accuracy, kNN within the task" in part


def test_overlap_between_epochs_needs_ratios_by_epoch(two: list[Path], tmp_path: Path) -> None:
    assert 'id="overlap-epochs"' not in html(two)
    again = made_up.write(tmp_path / "again", made_up.results(freezing__update="per-epoch"))
    assert 'id="overlap-epochs"' in html([*two, again])


def test_a_damaged_gallery_costs_only_its_part(two: list[Path]) -> None:
    assert html(two).count('id="neighbours-') == 2
    (two[0] / "gallery.json").write_text('{"sprite": {}}')
    (two[1] / "gallery.json").write_text(json.dumps(GALLERY).replace(PIXEL, "https://example.org/a.png"))
    text = html(two)
    assert section(text, "gallery").count("is damaged") == 2
    assert "example.org" not in text
    assert "Accuracy matrix" in text


@pytest.mark.parametrize("moment", ["before", "after"])
def test_without_one_of_its_maps_a_run_shows_none(two: list[Path], moment: str) -> None:
    look = {**GALLERY["looks"][moment], "points": []}
    (two[0] / "gallery.json").write_text(json.dumps({**GALLERY, "looks": {**GALLERY["looks"], moment: look}}))
    text = html(two)
    assert (text.count('id="neighbours-'), text.count('id="features-')) == (2, 1)


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
    text = html([made_up.write(tmp_path / "run", results, GALLERY)])
    assert wicked not in text
    assert escape(wicked) in text
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_the_command_that_repeats_it(two: list[Path]) -> None:
    text = section(html(two), "details")
    for folder in two:
        assert f"ptlf train --config {folder}/config.yaml --out again" in text
    assert text.count("c0ffee") == 2
    assert "freezing.policy" in text.split("<details>")[0]


def test_eight_runs_of_twenty_tasks_stay_small() -> None:
    text = made_up.page_of_eight()
    assert len(text.encode()) < 5e6
    assert len(rows(text)) == 8


def test_seeds_are_grouped_where_settings_that_change_no_result_differ(tmp_path: Path) -> None:
    changes: list[dict] = [{}, {"checkpoint__keep": 1}, {"evaluation__batch": 64, "evaluation__gallery": False}]
    for seed, change in enumerate(changes):
        made_up.write(tmp_path / f"{seed}", made_up.results(seed=seed, **change))
    made_up.write(tmp_path / "3", made_up.results(seed=3, memory__size=9))
    groups = {len(group.runs): group.label for group in read_comparison([tmp_path]).groups}
    assert groups == {3: "ptlf (size 64)", 1: "ptlf (size 9)"}


def test_runs_are_named_by_settings_that_count_in_full_where_two_end_alike(tmp_path: Path) -> None:
    changes: dict[str, dict] = {"a": {}, "b": {"evaluation__batch": 64}}
    for name, change in changes.items():
        made_up.write(tmp_path / "folders" / name, made_up.results(**change))
    assert {group.label for group in read_comparison([tmp_path / "folders"]).groups} == {"ptlf (a)", "ptlf (b)"}
    for name, size in {"a": 9, "b": 8}.items():
        made_up.write(tmp_path / "sizes" / name, made_up.results(memory__size=size, views__size=size))
    labels = {group.label for group in read_comparison([tmp_path / "sizes"]).groups}
    assert labels == {f"ptlf (views.size {size}, memory.size {size})" for size in (8, 9)}


def test_the_page_of_a_sweep_shows_what_earlier_ones_finished_there_if_it_compares(tmp_path: Path) -> None:
    settings: dict[str, dict] = {"lump": {}, "ptlf": {}, "si": {"stream__groups": [[0, 1]]}, "der": {}}
    for name, change in settings.items():
        made_up.write(tmp_path / name, made_up.results(f"digits/simsiam/{name}", **change))
    (tmp_path / "der" / "results.json").write_text("{")
    lump, ptlf = tmp_path / "lump", tmp_path / "ptlf"
    assert with_others([lump], tmp_path) == [lump, ptlf] and with_others([ptlf], tmp_path) == [ptlf, lump]


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_nothing_is_said_of_compiling_where_every_step_was_eager(two: list[Path], capsys, engine: str) -> None:
    runs = {}
    for folder in two:
        made = json.loads((folder / "results.json").read_text())
        made["environment"]["engine"] = engine
        (folder / "results.json").write_text(json.dumps(made))
        runs[folder.name] = [made]
    show_runs(Console(), runs)
    for said in (html(two), capsys.readouterr().out):
        assert ("compiling" in said) == (engine == "captured")


def test_the_title_counts_configurations_where_there_are_seeds(tmp_path: Path) -> None:
    for method in ("lump", "finetune", "si", "ptlf"):
        made_up.write(tmp_path / method, made_up.results(f"digits/simsiam/{method}", seed=0))
    assert "<h1>3 runs against lump" in html([tmp_path])
    made_up.write(tmp_path / "again", made_up.results("digits/simsiam/si", seed=1))
    assert "<h1>3 configurations against lump" in html([tmp_path])


def test_seeds_that_were_tested_on_other_tasks_stand_apart(tmp_path: Path) -> None:
    for seed, tasks in enumerate(("all", "all", "last:1")):
        made_up.write(tmp_path / f"{seed}", made_up.results(seed=seed, evaluation__tasks=tasks))
    groups = {len(group.runs): group.label for group in read_comparison([tmp_path]).groups}
    assert groups == {2: "ptlf (tasks all)", 1: "ptlf (tasks last:1)"}


def test_the_same_seed_again_is_no_further_seed(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        made_up.write(tmp_path / folder, made_up.results("digits/simsiam/lump", seed=0))
    assert [len(group.runs) for group in read_comparison([tmp_path]).groups] == [1, 1]


def test_seconds_of_a_busy_machine_are_doubted(two: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "machine busy" not in html(two)
    made = json.loads((two[0] / "results.json").read_text())
    seconds = made["cost"]["per_epoch"]["seconds"]
    seconds[3] += sum(seconds)
    (two[0] / "results.json").write_text(json.dumps(made))
    assert unsteady(RunRecord(Path(), made)) == pytest.approx(0.5, abs=0.06)
    assert "seconds lie above the median of like epochs" in html(two)
    show_runs(Console(), {"one": [made]})
    assert "one: 5" in capsys.readouterr().out


def test_waiting_for_the_compiler_is_no_busy_machine() -> None:
    """80 s in the first epoch, of about 100 s in all."""
    made, waiting = made_up.results(), made_up.wait_for_compiler(made_up.results(), 80.0)
    assert unsteady(RunRecord(Path(), waiting)) == pytest.approx(unsteady(RunRecord(Path(), made)))


def test_seconds_of_different_machines_are_doubted(two: list[Path]) -> None:
    assert "different machines" not in html(two)
    for folder, machine in zip(two, ("one", "another"), strict=True):
        made = json.loads((folder / "results.json").read_text())
        made["environment"]["device_name"] = machine
        (folder / "results.json").write_text(json.dumps(made))
    assert "different machines (another, one)" in html(two)


def test_the_command(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "ptlf against lump" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path}/page.html (2 runs)\n"
    assert main(["report", str(two[0])]) == 0
    assert (two[0] / "report.html").exists()
    assert "report.html (1 run)" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_runs_are_called_what_their_recipe_is_called(tmp_path: Path) -> None:
    for name in (*METHODS, *VARIANTS):
        usual = VARIANTS.get(name, {}).get("policy", "none")
        for policy in ("none", "correlation", "cost_aware"):
            recipe = f"digits/{'supervised' if name == 'layerwise' else 'simsiam'}/{name}"
            made = made_up.results(recipe, tasks=1, freezing__policy=policy)
            changed = ", no freezing" if policy == "none" else f" + {policy} freezing"
            assert made["name"] == (recipe if policy == usual else recipe + changed)


def test_ratios_that_nobody_needed_are_explained(two: list[Path], tmp_path: Path) -> None:
    words = "A ratio is missing where it was not needed"
    assert words not in html(two)
    partial = made_up.results("digits/simsiam/ptlf-cost")
    for entry in partial["freezing"]:
        entry["ratios"] = {unit: entry["ratios"][unit] for unit in entry["order"]}
    assert words in section(html([*two, made_up.write(tmp_path / "cost", partial)]), "correlation")


def without_labels(ranks: list[float], untrained: list[float]) -> dict:
    results = made_up.results(tasks=len(ranks))
    results["probes"] = {}
    for name, values in {"features": ranks, "untrained_features": untrained}.items():
        entries = enumerate(values, start=1)
        results[name] = [{"task": task, "images": 9, "spread": 0.4, "effective_rank": rank} for task, rank in entries]
    return results


@pytest.mark.parametrize(
    ("ranks", "untrained", "told"),
    [
        ([30.0, 19.0, 5.0], [8.0, 8.0, 8.0], "from 30 after task 1 to 5 after task 3: a sign that they collapse"),
        ([9.0, 9.0, 9.0], [10.0, 10.0, 20.0], "from 20 (random encoder) to 9 after task 3, on the same images"),
        ([30.0, 29.0, 16.0], [20.0, 20.0, 20.0], ""),
        ([9.0], [], ""),  # a record without the untrained encoder's
    ],
)
@pytest.mark.parametrize("labels", [False, True])
def test_features_that_fall_are_told(tmp_path: Path, capsys, ranks, untrained, told: str, labels: bool) -> None:
    results = without_labels(ranks, untrained)
    results["probes"] = made_up.results(tasks=len(ranks))["probes"] if labels else {}
    folder = made_up.write(tmp_path / "run", results, GALLERY)
    text = html([folder])
    show_results(Console(width=200), json.loads((folder / "results.json").read_text()), folder)
    for shown in (text, capsys.readouterr().out):
        assert ("the effective rank of the features fell" in shown) == bool(told)
        assert told in shown
        assert "the spread of the features fell" not in shown


def test_a_task_of_few_images_is_no_collapse(tmp_path: Path) -> None:
    """Features of five images span at most four directions, whatever the encoder."""
    results = without_labels([30.0, 29.0, 3.0], [8.0, 8.0, 2.0])
    for name in ("features", "untrained_features"):
        results[name][0]["images"] = results[name][1]["images"] = 80
    assert "a sign that they collapse" not in html([made_up.write(tmp_path / "small", results)])
    results["features"][1]["effective_rank"] = 5.0
    text = html([made_up.write(tmp_path / "fallen", results)])
    assert "fell from 30 after task 1 to 5 after task 2: a sign that they collapse" in text


def test_every_figure_of_the_features_names_its_measure_where_rows_are_stacked(tmp_path: Path) -> None:
    text = html([made_up.write(tmp_path / "run", without_labels([5.0, 6.0], [7.0, 8.0]))])
    (table,) = re.findall(r'<table class="features">.*?</table>', text, re.S)
    names = [
        f"{title}, {when}" for title in ("effective rank", "spread") for when in ("random encoder", "after the task")
    ]
    assert re.findall(r'data-label="([^"]+)"', table) == 2 * names
    assert re.findall(r"<th>([^<]+)</th>", table) == names
    assert re.findall(r"<td[^>]*>([^<]+)", table) == ["7", "5", "0.4", "0.4", "8", "6", "0.4", "0.4"]
