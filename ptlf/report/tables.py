"""Results as tables in the terminal."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ptlf.core.words import clipped
from ptlf.report import measures, paired
from ptlf.report.intervals import RANDOM, half_width, neighbours_used, start_of
from ptlf.report.measures import (
    COSTS,
    MAIN_COSTS,
    Measure,
    main_measures,
    probe_measures,
    recorded,
    reference_measures,
    steady,
)
from ptlf.report.runs import FEATURES, LATER_KEPT, Comparison, Group, RunRecord, known_probes
from ptlf.run.results import STEADY, Json

RATIOS = "×: geometric mean of the ratios by seed"
BRACKETS = "in brackets: 95 % interval from the number of test images"


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
    """Each run by name, as the results of its seeds. Up to three side by side with all figures; more of them as a list
    with the main ones. Means over seeds, and the 95 % t interval of the probes'."""
    groups = [Group([RunRecord(Path(), results) for results in seeds], name) for name, seeds in runs.items()]
    comparison = Comparison(groups, {}, next((group for group in groups if group.label == baseline), None))
    few, base = len(groups) <= 3, comparison.baseline
    (show_side_by_side if few else show_as_list)(console, comparison, title)
    tested = any(group.interval(("probes", probe, "accuracy")) for group in groups for probe in comparison.probes)
    several = any(len(group.runs) > 1 for group in groups)
    notes = [paired.OVER_SEEDS] * several + [RATIOS] * (several and base is not None) + [BRACKETS] * (few and tested)
    froze = few and any(group.freezes for group in groups)
    peaks = few and any(group.freezes_later and group.values(measures.WHOLE_PEAK.path) for group in groups)
    kept = not few and any(group.values(LATER_KEPT) for group in groups)
    for words in (
        "; ".join(notes),
        f"time without compiling: {STEADY}" * measures.waited_for_compiler(groups),
        paired.DAGGER * paired.any_dagger(groups, base),
        f"activations, GPU memory: means {measures.MEANS}" * kept,
        measures.LAST_EPOCH * froze,
        measures.FIRST_PEAK * peaks,
    ):
        if words:
            note(console, words)
    for group in groups:
        for warning in (*group.worse(), *group.falling()):
            console.print(f"{group.label}: {warning}", style="yellow", soft_wrap=True)
        if group.doubt:
            console.print(f"{group.label}: {group.doubt}", soft_wrap=True)
    show_differences(console, comparison)


def show_differences(console: Console, comparison: Comparison) -> None:
    """By seed, of every run with two seeds or more in common with the baseline."""
    groups, base = comparison.groups, comparison.baseline
    others = paired.several_seeds(groups, base)
    if base is None or not others:
        return
    names = dict(zip([group.label for group in groups], shortened([g.label for g in groups])[1], strict=True))
    table = new_table(f"By seed: {paired.HOW.format(base=names[base.label])}", [""], [names[g.label] for g in others])
    for measure in main_measures(comparison, comparison.probes):
        name = f"{measure.path[1]} {measure.short}" if measure.path[0] == "probes" else measure.title
        cells = [paired.by_seed_words(group, base, measure) for group in others]
        table.add_row(f"{name}, {paired.unit(measure)}", *cells)
    console.print(table)


def show_side_by_side(console: Console, comparison: Comparison, title: str) -> None:
    """One column per run, one row per figure; costs also relative to the baseline run where there is one."""
    groups = comparison.groups
    names = [group.label for group in groups]
    if len(names) > 1:  # in full they would not fit 80 columns
        common, names = shortened(names)
        title = f"{title}: {common}" if common else title
    table = new_table(title, [""], names)
    for probe in comparison.probes:
        for measure in probe_measures(probe, groups):
            table.add_row(f"{probe} {measure.short}, {measure.unit}", *[score(measure, group) for group in groups])
        table.add_section()
    for probe in comparison.known:
        before, after, lost = reference_measures(probe)
        cells = [f"{score(before, group)} → {score(after, group)}" for group in groups]
        table.add_row(f"{probe} what it knew before, %", *cells)
        table.add_row(f"{probe} lost of that, points", *[score(lost, group) for group in groups])
        table.add_section()
    for key, name in FEATURES.items():
        last = [list(group.feature(key).values())[-1:] for group in groups]
        if any(last):
            cells = [percent(values[0][1] if values else None) for values in last]
            table.add_row(f"{name} of the features, last task", *cells)
    table.add_section()
    for measure in steady(COSTS, groups):
        cells = [
            f"{measure.words(group.mean(measure.path))}  {paired.times(group, comparison.baseline, measure)}"
            for group in groups
        ]
        if any(group.values(measure.path) for group in groups):
            table.add_row(measure.indent + measure.title, *[cell.rstrip() for cell in cells])
    console.print(table)


def show_as_list(console: Console, comparison: Comparison, title: str) -> None:
    """One row per run; costs relative to the baseline run, or as they are without one."""
    groups, base, probes = comparison.groups, comparison.baseline, comparison.probes[:2]
    common, names = shortened([group.label for group in groups])
    title = f"{title}: {common}" + (f"; costs relative to {base.label}" if base else "")
    scores = [measure for probe in probes for measure in probe_measures(probe)[:2]]
    costs = recorded(comparison, steady(MAIN_COSTS, groups))
    headings = [heading for probe in probes for heading in (probe.replace("_", "\n") + ", %", "for-\ngets")]
    headings += [measure.short.replace(" ", "\n").replace("activations", "activ-\nations") for measure in costs]
    table = new_table(title, ["run"], headings, padding=(0, 1 if console.width >= 100 else 0))
    for name, group in zip(names, groups, strict=True):
        cells = [paired.times(group, base, measure) or measure.words(group.mean(measure.path)) for measure in costs]
        table.add_row(name, *[score(measure, group, interval=False) for measure in scores], *cells)
    console.print(table)
    for probe in probes:
        found = [group.interval(("probes", probe, "accuracy")) for group in groups]
        if widths := [(high - low) / 2 for low, high in filter(None, found)]:
            console.print(f"{probe}: ±{max(widths):.2f} at 95 %, from the number of test images")


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
