"""The report's pictures in reading order, each with the sentence that says how to read it, and what is missing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ptlf.report import paired
from ptlf.report.drawing import Drawing
from ptlf.report.figures import accuracy, cost, freezing, frontier, gallery, learning
from ptlf.report.intervals import by_tasks_seen, neighbours
from ptlf.report.measures import COSTS, title_of
from ptlf.report.runs import OLDER, Comparison, Group, policy_of

OVER_TASKS = {
    "accuracy": "After each task, the mean accuracy in % on the classes of all tasks so far; higher is better.",
    "forgetting": "How many points the earlier tasks have lost since their best before the last one; lower is better.",
}
TASKS_SEEN = {  # what a k that grows with the tasks means for them
    "accuracy": " k is the number of tasks seen so far: accuracies after different tasks have different k.",
    "forgetting": " k is the number of tasks seen so far: the accuracies compared here have different k.",
}
# In pictures: of two seeds the t interval would be nine times as wide, and no line could be told from another.
DEVIATION = "{} are one standard deviation over seeds, narrower than an interval."
FULL, HALF, THIRD, PHONE = 1040.0, 500.0, 320.0, 343.0  # widths in pixels
TWO_COLUMNS, ONE_COLUMN = 704.0, 344.0  # on paper, where a unit is 0.7 points: 7 inches and 3.5


@dataclass
class Picture:
    """One drawing at any width. `group` is the run where a figure has a picture per run."""

    name: str
    draw: Callable[[float], Drawing | None]
    group: Group | None = None


@dataclass
class Figure:
    title: str
    how: str
    pictures: list[Picture]
    width: float = FULL


@dataclass
class Part:
    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, how: str, pictures: list[Picture], width: float = FULL) -> None:
        if pictures:
            self.figures.append(Figure(title, how, pictures, width))


def per_run(name: str, draw: Callable[[Group, float], Drawing | None], groups: Sequence[Group]) -> list[Picture]:
    slugs = [re.sub(r"[\W_]", "-", group.label.lower()).strip("-") for group in groups]
    return [Picture(f"{name}-{slug}", partial(draw, group), group) for slug, group in zip(slugs, groups, strict=True)]


def parts(comparison: Comparison) -> list[Part]:
    makers = (answer_part, accuracy_part, learning_part, ratio_part, freezing_part, cost_part, gallery_part)
    return [make(comparison) for make in makers]


def answer_part(comparison: Comparison) -> Part:
    part, base = Part("answer", "The answer"), comparison.baseline
    if not comparison.probes:
        part.title = "What is known without labels, and what it cost"
    seeds = [len(group.runs) for group in comparison.groups]
    dot = "one run" if max(seeds) == 1 else "the mean over seeds" if min(seeds) > 1 else "one run or a mean over seeds"
    better = "accuracy is better to the right, forgetting and every cost" if comparison.probes else "a cost is better"
    how = f"Each dot is {dot}: {better} to the left."
    if base:
        how += f" The dashed line is {base.label}; costs carry their ratio to it."
    marked = any(paired.dagger(group, base, COSTS[0]) for group in comparison.groups)
    how += f" {paired.DAGGER}" * marked
    if max(seeds) > 1:
        how += f" {DEVIATION.format('Whiskers')}"
    if comparison.probes or len(comparison.groups) > 1:  # else there is nothing to compare
        part.add("All runs at a glance", how, [Picture("answer", partial(accuracy.answer, comparison))])
    if base and len(comparison.groups) > 2:
        how = f"Costs relative to {base.label}. The dashed line joins the runs whose means no other one beats in both."
        how += " A thin line joins runs that differ in the final share of frozen units alone, in its order."
        how += f" {DEVIATION.format('Bars')}" * (max(seeds) > 1)
        how += " Some times are of runs of different commits: compare them with care." * marked
        part.add("What accuracy costs", how, [Picture("frontier", partial(frontier.frontier, comparison))])
    if base is None and len(comparison.groups) > 1:
        part.notes.append("No baseline: none of these runs is LUMP without freezing; `--baseline` names another one.")
    return part


def accuracy_part(comparison: Comparison) -> Part:
    part = Part("accuracy", "What was learned, and what was kept")
    several = any(len(group.runs) > 1 for group in comparison.groups)
    for probe in comparison.probes:
        title = title_of(probe)
        tested = [group for group in comparison.groups if probe in group.first["probes"]]
        growing = any(by_tasks_seen(group.first["probes"][probe]) for group in tested)
        for what, how in OVER_TASKS.items():
            line = Picture(f"{what}-{probe}", partial(accuracy.over_tasks, comparison, probe, what))
            how += TASKS_SEEN[what] * growing + f" {DEVIATION.format('Bands')}" * several
            part.add(f"{what.capitalize()} over tasks, {title}", how, [line], HALF)
            if not any(pair for group in comparison.groups for pair in accuracy.by_task(group, probe, what)):
                needed = "one task" if what == "accuracy" else "two tasks"
                part.notes.append(f"No line of {what}, {title}: it needs {what}_by_task of at least {needed}.")
        how = "Accuracy in % after each task (row) on the classes of each task (column)."
        how += " A column shows how the accuracy on one task changes while later tasks are learned."
        heat_map = partial(accuracy.heat_map, probe, accuracy.heat_bounds(comparison, probe))
        if widths := accuracy.half_widths(tested, probe):
            how += f" From the number of test images, the 95 % interval of a cell is at most ±{max(widths):.1f} points."
        records = [group.first["probes"][probe] for group in tested]  # with the same settings, or they are refused
        used = [row for values in records for row in values.get("used_by_task") or []]
        if words := neighbours(records[0] | {"used_by_task": used}):
            how += f" {words.removeprefix(', ')}."
        part.add(f"Accuracy matrix, {title}", how, per_run(f"matrix-{probe}", heat_map, tested), HALF)
    for probe in comparison.known:
        how = "Accuracy in % on the images of `evaluation.reference`, before the first task (0) and after each."
        line = Picture(f"known-{probe}", partial(accuracy.known_before, comparison, probe))
        part.add(f"What it knew before, {title_of(probe)}", how.replace("`", ""), [line], HALF)
    if untested := [group.label for group in comparison.groups if not group.first["probes"]]:
        part.notes.append(
            f"Not evaluated: {', '.join(untested)}. That needs labelled test images and evaluation.enabled."
        )
    return part


def learning_part(comparison: Comparison) -> Part:
    part = Part("learning", "How it learned, without labels")
    names = learning.losses(comparison)
    if names:
        how = "The mean of each loss over every epoch, with its own scale; triangles or dots mark freezing."
        part.add("Losses", how, [Picture("losses", partial(learning.loss_curves, comparison))])
    for key, (title, how) in learning.FEATURES.items():
        part.add(title, how, [Picture(key, partial(learning.over_tasks, comparison, key))], HALF)
    older = [group.label for group in comparison.groups if "features" not in group.first]
    if 0 < len(older) < len(comparison.groups):
        part.notes.append(f"No effective rank and no spread of {', '.join(older)}: {OLDER}.")
    return part


def ratio_part(comparison: Comparison) -> Part:
    part, groups = Part("correlation", "Which units were chosen, and why"), freezing.written(comparison, "ratios")
    how = "A line is a task, a row a unit: far right, the new task would change what the past used; filled dots froze."
    if any(freezing.left_out(group) for group in groups):
        how += " A ratio is missing where it was not needed: even with the maximum, 1, the unit would not have frozen."
    lines = partial(freezing.ratio_lines, freezing.ratio_low(groups))
    part.add("Task-correlation ratio by unit", how, per_run("ratios", lines, groups), HALF)
    if not groups:
        part.notes.append("No run computed correlation ratios; a run with `--freezing.policy correlation` does.")
    supervised = {group.first.get("uses_labels", False) for group in groups}
    if len(supervised) == 1 and comparison.probes:  # else there are no labels
        missing = "self-supervised" if supervised == {True} else "supervised"
        part.notes.append(f"A {missing} run with `--freezing.policy correlation` would stand beside it here.")
    several = [group for group in freezing.written(comparison, "events") if len(freezing.tasks_of(group)) > 1]
    how = "Each cell is the share, in %, of frozen units that two tasks have in common: at 100 the same ones froze."
    width, overlaps = HALF if comparison.tasks > 8 else THIRD, per_run("overlap", freezing.task_overlap, several)
    part.add("Overlap of the selection between tasks", how, overlaps, width)
    if again := freezing.by_epoch(comparison):
        how = "How much of the selection stays when the ratios are computed again in a later epoch; 1 is all of it."
        picture = Picture("overlap-epochs", partial(freezing.epoch_overlap, again))
        part.add("Overlap of the selection between epochs", how, [picture], HALF)
    elif groups:
        part.notes.append("Ratios were computed once per task; `--freezing.update per-epoch` shows how they change.")
    return part


def freezing_part(comparison: Comparison) -> Part:
    part, groups = Part("freezing", "What froze, and when"), freezing.written(comparison, "events")
    how = "Units run down, epochs across, tasks side by side: a filled cell is a unit that was not updated."
    if any(len(group.runs) > 1 for group in groups):
        how += " Paler cells froze in only some of the seeds."
    part.add("Freezing map", how, per_run("freezing", freezing.freezing_map, groups))
    idle = [group for group in comparison.groups if group not in groups]
    for off, why in ((True, " (`freezing.policy none`)"), (False, "")):
        if names := [group.label for group in idle if (policy_of(group.config) == "none") == off]:
            part.notes.append(f"No unit froze in {', '.join(names)}{why}.")
    return part


def cost_part(comparison: Comparison) -> Part:
    part = Part("cost", "What it cost, epoch by epoch")
    if any(group.runs[0].epochs for group in comparison.groups):
        how = "One cost per panel over all epochs; triangles or dots mark freezing; the seconds are of the steps alone."
        part.add("Time and memory", how, [Picture("cost", partial(cost.per_epoch, comparison))])
    else:
        part.notes.append("No epoch has been written down yet; a run writes them after its first task.")
    return part


def gallery_part(comparison: Comparison) -> Part:
    part = Part("gallery", "What the encoder learned to see")
    shown = [group for group in comparison.groups if gallery.shown_gallery(group)]
    missing: dict[str, list[str]] = {}  # by reason
    for group in comparison.groups:
        if group not in shown:
            reason = group.runs[0].gallery_problem or "it is drawn when the run has finished"
            missing.setdefault(reason, []).append(group.label)
    part.notes += [f"No pictures of {', '.join(names)}: {reason}." for reason, names in missing.items()]
    kinds = {"another class" if gallery.has_classes(group) else "another task" for group in shown}
    how = f"An image, then those with the nearest features; of {' or '.join(sorted(kinds))} where faded and underlined."
    part.add("Nearest images before and after", how, per_run("neighbours", gallery.neighbours, shown))
    how = "Each dot is an image, coloured by its task; close dots have similar features (t-SNE, axes mean nothing)."
    part.add("Map of the features", how, per_run("features", gallery.feature_map, shown), HALF)
    return part
