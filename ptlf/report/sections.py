"""The report's pictures in reading order, each with the sentence that says how to read it, and what is missing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure as Canvas

from ptlf.report import figures
from ptlf.report.drawing import Colours
from ptlf.report.figures import Series
from ptlf.report.intervals import neighbours_used
from ptlf.report.measures import COSTS, SCALES, main_measures, title_of
from ptlf.report.runs import FEATURES, Comparison, Group

OVER_TASKS = {
    "accuracy": "After each task, the mean accuracy in % on the classes of all tasks so far; higher is better.",
    "forgetting": "Drop from each earlier task's best accuracy, in percentage points; lower is better.",
}
OF_FEATURES = {
    "effective_rank": "After each task, how many directions the features of its images use (exp of the singular "
    "values' entropy). More is not better; a fall may be a collapse.",
    "spread": "After each task, how far the normalised features of its images differ: 1 = in all directions, 0 = all "
    "images get one vector. More is not better.",
}
# In pictures: of two seeds the t interval would be nine times as wide, and no line could be told from another.
DEVIATION = " {} are one standard deviation over seeds, narrower than an interval."
MARKED = "Triangles mark freezing."


class Picture(NamedTuple):
    """group: the run, where a figure has a picture per run."""

    name: str
    draw: Callable[[Colours], Canvas | None]
    group: Group | None = None


@dataclass
class Figure:
    title: str
    how: str
    pictures: Sequence[Picture]


@dataclass
class Section:
    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, how: str, pictures: Sequence[Picture]) -> None:
        if pictures:
            self.figures.append(Figure(title, how, pictures))

    def add_per_run(
        self, title: str, how: str, name: str, draw: Callable[[Group, Colours], Canvas], groups: Sequence[Group]
    ) -> None:
        names = [f"{name}-" + re.sub(r"[\W_]", "-", group.label.lower()).strip("-") for group in groups]
        self.add(title, how, [Picture(n, partial(draw, group), group) for n, group in zip(names, groups, strict=True)])

    def add_over_tasks(
        self, title: str, how: str, name: str, lines: Sequence[tuple[Group, Series]], highest: float | None = 100.0
    ) -> None:
        """A line per run, if any has a value. highest: that there can be."""
        found = [(group, series) for group, series in lines if series]
        how += DEVIATION.format("Bands") * any(len(group.runs) > 1 for group, _ in found)
        self.add(title, how, [Picture(name, partial(figures.over_tasks, found, highest))] * bool(found))


def sections(comparison: Comparison) -> list[Section]:
    first = (answer_section, accuracy_section, learning_section, ratio_section)
    return [make(comparison) for make in (*first, freezing_section, cost_section, gallery_section)]


def answer_section(comparison: Comparison) -> Section:
    section, base = Section("answer", "The answer"), comparison.baseline
    if not comparison.probes:
        section.title = "What it cost"
    how = (
        "A dot per run: accuracy is better to the right, forgetting and costs to the left. Costs begin at 0; the other "
    )
    how += "scales show a part only."
    if base:
        how += f" The dotted line is {base.label}; costs carry their ratio to it."
    how += DEVIATION.format("Whiskers") * comparison.seeds
    if comparison.probes or len(comparison.groups) > 1:  # else there is nothing to compare
        measures = main_measures(comparison, comparison.probes[:1])
        glance = [Picture("-".join(("answer", *m.path[1:])), partial(figures.answer, comparison, m)) for m in measures]
        section.add("All runs at a glance", how, glance)
    if base is None and len(comparison.groups) > 1:
        none = "No baseline: none of these runs is LUMP without freezing; --baseline names another one."
        section.notes.append(none)
    return section


def accuracy_section(comparison: Comparison) -> Section:
    section, groups = Section("accuracy", "What was learned, and what was kept"), comparison.groups
    for probe in comparison.probes:
        for what, how in OVER_TASKS.items():
            title = f"{what.capitalize()} over tasks, {title_of(probe)}"
            found = [(group, figures.by_task(group, probe, what)) for group in groups]
            section.add_over_tasks(title, how, f"{what}-{probe}", found)
        tested = [group for group in groups if figures.matrix_cells(group, probe)]
        how = "Accuracy in % after each task (row) on the classes of each task (column): a column shows forgetting"
        records = [group.first["probes"][probe] for group in tested]
        used = [row for values in records for row in values.get("used_by_task") or []]
        k = [neighbours_used(records[0] | {"used_by_task": used})] if tested else []
        cells = [value for group in tested for value in figures.matrix_cells(group, probe).values()]
        draw = partial(figures.matrix, probe, (min(cells, default=0), max(cells, default=0)))  # one scale for all
        title, how = f"Accuracy matrix, {title_of(probe)}", "; ".join(filter(None, [how, *k])) + "."
        section.add_per_run(title, how, f"matrix-{probe}", draw, tested)
    for probe in comparison.known:
        how = "Accuracy in % on the images of evaluation.reference, before the first task (0) and after each."
        found = [(group, figures.known_by_task(group, probe)) for group in groups]
        section.add_over_tasks(f"What it knew before, {title_of(probe)}", how, f"known-{probe}", found)
    tested = [group for group in groups if group.first["probes"] or any(run.tests for run in group.runs)]
    if untested := [group.label for group in groups if group not in tested]:
        needs = "That needs labelled test images and evaluation.enabled"
        section.notes.append(f"Not evaluated: {', '.join(untested)}. {needs}.")
    return section


def learning_section(comparison: Comparison) -> Section:
    section = Section("learning", "How it learned, without labels")
    epochs = [line for group in comparison.groups for run in group.runs for line in run.epochs]
    names = dict.fromkeys(name for line in epochs for name in line.get("loss", {}))
    losses = [(name, lambda line, name=name: line.get("loss", {}).get(name)) for name in names]
    pictures = [Picture(f"loss-{n}", partial(figures.over_epochs, comparison, n, loss, False)) for n, loss in losses]
    section.add("Losses", f"The mean of each loss over every epoch, with its own scale. {MARKED}", pictures)
    for key, how in OF_FEATURES.items():
        found = [(group, group.features(key)) for group in comparison.groups]
        section.add_over_tasks(f"{FEATURES[key].capitalize()} of the features", how, key, found, None)
    return section


def ratio_section(comparison: Comparison) -> Section:
    section, groups = Section("correlation", "Which units were chosen, and why"), figures.having(comparison, "ratios")
    how = "A line is a task, a row a unit: far right, the new task would change what the past used; filled dots froze."
    how += " Units that would not have frozen at any ratio have none."
    how += f" The scale shows {(low := figures.ratio_low(groups)):.2f} to 1 only."
    draw = partial(figures.ratio_lines, low)
    section.add_per_run("Task-correlation ratio by unit", how, "ratios", draw, groups)
    if not groups:
        why = "No run computed correlation ratios; a run with --freezing.policy correlation does."
        if comparison.tasks == 1:
            why = "No ratios yet: they compare a task with those before, so the second task has the first."
        section.notes.append(why)
    return section


def freezing_section(comparison: Comparison) -> Section:
    section, groups = Section("freezing", "What froze, and when"), figures.having(comparison, "events")
    how = "Units run down, the epochs of all tasks across: a filled cell is a unit that was not updated."
    how += " Paler cells froze in only some of the seeds." * comparison.seeds
    section.add_per_run("Freezing map", how, "freezing", figures.freezing_map, groups)
    if idle := [group.label for group in comparison.groups if group not in groups]:
        section.notes.append(f"No unit froze in {', '.join(idle)}.")
    return section


def cost_section(comparison: Comparison) -> Section:
    section, pictures = Section("cost", "What it cost, epoch by epoch"), []
    epochs = [line for group in figures.with_epochs(comparison) for run in group.runs for line in run.epochs]
    for measure in (measure for measure in COSTS if measure.epoch):
        highest = max((line.get(measure.epoch) or 0 for line in epochs), default=0)
        if highest:
            unit = "G" if measure.unit == "T" and highest < SCALES["T"] else measure.unit
            title = f"{measure.title.split(',')[0]}, {unit}" + " per epoch" * (unit != "MiB")
            value = partial(figures.scaled, measure.epoch, SCALES.get(unit, 1))
            draw = partial(figures.over_epochs, comparison, title, value, True)
            pictures.append(Picture(f"cost-{measure.epoch}", draw))
    how = f"One cost per panel over all epochs; the seconds are of the steps alone. {MARKED}"
    section.add("Time and memory", how, pictures)
    if not epochs:
        section.notes.append("No epoch has been written down yet; a run writes them after its first task.")
    return section


def gallery_section(comparison: Comparison) -> Section:
    section, shown = Section("gallery", "What the encoder learned to see"), []
    for group in comparison.groups:
        if group.gallery:
            shown.append(group)
        else:
            section.notes.append(f"No pictures of {group.label}: {group.runs[0].gallery_problem}.")
    how = "An image, then those with the nearest features; faded and underlined where of another class or task."
    section.add_per_run("Nearest images before and after", how, "neighbours", figures.nearest_images, shown)
    mapped = [g for g in shown if all(look["points"] for look in (g.gallery or {})["looks"].values())]
    how = "Each dot is an image, coloured by its task; close dots have similar features (t-SNE, axes mean nothing)."
    section.add_per_run("Map of the features", how, "features", figures.feature_map, mapped)
    return section
