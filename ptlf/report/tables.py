"""Results as tables in the terminal."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ptlf.core.words import clipped
from ptlf.report import paired
from ptlf.report.intervals import RANDOM, half_width, neighbours_used, start_of
from ptlf.report.measures import COMPILING, MEMORY, Measure, all_measures, main_measures
from ptlf.report.runs import FEATURES, LATER_KEPT, Comparison, Group, RunRecord, known_probes
from ptlf.run.results import STEADY, Json

RATIOS = "×: geometric mean of the ratios by seed"
BRACKETS = "in brackets: 95 % interval from the number of test images"
FEW = 3  # runs beside each other with all figures; more of them are a list with the main ones


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def new_table(title: str, names: Sequence[str], figures: Iterable[str], **look: Any) -> Table:
    """Names stand on the left of their columns, figures on the right."""
    table = Table(title=title or None, title_justify="left", **look)
    for name in names:
        table.add_column(name, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def show_matrix(
    console: Console,
    probe: str,
    values: Json,
    eval_splits: list[str],
    test_images: Sequence[int] = (),
    start: str = RANDOM,
    known: Json | None = None,
    days: Sequence[str] = (),
) -> None:
    """One probe's accuracy matrix: a row per task trained, a column per split, the encoder before training on top; at
    the bottom the interval of the last row, from the number of test images. known: what it knew before, for a last
    column. days: names of tasks that arrived one by one."""
    console.print(f"\n{probe}: accuracy in %{neighbours_used(values)}, bank: {values['settings'].get('bank')}")
    headings = [clipped(split, 14) for split in eval_splits] + ["what it\nknew before"] * bool(known)
    table = new_table("", ["after training on"], headings)
    before, after = ([percent(known["before"])], known["after"]) if known else ([], [])
    if values.get("untrained"):
        table.add_row(f"nothing ({start})", *map(percent, values["untrained"]), *before, style="dim")
    for number, row in enumerate(values["matrix"], start=1):
        aside = [percent(value) for value in after[number - 1 : number]]
        if not aside and all(value is None for value in row):
            continue
        name = "all tasks" if len(values["matrix"]) == 1 and not days else f"task {number}"
        name += f", {clipped(days[number - 1], 14)}" if number <= len(days) else ""
        table.add_row(name, *["" if value is None else percent(value) for value in row], *aside)
    if values["matrix"] and len(test_images) == len(eval_splits):
        last = zip(values["matrix"][-1], test_images, strict=True)
        cells = ["" if value is None or not n else f"±{half_width(value, n):.2f}" for value, n in last]
        table.add_row("at 95 %", *cells, style="dim")
    console.print(table)


def show_runs(
    console: Console, runs: Mapping[str, Sequence[Json]], baseline: str | None = None, title: str = "Summary"
) -> None:
    """Each run by name, as the results of its seeds. Means over seeds, and the 95 % t interval of the probes'; costs
    also relative to the baseline's."""
    groups = [Group([RunRecord(Path(), results) for results in seeds], name) for name, seeds in runs.items()]
    base = next((group for group in groups if group.label == baseline), None)
    comparison, (common, names) = Comparison(groups, {}, base), shortened([group.label for group in groups])
    if len(groups) == 1:
        common, names = "", [groups[0].label]
    title = f"{title}: {common}" if common else title
    if len(groups) <= FEW:
        show_side_by_side(console, comparison, title, names)
    else:
        show_as_list(console, comparison, title, names)
    show_differences(console, comparison, names)
    measures = all_measures(comparison)
    tested = any(group.interval(measure.path) for group in groups for measure in measures)
    for words in (
        f"{paired.OVER_SEEDS}; {RATIOS}" * comparison.seeds,
        BRACKETS * (tested and len(groups) <= FEW),
        f"time without compiling: {STEADY}" * any(COMPILING in measure.title for measure in measures),
        MEMORY * any(group.values(LATER_KEPT) for group in groups),
    ):
        if words:
            note(console, words)
    for group in groups:
        for warning in (*group.worse(), *group.falling()):
            console.print(f"{group.label}: {warning}", style="yellow", soft_wrap=True)


def show_side_by_side(console: Console, comparison: Comparison, title: str, names: Sequence[str]) -> None:
    """A row per figure, a column per run."""
    groups, base, table = comparison.groups, comparison.baseline, new_table(title, [""], names)
    for measure in all_measures(comparison):
        if measure.cost or measure.path[0] == "cost":
            cells = [f"{measure.words(g.mean(measure.path))}  {paired.times(g, base, measure)}" for g in groups]
            table.add_row(measure.indent + measure.title, *[cell.rstrip() for cell in cells])
        else:
            table.add_row(row_name(measure, measure.unit), *[score(measure, group) for group in groups])
    for key, name in FEATURES.items():
        last = [[after for _, after in group.feature(key).values()][-1:] for group in groups]
        if any(last):
            cells = [percent(values[0] if values else None) for values in last]
            table.add_row(f"{name} of the features, last task", *cells)
    console.print(table)


def show_as_list(console: Console, comparison: Comparison, title: str, names: Sequence[str]) -> None:
    """A row per run with the main figures; costs relative to the baseline run, or as they are without one."""
    base, measures = comparison.baseline, main_measures(comparison, comparison.probes[:2])
    title += f"; costs relative to {base.label}" if base else ""
    headings = [
        m.short.replace(" ", "\n").replace("activations", "activ-\nations")
        if m.cost
        else f"{m.path[1]}, %".replace("_", "\n")
        if m.rising
        else "for-\ngets"
        for m in measures
    ]
    table = new_table(title, ["run"], headings, padding=(0, 1 if console.width >= 100 else 0))
    for name, group in zip(names, comparison.groups, strict=True):
        cells = [
            (paired.times(group, base, m) or m.words(group.mean(m.path))) if m.cost else score(m, group, interval=False)
            for m in measures
        ]
        table.add_row(name, *cells)
    console.print(table)


def show_differences(console: Console, comparison: Comparison, names: Sequence[str]) -> None:
    """By seed, of every run with two seeds or more in common with the baseline."""
    groups, base = comparison.groups, comparison.baseline
    others = paired.several_seeds(groups, base)
    if base is None or not others:
        return
    headings = [names[groups.index(group)] for group in others]
    table = new_table(f"By seed: {paired.HOW.format(base=names[groups.index(base)])}", [""], headings)
    for measure in main_measures(comparison, comparison.probes):
        cells = [paired.words(paired.compared(group, base, measure), measure) for group in others]
        table.add_row(row_name(measure, paired.unit(measure)), *cells)
    console.print(table)


def row_name(measure: Measure, unit: str) -> str:
    return f"{measure.path[1]} {measure.short}, {unit}" if measure.path[0] == "probes" else f"{measure.title}, {unit}"


def note(console: Console, words: str) -> None:
    console.print(words, style="dim", highlight=False)


def score(measure: Measure, group: Group, *, interval: bool = True) -> str:
    """The mean, its 95 % t interval over seeds, and the interval from the number of test images."""
    half, bounds = paired.half_of(group, measure), group.interval(measure.path) if interval else None
    words = measure.show(group.mean(measure.path)) + ("" if half is None else f" ±{measure.show(half)}")
    return words if bounds is None else f"{words} ({bounds[0]:.1f} to {bounds[1]:.1f})"


def shortened(names: list[str]) -> tuple[str, list[str]]:
    """What all recipes share, and each one without it."""
    parts = [name.split("/") for name in names]
    shared = [len({part[i] for part in parts}) == 1 for i in range(min(map(len, parts)))]
    common = "/".join(name for name, same in zip(parts[0], shared, strict=False) if same)
    short = [[p for p, same in itertools.zip_longest(part, shared, fillvalue=False) if not same] for part in parts]
    return common, ["/".join(map(str, rest)) or name for rest, name in zip(short, names, strict=True)]


def show_results(console: Console, results: Json, folder: Any, *, brief: bool = False) -> None:
    """A finished run: its accuracy matrices, its figures, and where the files are."""
    for probe, values in results["probes"].items():
        if not brief or (probe == "knn_class" and len(results["eval_splits"]) <= 10):
            tests, known = results.get("test_images") or (), known_probes(results).get(probe)
            days = results["tasks"] if results.get("arrived") else ()
            show_matrix(console, probe, values, results["eval_splits"], tests, start_of(results), known, days)
    if not brief:
        show_runs(console, {results["name"]: [results]})
    if not results["probes"]:
        later = f"`ptlf evaluate {folder} --stream.labelled FOLDER` takes labels that come later"
        console.print(f"not evaluated: no labelled test images (or evaluation.enabled is false); {later}")
    console.print(f"files: {folder}/results.json, metrics.jsonl, config.yaml, encoder.safetensors", soft_wrap=True)
