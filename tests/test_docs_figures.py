"""Figures in the documents are those of the records in results/."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from paper_runs import paper_results

from benchmarks.evidence import table as evidence_table
from benchmarks.pretrained import gain
from benchmarks.pretrained import table as given_table
from benchmarks.pretrained_picture import points
from ptlf.report.intervals import interval
from ptlf.report.runs import LATER_KEPT, RunRecord
from reproduction.page import DIFFERENCES, differences, figure
from reproduction.tables import METHODS, OBJECTIVES, TABLES

ROOT = Path(__file__).parent.parent
GIVEN = ROOT / "results" / "pretrained"
NOTHING = ("nothing", "nothing_vicreg")
README, RECIPES, SAVINGS, PRETRAINED, BENCHMARKS, RESULTS = (
    ROOT / name
    for name in (
        "README.md",
        "docs/recipes.md",
        "docs/savings.md",
        "docs/pretrained.md",
        "benchmarks/README.md",
        "docs/results.md",
    )
)
FULL = [f"split-cifar10/simsiam/{method}" for method in ("lump", "ptlf", "ptlf-cost", "ptlf-deep")]
ROWS = dict(zip(FULL, ("LUMP, here", "PTLF, here", "(`ptlf-cost`)", "(`ptlf-deep`"), strict=True))
MEASURED = {"simsiam": "| SimSiam | seeds |", "barlow_twins": "| Barlow Twins | seeds |"}  # heads of tables
SCORES = [("knn_task", "accuracy"), ("knn_task", "forgetting"), ("knn_class", "accuracy")]


VERSIONS = ROOT / "docs" / "versions.md"


def table(page: Path, head: str) -> list[list[str]]:
    """The cells of the page's table whose first line holds `head`."""
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    (found,) = [found for found in tables if head in found.splitlines()[0]]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()[2:]]


def table_rows(page: Path, head: str) -> dict[str, list[str]]:
    """By the first cell."""
    return {row[0]: row[1:] for row in table(page, head)}


def row_with(page: Path, head: str, words: str) -> list[str]:
    (cells,) = [cells for name, cells in table_rows(page, head).items() if words in name]
    return cells


def says(page: Path, *sentences: str) -> None:
    text = " ".join(page.read_text().split())
    for sentence in sentences:
        assert sentence in text, f"{page.name} does not say {sentence!r}"


def numbers(words: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", words)


def kept(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((ROOT / "results").glob(f"{pattern}/results.json"))]


def bench(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "results" / "bench" / name).read_text())["rows"]


def means(runs: list[dict[str, Any]]) -> list[str]:
    """Of `SCORES`; empty where there is none."""
    found = [[run["probes"][probe][what] for run in runs] for probe, what in SCORES]
    return ["" if None in values else f"{statistics.fmean(values):.2f}" for values in found]


def test_accuracies_of_the_full_protocol() -> None:
    """Every seed's in benchmarks, their means in recipes."""
    for recipe in FULL:
        seeds = kept(f"{recipe.replace('/', '-')}-seed*")
        for probe, what in [*SCORES, ("knn_class", "forgetting")]:
            values = [run["probes"][probe][what] for run in seeds]
            says(BENCHMARKS, f" {', '.join(f'{value:.2f}' for value in values)} |")
        assert f"{statistics.fmean(values):.1f}" in RECIPES.read_text(), recipe
        assert row_with(RECIPES, "tasks' last epochs", ROWS[recipe])[:3] == means(seeds), recipe
    for method in ("LUMP", "PTLF"):
        cell = TABLES["main"].cell(f"SimSiam, {method}", "Split CIFAR-10")
        wanted = [f"{cell.paper[key]:.2f}" for key in ("accuracy", "forgetting")]
        assert row_with(RECIPES, "tasks' last epochs", f"{method}, the paper")[:2] == wanted


@pytest.mark.parametrize("objective", MEASURED)
def test_the_tables_of_results(objective: str) -> None:
    """Have every method of Split CIFAR-10 that was run, ours beside the paper's."""
    rows = table_rows(RESULTS, MEASURED[objective])
    named = {row: found[1] if (found := re.search(r"`(.*)`", row)) else row.split(" (")[0].lower() for row in rows}
    start = f"split-cifar10-{objective}-"
    folders = (ROOT / "results").glob(f"{start}*-seed*")
    assert set(named.values()) == {folder.name.removeprefix(start)[:-6] for folder in folders}
    base = kept(f"{start}lump-seed*")
    for row, method in named.items():
        runs = kept(f"{start}{method}-seed*")
        cell = TABLES["main"].cell(f"{OBJECTIVES[objective]}, {METHODS[method]}", "Split CIFAR-10")
        paper = [f"{cell.paper[key]:.2f}" if key in cell.paper else "" for key in ("accuracy", "forgetting")]
        accuracy, forgetting, classes = means(runs)
        assert rows[row][:6] == [str(len(runs)), accuracy, paper[0], forgetting, paper[1], classes], row
        costs = [numbers(words) for words in rows[row][6:]]
        if method == "lump":
            assert costs == [[f"{training(runs):.0f}"], [f"{kept_later(runs) / 2**20:.0f}"]]
        elif len(runs) == len(base):
            assert costs == [[f"{of(runs) / of(base):.2f}"] for of in (training, kept_later)], row
            mixed = any(run["commit"] != other["commit"] for run, other in zip(runs, base, strict=True))
            assert ("†" in rows[row][6]) == mixed, row


def test_the_sentences_of_results() -> None:
    """On costs over a whole run, and on `knn_class` with Barlow Twins by seed."""
    table_of_costs, found = TABLES["cost"], paper_results()
    cell = table_of_costs.cell("SimSiam, PTLF", "Split CIFAR-10")
    time, flops = (f"{figure(table_of_costs, cell, measure, found).mean:.2f}x" for measure in ("time", "flops"))
    untrained = [
        statistics.fmean(run["probes"][probe]["untrained_accuracy"] for run in kept("split-cifar10-simsiam-lump-seed*"))
        for probe in ("knn_task", "knn_class")
    ]
    runs = [kept(f"split-cifar10-barlow_twins-{name}-seed[012]") for name in ("ptlf-deep", "lump")]
    pairs = zip(*runs, strict=True)
    (same,) = [training([mine]) / training([base]) for mine, base in pairs if mine["commit"] == base["commit"]]
    lost = differences(found)["Split CIFAR-10, Barlow Twins"]["PTLF"][list(DIFFERENCES).index("knn_class, points")]
    scores = [name.endswith("points") for name in DIFFERENCES]
    rows = [row for table in differences(found).values() for row in table.values()]
    verdicts = [cell.said for row in rows for cell, score in zip(row, scores, strict=True) if score]
    assert lost.said == "worse" and sum(map(bool, verdicts)) == 1
    says(
        RESULTS,
        f"takes {time} of LUMP's time and {flops} of its backward FLOPs",
        f"the paper has {cell.paper['time']:.2f}x and {cell.paper['flops']:.2f}x",
        "A random encoder has {:.1f} and {:.1f} %.".format(*untrained),
        f"with Barlow Twins the one seed at the same commit has {same:.2f}x",
        f"{-lost.both.mean:.2f} points of `knn_class` below LUMP (± {lost.both.half:.2f}, by seed)",
        f"the one interval of {len(verdicts)} that excludes zero",
    )


def recorded_seconds(runs: list[dict[str, Any]]) -> float:
    """Of a whole run, mean over seeds."""
    parts = [f"{part}_seconds" for part in ("learning", "eval", "checkpoint", "measuring")]
    return statistics.fmean(sum(run["cost"].get(part, 0) for part in parts) for run in runs)


def later(runs: list[dict[str, Any]], key: str) -> float:
    """Mean over seeds of the sum over all tasks but the first."""
    return statistics.fmean(sum(task[key] for task in run["cost"]["per_task"][1:]) for run in runs)


def training(runs: list[dict[str, Any]]) -> float:
    return sum(later(runs, f"{part}_seconds") for part in ("train", "correlation", "rebuild"))


def kept_later(runs: list[dict[str, Any]]) -> float:
    """Bytes for backward, mean over the epochs of all tasks but the first, and over seeds."""
    return statistics.fmean(RunRecord(ROOT, run).value(LATER_KEPT) for run in runs)


def test_costs_of_the_full_protocol() -> None:
    """Time, memory and their ratios to LUMP."""
    base = kept(f"{FULL[0].replace('/', '-')}-seed*")
    for recipe in FULL:
        mine = kept(f"{recipe.replace('/', '-')}-seed*")
        seconds, ends, mean = training(mine), later(mine, "kept_bytes"), kept_later(mine)
        if recipe == FULL[0]:
            wanted = [[f"{seconds:.0f}"], [f"{ends / 4 / 2**20:.0f}"], [f"{mean / 2**20:.0f}"]]
        else:
            ratios = ends / later(base, "kept_bytes"), mean / kept_later(base)
            wanted = [[f"{seconds:.0f}", f"{seconds / training(base):.2f}"], *([f"{ratio:.2f}"] for ratio in ratios)]
        cells = row_with(RECIPES, "tasks' last epochs", ROWS[recipe])
        assert [numbers(cells[place]) for place in (3, 5, 6)] == wanted, recipe
        assert numbers(cells[4]) == [f"{recorded_seconds(mine):.0f}"], recipe


def test_every_method_on_few_images() -> None:
    """Of seconds the first epoch counts as the second, where it took longer."""

    def cost(run: dict[str, Any], key: str) -> float:
        return RunRecord(ROOT, run).value(("cost", f"{'steady_' * key.endswith('seconds')}{key}"))

    rows = table_rows(RECIPES, "| steps | total |")
    (base,) = kept("small-table/lump")
    assert set(rows) == {path.name for path in (ROOT / "results" / "small-table").iterdir()}
    for method, cells in rows.items():
        (run,) = kept(f"small-table/{method}")
        probes = run["probes"]
        scores = [probes["knn_task"]["accuracy"], probes["knn_task"]["forgetting"], probes["knn_class"]["accuracy"]]
        costs = ("train_seconds", "learning_seconds", "backward_flops", "kept_bytes")
        wanted = ["-" if score is None else f"{score:.2f}" for score in scores]
        wanted += [f"{cost(run, key) / cost(base, key):.2f}x" for key in costs]
        assert cells == wanted, method


def test_the_example_of_one_machine() -> None:
    """Of `make run`; the random encoder's figures are in the names of the rows."""
    runs = [kept(f"digits/{method}")[0] for method in ("lump", "ptlf")]
    rows = table_rows(ROOT / "docs/start.md", "| LUMP | PTLF |")
    wanted = {
        "`knn_task` accuracy": ("{:.2f}", lambda run: run["probes"]["knn_task"]["accuracy"]),
        "`knn_class` accuracy": ("{:.2f}", lambda run: run["probes"]["knn_class"]["accuracy"]),
        "training time, s": ("{:.1f}", lambda run: run["cost"]["learning_seconds"]),
        "activations saved for backward, last epoch, MiB": ("{:.1f}", lambda run: run["cost"]["kept_bytes"] / 2**20),
        "backward FLOPs, 10^12": ("{:.3f}", lambda run: run["cost"]["backward_flops"] / 1e12),
    }
    for (name, cells), (start, (digits, value)) in zip(rows.items(), wanted.items(), strict=True):
        assert name.startswith(start) and cells == [digits.format(value(run)) for run in runs]
    for probe in ("knn_task", "knn_class"):
        (name,) = [name for name in rows if f"`{probe}`" in name]
        assert f"random encoder: {runs[0]['probes'][probe]['untrained_accuracy']:.2f}" in name


def test_a_step_on_a_cpu() -> None:
    made = {(row["encoder"], row["step"]): row for row in bench("cpu.json")}
    names = list(dict.fromkeys(step for _, step in made))
    networks = ("resnet18", "resnet18-mini")
    cells = [
        [f"{made[each, name]['share']:.2f}" if (each, name) in made else "" for each in networks] for name in names
    ]
    assert table(SAVINGS, "| step on a CPU |") == [[name, *shares] for name, shares in zip(names, cells, strict=True)]
    whole = made["resnet18", "ours, bf16 and channels last"]["step_ms"]
    of = {name: f"{made['resnet18', name]['step_ms'] / whole:.2f}" for name in names if "frozen" in name}
    first, more, middle = of.values()
    says(SAVINGS, f"frozen it takes {first} of that in bf16, with the first 12 {more}, with the middle 8 {middle}.")


def test_bf16_costs_no_accuracy_on_a_cpu() -> None:
    pairs = [[kept(f"bf16/{way}-seed{seed}")[0] for way in ("bf16", "fp32")] for seed in range(5)]
    for low, full in pairs:
        assert (low["environment"]["precision"], full["environment"]["precision"]) == ("bf16", "fp32")
        assert low["seed"] == full["seed"]
    for probe in ("knn_task", "knn_class"):
        low, full = ([run["probes"][probe]["accuracy"] for run in runs] for runs in zip(*pairs, strict=True))
        both = interval([a - b for a, b in zip(low, full, strict=True)])
        says(SAVINGS, f"{both.mean:+.2f} ± {both.half:.2f} points of `{probe}`")


def test_what_freezing_saves() -> None:
    made = bench("freezing-cpu.json")
    keys = ("kept_bytes_ratio", "backward_flops_ratio", "seconds_ratio")
    wanted = [[f"{row[key]:.{digits}f}" for key, digits in zip(keys, (2, 3, 2), strict=True)] for row in made]
    assert [cells[2:] for cells in table(SAVINGS, "| frozen | how |")] == wanted
    plain, ours = (row for row in made if row["frozen"] == "middle 8")
    says(
        README,
        f"middle 8 of ResNet-18's 20 layers frozen, {ours['kept_bytes_ratio']:.2f} of the bytes are saved",
        f"with `requires_grad_(False)` it is {plain['kept_bytes_ratio']:.2f}",
    )
    for file, head, keys in (
        ("encoders-cpu.json", "backward FLOPs, both", ["kept_bytes_ratio"]),
        ("encoders-h200.json", "ms, `ptlf.Freezer`", ["kept_bytes_ratio", "milliseconds_ratio"]),
        ("encoders-h200-captured.json", "captured bytes", ["kept_bytes_ratio", "milliseconds_ratio"]),
    ):
        pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in bench(file):
            if row["frozen"] != "nothing" and row["way"] in ("requires_grad_(False)", "ptlf.Freezer"):
                pairs.setdefault((row["network"], row["frozen"]), []).append(row)
        wanted = []
        for names, pair in pairs.items():
            pair.sort(key=lambda row: row["way"], reverse=True)
            cells = [f"{row[key]:.2f}" for key in keys for row in pair]
            cells += [f"{pair[0]['backward_flops_ratio']:.2f}"] if "FLOPs" in head else []
            wanted.append([*names, *cells])
        assert table(SAVINGS, head) == wanted, file
    first, second = (row["device_ms"] for row in bench("encoders-h200-captured.json") if not row["way"])
    says(SAVINGS, f"where a step takes {first:.1f} and {second:.1f} ms")
    ours, plain = bench("step-h200.json"), bench("step-h200-plain.json")
    assert ours[-1]["frozen"] == plain[-1]["frozen"] == 8
    time, memory = (ours[-1][key] / ours[0][key] for key in ("step_ms", "kept_bytes"))
    step = plain[-1]["step_ms"] / plain[0]["step_ms"]
    says(SAVINGS, f"{time:.2f} of the time and {memory:.2f} of the bytes", f"the step takes {step:.2f}")
    wanted = [[str(row["frozen"]), f"{row['step_ms']:.2f}", f"{row['device_ms']:.2f}"] for row in ours]
    assert [cells[:3] for cells in table(BENCHMARKS, "device alone, ms")] == wanted


def test_pretrained_encoders() -> None:
    """Means and standard deviations over the seeds."""
    rows = table_rows(PRETRAINED, "lost, points")
    methods = {"finetune": "finetune", "LUMP": "lump", "PTLF": "ptlf", "PTLF, cost-aware order": "ptlf-cost"}
    base = statistics.fmean(run["cost"]["backward_flops"] for run in kept("continue/lump-seed*"))

    def spread(values: list[float]) -> str:
        return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"

    assert list(rows) == list(methods)
    for name, method in methods.items():
        runs = kept(f"continue/{method}-seed*")
        known = [run["reference"]["probes"]["knn_class"] for run in runs]
        new = [run["probes"]["knn_class"] for run in runs]
        first, last = [row["before"] for row in known], [row["after"][-1] for row in known]
        lost = [before - after for before, after in zip(first, last, strict=True)]
        flops = statistics.fmean(run["cost"]["backward_flops"] for run in runs) / base
        columns = (first, last, lost, [row["accuracy"] for row in new])
        assert rows[name] == [*map(spread, columns), f"{flops:.2f}"], name
        says(PRETRAINED, f"the given encoder had {spread([row['untrained_accuracy'] for row in new])} % there")


def test_twenty_short_tasks() -> None:
    """Means over the seeds of Split CIFAR-100, in a table of recipes and a sentence of results. Ratios: geometric means
    of those by seed; of time only at the same commit."""
    rows = {"lump": "LUMP, here", "ptlf": "PTLF, here", "finetune": "Finetune", "si": "SI", "cassle": "CaSSLe"}
    for method in [*rows, "ptlf-cost", "ptlf-deep"]:
        mine = kept(f"split-cifar100-simsiam-{method}-seed*")
        base = [kept(f"split-cifar100-simsiam-lump-seed{run['seed']}")[0] for run in mine]
        pairs = list(zip(mine, base, strict=True))
        expected = [*(str(run["seed"]) for run in mine), *means(mine)]
        if method == "lump":
            expected += [f"{training(mine):.0f}", f"{kept_later(mine) / 2**20:.0f}"]
        else:
            same_code = all(run["commit"] == other["commit"] for run, other in pairs)
            for measure in [training] * same_code + [kept_later]:
                ratios = [measure([run]) / measure([other]) for run, other in pairs]
                expected.append(f"{statistics.geometric_mean(ratios):.2f}")
        cells = row_with(RECIPES, "training of tasks 2-20", rows.get(method, f"`{method}`"))
        assert [number for cell in cells for number in numbers(cell)] == expected, method
        if method in ("ptlf", "ptlf-deep"):
            scores = [[run["probes"]["knn_task"]["accuracy"] for run in pair] for pair in pairs]
            points = " and ".join(f"{theirs - ours:.2f}" for ours, theirs in scores)
            times = " and ".join(f"{training([run]) / training([other]):.2f}x" for run, other in pairs)
            says(
                RESULTS, f"by {points}" + (" points" if method == "ptlf" else f", in {times} of its time in tasks 2-20")
            )


def test_a_given_encoder_by_the_share_of_its_layers_that_is_frozen() -> None:
    """Means over three domains; and what the settings that were drawn at random lose."""
    depths = points(GIVEN / "depth-h200.jsonl", ("cells", "letters", "textures"), seeds=False)
    found = {
        (each["depth"], each.get("which", "first")): point for key, point in depths.items() if (each := json.loads(key))
    }
    names = {0: "nothing", 0.25: "quarter", 0.5: "half (default)", 0.75: "three quarters", 0.9: "nine tenths"}
    rows = table_rows(PRETRAINED, "| frozen | gained, kNN |")
    assert len(rows) == len(found)
    for (depth, which), point in found.items():
        assert rows[f"{which} {names[depth]}" if depth else "nothing"] == [f"{value:+.1f}" for value in point]
    searched = points(GIVEN / "search-h200.jsonl", ("cells", "signs", "textures"), seeds=True)
    some = {
        depth: [point for key, point in searched.items() if json.loads(key)["depth"] == depth] for depth in (0, 0.75)
    }
    worse = {depth: sum(change < -1 for *_, change in each) for depth, each in some.items()}
    gain, _, change = (statistics.fmean(column) for column in zip(*some[0], strict=True))
    says(
        PRETRAINED,
        f"The points are {len(searched)} settings",
        f"Of the {len(some[0])} with nothing frozen, {worse[0]} lost more than a point of what the encoder knew, "
        f"{-change:.1f} on average, and they made the encoder worse on the new images too: by {-gain:.1f} points. "
        f"Of the {len(some[0.75])} with three quarters frozen, {worse[0.75]} lost more than a point.",
    )


def test_what_learn_gains_by_its_defaults() -> None:
    expected = given_table(GIVEN, "default")
    assert table(PRETRAINED, "kNN at the start") == expected
    gained = {domain: cells for domain, _, _, *cells in expected}
    names = {"signs": "road signs", "cells": "blood cells", "letters": "Arabic letters", "textures": "textures"}
    for domain, name in {**names, "satellite": "satellite images", "mean": "mean"}.items():
        row = table_rows(README, "new images")[name]
        assert row == [gained[domain][at].partition(" (")[0] for at in (0, 2, 4)], domain


def test_two_sets_in_turn() -> None:
    turns = json.loads((GIVEN / "turns-cells-letters-0.json").read_text())
    alone = [json.loads((GIVEN / f"default-{name}-seed0.json").read_text()) for name in ("cells", "letters")]

    def share(right: dict[str, list[int]]) -> str:
        return f"{100 * statistics.fmean(right['knn']):.1f} %"

    says(
        PRETRAINED,
        f"end at {share(turns['cells'])} and {share(turns['letters'])} by kNN; the runs above, on one set alone, at "
        f"{share(alone[0]['end'])} and {share(alone[1]['end'])}.",
        f"What the encoder knew was {share(alone[0]['known_start'])} at the start and {share(turns['photos'])} after",
    )


def test_which_layers_are_frozen() -> None:
    lines = [json.loads(line) for line in (GIVEN / "orders.jsonl").read_text().splitlines()]
    start = {line["domain"]: line for line in lines if line["obj"] == "untouched"}
    names = {"first": "first half", "ratios": "half, highest ratios"}
    expected = []
    for line in [line for line in lines if line["obj"] != "untouched"]:
        before, layers, known = start[line["domain"]], line["frozen"], start["photos"]["knn"]
        found = [line["domain"], names[line["which"]], str(sum(layer < 26 for layer in layers))] if layers else []
        found = found or [line["domain"], "nothing", "-"]
        changes = [line[test] - before[test] for test in ("knn", "linear")] + [line["knew"] - known]
        expected.append([*found, *(f"{change:+.1f}" for change in changes)])
    assert sorted(table(PRETRAINED, "of the first 26 layers")) == sorted(expected)


def test_from_nothing() -> None:
    default, vicreg = (json.loads((GIVEN / f"{name}-photos-seed0.json").read_text()) for name in NOTHING)
    given = json.loads((GIVEN / "default-cells-seed0.json").read_text())["known_start"]
    chosen = json.loads((GIVEN / "nothing_vicreg_ptlf-photos-seed0.json").read_text())
    rows = [given, chosen["end"], vicreg["end"], vicreg["colours"], vicreg["start"], default["end"], vicreg["pixels"]]
    expected = [[f"{100 * statistics.fmean(row[test]):.1f}" for test in ("knn", "linear")] for row in rows]
    assert [row[1:] for row in table(PRETRAINED, "| encoder | kNN, %")] == expected
    better, colours = (gain([vicreg], before, "end", "knn") for before in ("start", "colours"))
    sources = [("nothing_vicreg_ptlf", part) for part in ("start", "pixels", "colours")]
    sources += [(name, "end") for name in ("nothing", "nothing_vicreg_finetune", "nothing_vicreg_ptlf")]
    for row, (name, part) in zip(table(PRETRAINED, "| on a GPU, from nothing |"), sources, strict=True):
        files = [GIVEN / "from-nothing" / f"{name}-{domain}-seed0.json" for domain in ("photos", "letters", "cells")]
        ends = [json.loads(file.read_text())[part] for file in files]
        assert row[1:] == [" / ".join(f"{100 * statistics.fmean(end[test]):.1f}" for test in end) for end in ends]
    says(PRETRAINED, f"by {better.lstrip('+')} points, and no better than colours ({colours})")


def test_what_a_given_encoder_costs() -> None:
    costs = json.loads((GIVEN / "costs.json").read_text())
    base = next(row for row in costs["rows"] if row["way"] == "all layers train")["epoch_seconds"]
    expected = [
        [
            row["way"],
            f"{row['epoch_seconds']:.1f}",
            f"{row['epoch_seconds'] / base:.2f}",
            f"{row['kept_bytes'] / 2**20:.0f}",
        ]
        for row in costs["rows"]
    ]
    assert table(PRETRAINED, "| training | seconds |") == expected
    (default,) = [row for row in costs["rows"] if "default" in row["way"]]
    files = costs["from files"]
    says(
        PRETRAINED,
        f"The first epoch of the default takes {default['first_epoch_seconds']:.1f} s",
        f"take {files['seconds']:.0f} s, with at most {files['peak_resident_bytes'] / 2**30:.1f} GiB of memory",
    )


def test_a_transformer_in_small() -> None:
    run, unfrozen = (
        json.loads((GIVEN / f"{name}-digits59-seed0.json").read_text()) for name in ("vit", "vit-unfrozen")
    )
    gained, changed = gain([run], "start", "end", "knn"), gain([run], "known_start", "known_end", "knn")
    more, less = gain([unfrozen], "start", "end", "knn"), gain([unfrozen], "known_start", "known_end", "knn")
    says(PRETRAINED, f"With nothing frozen it gains {more} points and changes by {less}")
    start, pixels = (f"{100 * statistics.fmean(run[name]['knn']):.1f} %" for name in ("start", "pixels"))
    says(PRETRAINED, f"gains {gained} points on the digits 5 to 9 from {start}, and changes by {changed}")
    says(PRETRAINED, f"raw pixels have {pixels}")


def test_the_table_of_small_runs_is_that_of_their_records() -> None:
    lines = (ROOT / "results/evidence/split-cifar10-mini.jsonl").read_text().splitlines()
    assert table(RESULTS, "| small runs |") == evidence_table([json.loads(line) for line in lines])


def test_vectors_of_earlier_days() -> None:
    maps, drift, stream = (
        json.loads((ROOT / "results" / "versions" / f"{name}-seed0.json").read_text())
        for name in ("maps-default", "drift-default", "stream-10-epochs")
    )
    for days, *cells in table(VERSIONS, "| days later |"):
        rows = [row for row in maps["rows"] if row["days"] == int(days)]

        def mean(kind: str, way: str, rows: list[Any] = rows) -> float:
            return statistics.mean(row[kind][way] for row in rows)

        expected = [f"{mean('recall', way):.3f}" for way in ("as they are", "mapped", "residual MLP")]
        assert cells == [*expected, *(f"{mean('knn', way):.1f}" for way in ("as they are", "mapped", "encoded again"))]
    found = {(row["kind"], row["images"]): row for row in drift["rows"]}
    for kind, *cells in table(VERSIONS, "| folder |"):
        answers = [found[kind, images]["answers"].values() for images in (12, 24, 48)]
        assert cells == [" / ".join(map(str, each)) for each in answers]
    spent, copies = maps["cpu_milliseconds_per_10000"], [row for row in drift["rows"] if "JPEG" in row["kind"]]
    times = f"take {spent['encoding again'] / 1000:.0f} CPU seconds, by a map {spent['a map'] / 1000:.2f}."
    says(VERSIONS, times, f"{100 * statistics.mean(row['duplicates'] for row in copies):.0f} % of them")
    cpu = drift["cpu_seconds"]
    says(VERSIONS, f"take {cpu['encoding_1000']:.1f} CPU seconds to encode", f"{1000 * cpu['comparing']:.0f} ms beyond")
    skips, all_days = stream["if drift"], stream["all"]
    saved = 100 * (1 - skips["cpu_seconds"] / all_days["cpu_seconds"])
    change = "{:+.1f} ± {:.1f} points".format(*stream["difference"])
    says(VERSIONS, f"{saved:.0f} % of the CPU time", f"from {all_days['knn']:.1f} to {skips['knn']:.1f} %: {change}")
