"""The report's pictures in reading order, each with the sentence that says how to read it, and what is missing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from matplotlib.figure import Figure as Canvas

from ptlf.report import paired
from ptlf.report.drawing import Colours
from ptlf.report.figures import accuracy, freezing, frontier, gallery, lines
from ptlf.report.intervals import by_tasks_seen, neighbours_used
from ptlf.report.measures import COSTS, SCALES, Measure, main_measures, probe_measures, title_of
from ptlf.report.runs import FEATURES, OLDER, Comparison, Group, policy_of
from ptlf.run.results import Json

OVER_TASKS = {
    "accuracy": "After each task, the mean accuracy in % on the classes of all tasks so far; higher is better.",
    "forgetting": "Drop from each earlier task's best accuracy, in percentage points; lower is better.",
}
TASKS_SEEN = " k is the number of tasks seen so far: accuracies after different tasks have different k."
OF_FEATURES = {
    "effective_rank": "After each task, how many directions the features of its images use (exp of the singular "
    "values' entropy).",
    "spread": "After each task, how far the normalised features of its images differ: 1 is evenly, 0 a collapse.",
}
# In pictures: of two seeds the t interval would be nine times as wide, and no line could be told from another.
DEVIATION = "{} are one standard deviation over seeds, narrower than an interval."
MARKED = "Triangles or dots mark freezing."


@dataclass
class Picture:
    """group: the run, where a figure has a picture per run."""

    name: str
    draw: Callable[[Colours], Canvas | None]
    group: Group | None = None


@dataclass
class Figure:
    """grid: how many pictures stand beside each other on a wide page."""

    title: str
    how: str
    pictures: list[Picture]
    grid: str = "halves"


@dataclass
class Section:
    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, how: str, pictures: Sequence[Picture], grid: str = "halves") -> None:
        if pictures:
            self.figures.append(Figure(title, how, list(pictures), grid))


def per_run(name: str, draw: Callable[[Group, Colours], Canvas | None], groups: Sequence[Group]) -> list[Picture]:
    slugs = [re.sub(r"[\W_]", "-", group.label.lower()).strip("-") for group in groups]
    return [Picture(f"{name}-{slug}", partial(draw, group), group) for slug, group in zip(slugs, groups, strict=True)]


def sections(comparison: Comparison) -> list[Section]:
    makers = (
        answer_section,
        accuracy_section,
        learning_section,
        ratio_section,
        freezing_section,
        cost_section,
        gallery_section,
    )
    return [make(comparison) for make in makers]


def answer_section(comparison: Comparison) -> Section:
    section, base = Section("answer", "The answer"), comparison.baseline
    if not comparison.probes:
        section.title = "What is known without labels, and what it cost"
    seeds = [len(group.runs) for group in comparison.groups]
    dot = "one run" if max(seeds) == 1 else "the mean over seeds" if min(seeds) > 1 else "one run or a mean over seeds"
    better = "accuracy is better to the right, forgetting and every cost" if comparison.probes else "a cost is better"
    how = f"Each dot is {dot}: {better} to the left."
    if base:
        how += f" The dotted line is {base.label}; costs carry their ratio to it."
    marked = paired.any_dagger(comparison.groups, base)
    how += f" {paired.DAGGER}" * marked
    if max(seeds) > 1:
        how += f" {DEVIATION.format('Whiskers')}"
    if comparison.probes or len(comparison.groups) > 1:  # else there is nothing to compare
        measures = main_measures(comparison, comparison.probes[:1])
        glance = [Picture("-".join(("answer", *m.path[1:])), partial(accuracy.answer, comparison, m)) for m in measures]
        section.add("All runs at a glance", how, glance, "thirds")
    if base and comparison.probes and len(comparison.groups) > 2:
        how = f"Costs relative to {base.label}. The dashed line joins the runs whose means no other one beats in both."
        how += " A thin line joins runs that differ in the final share of frozen units alone, in its order."
        how += f" {DEVIATION.format('Bars')}" * (max(seeds) > 1)
        how += " Some times are of runs of different commits: compare them with care." * marked
        pictures = [
            Picture(f"frontier-{measure.short}-{name}", partial(frontier.frontier, comparison, cost, measure))
            for measure in probe_measures(comparison.probes[0])[:2]
            for name, cost in zip(("time", "memory"), frontier.COSTS, strict=True)
            if len(frontier.points(comparison, cost, measure.path)) > 2
        ]
        section.add("What accuracy costs", how, pictures)
    if base is None and len(comparison.groups) > 1:
        section.notes.append(
            "No baseline: none of these runs is LUMP without freezing; `--baseline` names another one."
        )
    return section


def accuracy_section(comparison: Comparison) -> Section:
    section = Section("accuracy", "What was learned, and what was kept")
    several = f" {DEVIATION.format('Bands')}" * any(len(group.runs) > 1 for group in comparison.groups)
    for probe in comparison.probes:
        title = title_of(probe)
        tested = [group for group in comparison.groups if probe in group.first["probes"]]
        growing = any(by_tasks_seen(group.first["probes"][probe]) for group in tested)
        for what, how in OVER_TASKS.items():
            found = [(group, lines.by_task(group, probe, what)) for group in comparison.groups]
            if any(series for _, series in found):
                line = Picture(f"{what}-{probe}", partial(lines.over_tasks, found, 100.0))
                how += TASKS_SEEN * growing + several
                section.add(f"{what.capitalize()} over tasks, {title}", how, [line])
            else:
                needed = "one task" if what == "accuracy" else "two tasks"
                section.notes.append(f"No line of {what}, {title}: it needs {what}_by_task of at least {needed}.")
        how = "Accuracy in % after each task (row) on the classes of each task (column)."
        how += " A column shows how the accuracy on one task changes while later tasks are learned."
        draw = partial(accuracy.matrix, probe, accuracy.matrix_bounds(comparison.groups, probe))
        if widths := accuracy.half_widths(tested, probe):
            how += f" From the number of test images, the 95 % interval of a cell is at most ±{max(widths):.1f} points."
        records = [group.first["probes"][probe] for group in tested]  # with the same settings, or they are refused
        used = [row for values in records for row in values.get("used_by_task") or []]
        if words := neighbours_used(records[0] | {"used_by_task": used}):
            how += f" {words.removeprefix(', ')}."
        shown = [group for group in tested if accuracy.matrix_cells(group, probe)]
        section.add(f"Accuracy matrix, {title}", how, per_run(f"matrix-{probe}", draw, shown))
    for probe in comparison.known:
        how = "Accuracy in % on the images of evaluation.reference, before the first task (0) and after each."
        known = [(group, lines.known_by_task(group, probe)) for group in comparison.groups]
        line = Picture(f"known-{probe}", partial(lines.over_tasks, known, 100.0))
        section.add(f"What it knew before, {title_of(probe)}", how, [line])
    if untested := [group.label for group in comparison.groups if not group.first["probes"]]:
        needs = "That needs labelled test images and evaluation.enabled"
        section.notes.append(f"Not evaluated: {', '.join(untested)}. {needs}.")
    return section


def learning_section(comparison: Comparison) -> Section:
    section = Section("learning", "How it learned, without labels")
    epochs = [line for group in comparison.groups for run in group.runs for line in run.epochs]
    names = dict.fromkeys(name for line in epochs for name in line.get("loss", {}))
    pictures = [Picture(f"loss-{name}", partial(loss_picture, comparison, name)) for name in names]
    section.add("Losses", f"The mean of each loss over every epoch, with its own scale. {MARKED}", pictures)
    for key, how in OF_FEATURES.items():
        found = [(group, lines.features_by_task(group, key)) for group in comparison.groups]
        if any(series for _, series in found):
            picture = Picture(key, partial(lines.over_tasks, found, None))
            section.add(f"{FEATURES[key].capitalize()} of the features", how, [picture])
    older = [group.label for group in comparison.groups if "features" not in group.first]
    if 0 < len(older) < len(comparison.groups):
        section.notes.append(f"No effective rank and no spread of {', '.join(older)}: {OLDER}.")
    return section


def loss_picture(comparison: Comparison, name: str, colours: Colours) -> Canvas | None:
    def value(line: Json) -> float | None:
        return line.get("loss", {}).get(name)

    return lines.over_epochs(comparison, name, value, False, False, colours)


def ratio_section(comparison: Comparison) -> Section:
    section, groups = Section("correlation", "Which units were chosen, and why"), freezing.having(comparison, "ratios")
    how = "A line is a task, a row a unit: far right, the new task would change what the past used; filled dots froze."
    if any(freezing.units_without_ratio(group) for group in groups):
        how += " A ratio is missing where it was not needed: even with the maximum, 1, the unit would not have frozen."
    draw = partial(freezing.ratio_lines, freezing.ratio_low(groups))
    section.add("Task-correlation ratio by unit", how, per_run("ratios", draw, groups))
    if not groups:
        section.notes.append("No run computed correlation ratios; a run with `--freezing.policy correlation` does.")
    supervised = {group.first.get("uses_labels", False) for group in groups}
    if len(supervised) == 1 and comparison.probes:  # else there are no labels
        missing = "self-supervised" if supervised == {True} else "supervised"
        section.notes.append(f"A {missing} run with `--freezing.policy correlation` would stand beside it here.")
    several = [group for group in freezing.having(comparison, "events") if len(freezing.tasks_of(group)) > 1]
    how = "Each cell is the share, in %, of frozen units that two tasks have in common: at 100 the same ones froze."
    overlaps = per_run("overlap", freezing.task_overlap, several)
    section.add("Overlap of the selection between tasks", how, overlaps, "halves" if comparison.tasks > 8 else "thirds")
    again = [group for group in comparison.groups if policy_of(group.config) == "correlation"]
    if again := [group for group in again if freezing.overlap_by_epoch(group)]:
        how = "How much of the selection stays when the ratios are computed again in a later epoch; 1 is all of it."
        picture = Picture("overlap-epochs", partial(freezing.epoch_overlap, again))
        section.add("Overlap of the selection between epochs", how, [picture])
    elif groups:
        section.notes.append("Ratios were computed once per task; `--freezing.update per-epoch` shows how they change.")
    return section


def freezing_section(comparison: Comparison) -> Section:
    section, groups = Section("freezing", "What froze, and when"), freezing.having(comparison, "events")
    how = "Units run down, the epochs of all tasks across: a filled cell is a unit that was not updated."
    if any(len(group.runs) > 1 for group in groups):
        how += " Paler cells froze in only some of the seeds."
    section.add("Freezing map", how, per_run("freezing", freezing.freezing_map, groups))
    idle = [group for group in comparison.groups if group not in groups]
    for off, why in ((True, " (`freezing.policy none`)"), (False, "")):
        if names := [group.label for group in idle if (policy_of(group.config) == "none") == off]:
            section.notes.append(f"No unit froze in {', '.join(names)}{why}.")
    return section


def cost_section(comparison: Comparison) -> Section:
    section = Section("cost", "What it cost, epoch by epoch")
    lines_of = [line for group in lines.with_epochs(comparison) for run in group.runs for line in run.epochs]
    pictures = []
    for measure in (measure for measure in COSTS if measure.epoch):
        if highest := max((line.get(measure.epoch) or 0 for line in lines_of), default=0):
            pictures.append(Picture(f"cost-{measure.epoch}", partial(cost_picture, comparison, measure, highest)))
    how = f"One cost per panel over all epochs; the seconds are of the steps alone. {MARKED}"
    section.add("Time and memory", how, pictures)
    if not lines_of:
        section.notes.append("No epoch has been written down yet; a run writes them after its first task.")
    return section


def cost_picture(comparison: Comparison, measure: Measure, highest: float, colours: Colours) -> Canvas | None:
    """Seconds differ from epoch to epoch. Bytes are the most that is kept at once; the others add up."""
    unit = "G" if measure.unit == "T" and highest < SCALES["T"] else measure.unit
    title = f"{measure.title.split(',')[0]}, {unit}" + " per epoch" * (unit != "MiB")

    def value(line: Json) -> float | None:
        return None if line.get(measure.epoch) is None else line[measure.epoch] / SCALES.get(unit, 1)

    return lines.over_epochs(comparison, title, value, unit != "s", True, colours)


def gallery_section(comparison: Comparison) -> Section:
    section = Section("gallery", "What the encoder learned to see")
    shown = [group for group in comparison.groups if gallery.shown_gallery(group)]
    missing: dict[str, list[str]] = {}  # by reason
    for group in comparison.groups:
        if group not in shown:
            reason = group.runs[0].gallery_problem or "it is drawn when the run has finished"
            missing.setdefault(reason, []).append(group.label)
    section.notes += [f"No pictures of {', '.join(names)}: {reason}." for reason, names in missing.items()]
    kinds = {"another class" if gallery.has_classes(group) else "another task" for group in shown}
    how = f"An image, then those with the nearest features; of {' or '.join(sorted(kinds))} where faded and underlined."
    section.add("Nearest images before and after", how, per_run("neighbours", gallery.nearest_images, shown))
    mapped = [group for group in shown if gallery.has_maps(group)]
    how = "Each dot is an image, coloured by its task; close dots have similar features (t-SNE, axes mean nothing)."
    section.add("Map of the features", how, per_run("features", gallery.feature_map, mapped))
    return section
