"""The report's pictures in reading order, each with the sentence that says how to read it, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ptlf.report.drawing import Drawing
from ptlf.report.figures import accuracy, cost, freezing, gallery
from ptlf.report.measures import title_of
from ptlf.report.runs import Comparison, Group

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


def parts(comparison: Comparison) -> list[Part]:
    return [
        answer_part(comparison),
        accuracy_part(comparison),
        ratio_part(comparison),
        freezing_part(comparison),
        cost_part(comparison),
        gallery_part(comparison),
    ]


def answer_part(comparison: Comparison) -> Part:
    part = Part("answer", "The answer")
    base = comparison.baseline
    line = f" The dashed line is {base.label}; costs carry their ratio to it." if base else ""
    several = any(len(group.runs) > 1 for group in comparison.groups)
    seeds = " Whiskers are one standard deviation over seeds." if several else ""
    how = f"Each dot is a run: accuracy is better to the right, forgetting and every cost to the left.{line}{seeds}"
    picture = Picture("answer", partial(accuracy.answer, comparison))
    part.figures.append(Figure("All runs at a glance", how, [picture]))
    if base is None and len(comparison.groups) > 1:
        part.notes.append("No baseline: none of these runs is LUMP without freezing; `--baseline` names another one.")
    return part


def accuracy_part(comparison: Comparison) -> Part:
    part = Part("accuracy", "What was learned, and what was kept")
    for probe in comparison.probes:
        title = title_of(probe)
        lines = [
            Picture(f"{what}-{probe}", partial(accuracy.over_tasks, comparison, probe, what))
            for what in ("accuracy", "forgetting")
        ]
        names = (f"Accuracy over tasks, {title}", f"Forgetting over tasks, {title}")
        sentences = (
            "After each task, the mean accuracy in % on the classes of all tasks so far; higher is better.",
            "How many points the earlier tasks have lost since their best before the last one; lower is better.",
        )
        for name, how, line in zip(names, sentences, lines, strict=True):
            part.figures.append(Figure(name, how, [line], HALF))
        for what, needed in (("accuracy", "one task"), ("forgetting", "two tasks")):
            if not any(pair for group in comparison.groups for pair in accuracy.by_task(group, probe, what)):
                note = f"No line of {what}, {title}: it needs {what}_by_task in results.json, of at least {needed}."
                part.notes.append(note)
        bounds = accuracy.heat_bounds(comparison, probe)
        maps = [
            Picture(f"matrix-{probe}-{slug(group)}", partial(accuracy.heat_map, group, probe, bounds), group)
            for group in comparison.groups
            if probe in group.first["probes"]
        ]
        how = (
            "A row is the encoder after a task, a column the classes it is tested on, a cell its accuracy in %: "
            "read down a column to see a task being forgotten."
        )
        part.figures.append(Figure(f"Accuracy matrix, {title}", how, maps, HALF))
    for group in comparison.groups:
        if not group.first["probes"]:
            part.notes.append(f"{group.label} was not evaluated: it needs labelled test images and evaluation.enabled.")
    return part


def ratio_part(comparison: Comparison) -> Part:
    part = Part("correlation", "Which units were chosen, and why")
    groups = freezing.with_ratios(comparison)
    low = freezing.ratio_low(groups)
    pictures = [Picture(f"ratios-{slug(g)}", partial(freezing.ratio_lines, g, low), g) for g in groups]
    if pictures:
        how = (
            "A line is a task, a row a unit from input to output: far right means that what the new task wants to "
            "change lies in what the past used; filled dots froze in that task."
        )
        if any(freezing.left_out(group) for group in groups):
            how += " A unit without a dot would not have been chosen with the highest ratio there is."
        part.figures.append(Figure("Task-correlation ratio by unit", how, pictures, HALF))
    else:
        part.notes.append("No run computed correlation ratios; a run with `--freezing.policy correlation` does.")
    supervised = {group.config["objective"].get("name") == "supervised" for group in groups}
    if len(supervised) == 1:
        missing = "self-supervised" if supervised == {True} else "supervised"
        part.notes.append(f"A {missing} run with `--freezing.policy correlation` would stand beside it here.")
    add_overlaps(part, comparison)
    return part


def add_overlaps(part: Part, comparison: Comparison) -> None:
    several = [group for group in freezing.with_freezing(comparison) if len(freezing.tasks_of(group)) > 1]
    overlaps = [Picture(f"overlap-{slug(g)}", partial(freezing.task_overlap, g), g) for g in several]
    if overlaps:
        how = "Each cell is the share, in %, of frozen units that two tasks have in common: at 100 the same ones froze."
        part.figures.append(
            Figure("Overlap of the selection between tasks", how, overlaps, HALF if comparison.tasks > 8 else THIRD)
        )
    again = freezing.by_epoch(comparison)
    if again:
        how = "How much of the selection stays when the ratios are computed again in a later epoch; 1 is all of it."
        picture = Picture("overlap-epochs", partial(freezing.epoch_overlap, again))
        part.figures.append(Figure("Overlap of the selection between epochs", how, [picture], HALF))
    elif freezing.with_ratios(comparison):
        part.notes.append(
            "Ratios were computed once per task, so nothing changes between epochs; `--freezing.update per-epoch` "
            "would show the overlap of the selection between epochs."
        )


def freezing_part(comparison: Comparison) -> Part:
    part = Part("freezing", "What froze, and when")
    groups = freezing.with_freezing(comparison)
    maps = [Picture(f"freezing-{slug(group)}", partial(freezing.freezing_map, group), group) for group in groups]
    if maps:
        shade = " Paler cells froze in only some of the seeds." if any(len(g.runs) > 1 for g in groups) else ""
        how = f"Units run down, epochs across, tasks side by side: a filled cell is a unit that was not updated.{shade}"
        part.figures.append(Figure("Freezing map", how, maps))
    idle = [group.label for group in comparison.groups if group not in groups]
    if idle:
        part.notes.append(f"Nothing froze in {', '.join(idle)}; `--freezing.policy` names what would.")
    return part


def cost_part(comparison: Comparison) -> Part:
    part = Part("cost", "What it cost, epoch by epoch")
    if any(group.runs[0].epochs for group in comparison.groups):
        how = (
            "Each panel is one cost over all epochs of the stream; triangles (dots, where many) mark freezing; "
            "the seconds are of the steps, without correlation and rebuilding."
        )
        part.figures.append(Figure("Time and memory", how, [Picture("cost", partial(cost.per_epoch, comparison))]))
    else:
        part.notes.append("No epoch has been written down yet; a run writes them after its first task.")
    return part


def gallery_part(comparison: Comparison) -> Part:
    part = Part("gallery", "What the encoder learned to see")
    near, maps = [], []
    for group in comparison.groups:
        run = gallery.shown_run(group)
        if run is None:
            reason = group.runs[0].gallery_problem or "it is drawn when the run has finished"
            part.notes.append(f"No pictures of {group.label}: {reason}.")
            continue
        near.append(Picture(f"neighbours-{slug(group)}", partial(gallery.neighbours, group, run), group))
        maps.append(Picture(f"features-{slug(group)}", partial(gallery.feature_map, group, run), group))
    if near:
        how = (
            "Each row begins with a test image, then come the images whose features are nearest to it; "
            "faded and underlined are those of another class."
        )
        part.figures.append(Figure("Nearest images before and after", how, near))
        how = "Each dot is an image, coloured by its task; close dots have similar features (t-SNE, axes mean nothing)."
        part.figures.append(Figure("Map of the features", how, maps, HALF))
    return part


def slug(group: Group) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in group.label.lower()).strip("-")


def drawings(comparison: Comparison) -> Iterator[tuple[str, Drawing]]:
    """Every picture at print width, by file name."""
    for part in parts(comparison):
        for figure in part.figures:
            for picture in figure.pictures:
                small = figure.width < FULL and comparison.tasks <= 10
                drawing = picture.draw(ONE_COLUMN if small else TWO_COLUMNS)
                if drawing is not None:
                    yield picture.name, drawing
