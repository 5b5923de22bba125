"""Results as tables in the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ptlf.core.errors import clipped, quoted
from ptlf.report.intervals import neighbours_used, start_of, wilson
from ptlf.report.measures import Measure, all_measures, main_measures, notes
from ptlf.report.runs import FEATURES, Comparison, Group, RunRecord, known_probes, split_prefix
from ptlf.report.verdicts import copies, latest_verdicts, ranking
from ptlf.run.results import Json, read_evaluations

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
    start: str,
    known: Json | None = None,
    days: Sequence[str] = (),
) -> None:
    """One probe's accuracy matrix, the encoder before training on top, the last row's interval at the bottom.

    known: what it knew before, for a last column. days: names of tasks that arrived one by one."""
    tests = values.get("test_images") or ()
    count = f"{sum(tests):,} test images" * bool(tests)
    about = ("accuracy in %", neighbours_used(values), count, f"bank: {values['settings'].get('bank')}")
    console.print(f"\n{probe}: {', '.join(filter(None, about))}")
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
    if values["matrix"] and len(tests) == len(eval_splits):
        last = zip(values["matrix"][-1], tests, strict=True)
        bounds = [None if value is None or not count else wilson(value, count) for value, count in last]
        table.add_row("at 95 %", *[f"±{(b[1] - b[0]) / 2:.2f}" if b else "" for b in bounds], style="dim")
    console.print(table)


def show_runs(
    console: Console, runs: Mapping[str, Sequence[Json]], baseline: str | None = None, title: str = "Summary"
) -> None:
    """Each run by name, as the results of its seeds; costs also relative to the baseline's."""
    groups = [Group([RunRecord(Path(), results) for results in seeds], name) for name, seeds in runs.items()]
    base = next((group for group in groups if group.label == baseline), None)
    comparison, (common, names) = Comparison(groups, {}, base), split_prefix([*runs])
    title, measures = f"{title}: {common}" if common else title, all_measures(comparison)
    console.print((side_by_side if len(groups) <= FEW else as_list)(console, comparison, title, names))
    if base and (others := comparison.paired):
        title = f"By seed: mean difference to {names[groups.index(base)]} with the same seed, 95 % t interval"
        title += "; better or worse only where it excludes zero"
        table = new_table(title, [""], [names[groups.index(group)] for group in others])
        for measure in main_measures(comparison, comparison.probes):
            cells = [measure.said(measure.difference(group, base)) for group in others]
            table.add_row(row_name(measure).replace("%", "points"), *cells)
        console.print(table)
    tested = any(group.interval(measure.path) for group in groups for measure in measures)
    for words in [BRACKETS] * (tested and len(groups) <= FEW) + notes(comparison, measures):
        note(console, words)
    found = [f"{group.label}: {warning}" for group in groups for warning in group.warnings()]
    for words in filter(None, [ranking(comparison), *copies([run for g in groups for run in g.runs]), *found]):
        console.print(words, style="yellow", soft_wrap=True)


def side_by_side(console: Console, comparison: Comparison, title: str, names: Sequence[str]) -> Table:
    """A row per figure, a column per run."""
    groups, table = comparison.groups, new_table(title, [""], names)
    for measure in all_measures(comparison):
        name = measure.indent + measure.title if measure.path[0] == "cost" else row_name(measure)
        table.add_row(name, *[cell(measure, group, comparison.baseline) for group in groups])
    for key, name in FEATURES.items():
        last = [[after for _, after in group.feature(key).values()][-1:] for group in groups]
        if any(last):
            cells = [percent(values[0] if values else None) for values in last]
            table.add_row(f"{name} of the features, last task", *cells)
    return table


def as_list(console: Console, comparison: Comparison, title: str, names: Sequence[str]) -> Table:
    """A row per run with the main figures; costs relative to the baseline run, or as they are without one."""
    base, measures = comparison.baseline, main_measures(comparison, comparison.probes[:2])
    title += f"; costs relative to {base.label}" if base else ""
    headings = []
    for m in measures:
        cost = m.short.replace(" ", "\n").replace("activations", "activ-\nations")
        headings.append(cost if m.cost else f"{m.path[1]}, %".replace("_", "\n") if m.rising else "for-\ngets")
    table = new_table(title, ["run"], headings, padding=(0, 1 if console.width >= 100 else 0))
    for name, group in zip(names, comparison.groups, strict=True):
        table.add_row(name, *[cell(measure, group, base, brief=True) for measure in measures])
    return table


def cell(measure: Measure, group: Group, base: Group | None, *, brief: bool = False) -> str:
    """A score with its intervals over seeds and from the test images; a cost and its ratio. brief: one of the two."""
    if measure.path[0] == "cost":
        mean, times = measure.words(group.mean(measure.path)), measure.times(group, base)
        return times or mean if brief else f"{mean}  {times}".rstrip()
    half, bounds = measure.half(group), None if brief else group.interval(measure.path)
    words = measure.show(group.mean(measure.path)) + ("" if half is None else f" ±{measure.show(half)}")
    return words if bounds is None else f"{words} ({bounds[0]:.1f} to {bounds[1]:.1f})"


def row_name(measure: Measure) -> str:
    return f"{measure.path[1]} {measure.short}, {measure.unit}" if measure.path[0] == "probes" else measure.heading


def note(console: Console, words: str) -> None:
    console.print(words, style="dim", highlight=False)


def show_results(console: Console, results: Json, folder: Any, *, brief: bool = False) -> None:
    """A finished run: its accuracy matrices, its figures, and where the files are."""
    for probe, values in results["probes"].items():
        if not brief or (probe == "knn_class" and len(results["eval_splits"]) <= 10):
            tested = values | {"test_images": results.get("test_images")}
            days, known = results["tasks"] if results.get("arrived") else (), known_probes(results).get(probe)
            show_matrix(console, probe, tested, results["eval_splits"], start_of(results), known, days)
    if not brief:
        count, name = len(results["tasks"]), Path(folder).resolve().name
        show_runs(console, {results["name"]: [results]}, title=f"{name}, all {count} tasks" if count > 1 else name)
    for verdict in (found := latest_verdicts(read_evaluations(Path(folder)), len(results["tasks"]))):
        console.print(verdict, highlight=False, soft_wrap=True)
    if not found and not results["probes"]:
        later = f"`ptlf evaluate {quoted(Path(folder))} --stream.labelled FOLDER` does, with a folder per class"
        console.print(f"without labelled images nothing tells whether that helped; {later}", soft_wrap=True)
    console.print(f"files: {folder}/results.json, metrics.jsonl, config.yaml, encoder.safetensors", soft_wrap=True)
