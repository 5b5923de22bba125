"""The report: one HTML file that needs nothing else, and the same pictures as files."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ptlf import __version__
from ptlf.core.files import write_whole
from ptlf.report import paired
from ptlf.report.drawing import FONT, Colours, coded, file_png, file_svg, page_svg, style, themed
from ptlf.report.figures.gallery import MOMENTS, same_class, shown_gallery
from ptlf.report.intervals import wilson
from ptlf.report.measures import (
    FIRST_PEAK,
    HEADLINE_COSTS,
    MEANS,
    WHOLE_PEAK,
    Measure,
    main_measures,
    probe_measures,
    recorded,
    steady,
    waited_for_compiler,
)
from ptlf.report.runs import FEATURES, LATER_KEPT, OLDER, Comparison, Group, RunRecord, read_comparison
from ptlf.report.sections import Figure, Picture, sections
from ptlf.run.compat import arrived_tasks, identity_settings
from ptlf.run.results import STEADY

COLUMNS = 8  # of a table
NOISE = 0.02  # share of a cost: a smaller difference is not told in the headline
MANY = 3  # runs beside the baseline, from which on the page says who is best at what in place of a sentence per run


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """How many runs it shows."""
    comparison = read_comparison(folders, baseline)
    write_whole(out, page(comparison))
    return sum(len(group.runs) for group in comparison.groups)


def write_figures(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """Each picture as NAME.svg and NAME.png on white. How many files."""
    comparison = read_comparison(folders, baseline)
    colours, written = themed(False, comparison.tasks), 0
    out.mkdir(parents=True, exist_ok=True)
    with style(colours):
        figures = [figure for section in sections(comparison) for figure in section.figures]
        for picture in (picture for figure in figures for picture in figure.pictures):
            if canvas := picture.draw(colours):
                write_whole(out / f"{picture.name}.svg", file_svg(canvas, picture.name))
                write_whole(out / f"{picture.name}.png", file_png(canvas))
                written += 2
    return written


def page(comparison: Comparison) -> str:
    tidy: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, **tidy)
    templates.filters["code"] = as_code
    groups, base, measures = comparison.groups, comparison.baseline, main_measures(comparison, comparison.probes)
    others = paired.several_seeds(groups, base)
    return templates.get_template("page.html").render(
        comparison=comparison,
        groups=groups,
        base=base,
        probes=comparison.probes,
        epochs=" or ".join(map(str, comparison.epochs)),
        title=title_of_page(comparison),
        sections=[
            vars(section) | {"figures": drawn(section.figures, comparison.tasks)} for section in sections(comparison)
        ],
        measures=measures,
        columns=math.ceil(len(measures) / max(math.ceil(len(measures) / COLUMNS), 1)) or 1,  # of tables of like width
        tested=any(group.interval(("probes", p, "accuracy")) for group in groups for p in comparison.probes),
        older=OLDER if any("test_images" not in group.first for group in groups if group.first["probes"]) else "",
        costs=steady(HEADLINE_COSTS, groups),
        later=[row for group in groups for row in later_rows(group)],
        unlabelled=[unlabelled(group) for group in groups if not group.first["probes"]],
        others=others,
        compared=measures + recorded(comparison, [WHOLE_PEAK]) if others else [],
        paired=paired,
        relative=relative,
        steady=STEADY if waited_for_compiler(groups) else "",
        dagger=paired.DAGGER if paired.any_dagger(groups, base) else "",
        means=MEANS if any(group.values(LATER_KEPT) for group in groups) else "",
        first_peak=FIRST_PEAK if recorded(comparison, [WHOLE_PEAK]) else "",
        problems=list(problems(comparison)),
        settings=differing_values(comparison),
        commands=commands_to_repeat,
        to_yaml=lambda config: yaml.safe_dump(config, sort_keys=False),
        version=__version__,
        light=themed(False, comparison.tasks),
        dark=themed(True, comparison.tasks),
        font=Markup(FONT),
        **headline(comparison),
    )


def as_code(note: str) -> Markup:
    """Words between backticks as code."""
    pieces = [escape(piece) for piece in note.split("`")]
    return Markup("").join(Markup(f"<code>{piece}</code>") if n % 2 else piece for n, piece in enumerate(pieces))


def drawn(figures: Sequence[Figure], tasks: int) -> list[dict[str, Any]]:
    """Those that have something to show, with their pictures."""
    with style(colours := coded(tasks)):
        shown = [vars(figure) | {"drawn": pictures_as_svg(figure, colours)} for figure in figures]
    return [figure for figure in shown if figure["drawn"]]


def pictures_as_svg(figure: Figure, colours: Colours) -> list[tuple[Picture, Markup]]:
    canvases = [(picture, picture.draw(colours)) for picture in figure.pictures]
    labels = {p.name: f"{figure.title}, {p.group.label}" if p.group else figure.title for p in figure.pictures}
    return [(p, page_svg(canvas, p.name, labels[p.name], colours)) for p, canvas in canvases if canvas]


def title_of_page(comparison: Comparison) -> str:
    base, stream = comparison.baseline, comparison.groups[0].config["stream"]["name"]
    others = [group.label for group in comparison.groups if group is not base]
    if len(comparison.groups) == 1:
        return comparison.groups[0].label
    kind = "configurations" if any(len(group.runs) > 1 for group in comparison.groups) else "runs"
    names = " and ".join(others) if len(others) < 3 else f"{len(others)} {kind}"
    return f"{names} against {base.label} on {stream}" if base else f"{names} on {stream}"


def headline(comparison: Comparison) -> dict[str, Any]:
    """What came out: the runs with a sentence each, or who is best at what where there are many."""
    base = comparison.baseline
    found: dict[str, Any] = {"told": [], "best": [], "joint": []}
    if not comparison.probes:
        return found
    accuracy, forgetting, before = probe_measures(comparison.probes[0])
    others = [group for group in comparison.groups if group is not base] or comparison.groups
    told = [group for group in others if group.values(accuracy.path)]
    found |= {"accuracy": accuracy, "forgetting": forgetting, "before": before}
    if len(told) < MANY:
        lines = [(g, interval_in_words(g, base, accuracy), against(g, base, accuracy, forgetting)) for g in told]
        return found | {"told": lines}
    best, joint = [], [group for group in told if group.joint]
    ranked = [group for group in comparison.groups if group not in joint] or comparison.groups
    scores = [measure for measure in main_measures(comparison, comparison.probes[:1]) if not measure.cost]
    for measure in scores + recorded(comparison, steady(HEADLINE_COSTS, comparison.groups)):
        means = [(mean, group) for group in ranked if (mean := group.mean(measure.path)) is not None]
        means.sort(key=lambda pair: pair[0], reverse=measure.rising)
        if means and not (measure.cost and within_noise(means, base)):
            best.append((measure, means[0][1], standing(means[0][1], base, measure)))
    return found | {"best": best, "joint": joint}


def within_noise(means: Sequence[tuple[float, Group]], base: Group | None) -> bool:
    """Whether the least of these costs, which are sorted, is no less than the baseline's, but for noise; where it is
    the baseline's own, or there is none, than the next one."""
    least, *others = means
    rival = next((mean for mean, group in others if group is base), others[0][0] if others else None)
    return rival is not None and least[0] > (1 - NOISE) * rival


def unlabelled(group: Group) -> dict[str, Any]:
    """What is known of a run without labels: a row of its features per task, and in words what came out."""
    found = {title: group.feature(key) for key, title in FEATURES.items()}
    names, tasks = group.first["tasks"], sorted(found["spread"])
    rows = [
        (f"task {task}, {names[task - 1]}", [(title, *values[task]) for title, values in found.items()])
        for task in tasks
    ]
    words = []
    for title, values in found.items() if tasks else ():
        before, after = values[tasks[-1]]
        over = f"{values[tasks[0]][1]:.3g} after the first task, {after:.3g} after the last"
        start = f" ({group.start} {before:.3g})" if before is not None else ""
        words.append(f"{title} {over if len(tasks) > 1 else f'{after:.3g}'}{start}")
    features = f"Of the features: {'; '.join(words)}." if words else ""
    pictures, near = shown_gallery(group), ""
    if pictures and len(names) > 1:
        total = sum(map(len, pictures["looks"]["after"]["neighbours"]))
        first, last = (same_class(pictures, moment) for moment in MOMENTS)
        near = f"Of the nearest images below, {last} of {total} are of the same task; {group.start}: {first}."
        near += " Fewer than before training." * (last < first)
    command = f"ptlf evaluate {shlex.quote(str(group.runs[0].folder))} --stream.labelled FOLDER"
    return {"group": group, "rows": rows, "words": [features, near], "command": command, "test": later_rows(group)[:1]}


def later_rows(group: Group) -> list[dict[str, Any]]:
    """A row per probe of each seed's latest test on labels that came later."""
    rows = []
    for run, test in [(run, run.later) for run in group.runs if run.later]:
        tasks = len(run.results["tasks"])
        learnt = str(tasks) if test["tasks"] == tasks else f"{test['tasks']} of {tasks}"
        row = {"group": group, "seed": run.results.get("seed"), "tasks": learnt, "date": test["date"][:10]}
        for probe, values in test["probes"].items():
            if (accuracy := values.get("accuracy")) is None:
                continue
            before, images = values.get("untrained_accuracy"), sum(values["test_images"])
            shown = {"accuracy": f"{accuracy:.2f}", "interval": "{:.1f} to {:.1f}".format(*wilson(accuracy, images))}
            shown |= {"before": "-" if before is None else f"{before:.2f}", "images": f"{images} of {test['images']}"}
            k = [f", k = {used['k']}" for used in values.get("used_by_task") or [] if "k" in used]
            rows.append(row | shown | {"probe": probe + "".join(k[:1])})
    return rows


def interval_in_words(group: Group, base: Group | None, accuracy: Measure) -> str:
    """The 95 % interval of a run's accuracy and what it is computed from; empty beside a difference with one."""
    difference = paired.compared(group, base, accuracy)
    if difference and difference.half is not None:
        return ""
    found, bounds = paired.interval(group.values(accuracy.path)), group.interval(accuracy.path)
    if found and found.half is not None:
        return f"95 % over {found.count} seeds: {found.mean - found.half:.1f} to {found.mean + found.half:.1f}"
    return "95 % from the number of test images: {:.1f} to {:.1f}".format(*bounds) if bounds else ""


def against(group: Group, base: Group | None, accuracy: Measure, forgetting: Measure) -> str:
    """The baseline's accuracy and forgetting, and the differences by seed."""
    if base is None or base is group:
        return ""
    both = (accuracy, forgetting)
    theirs = [f"{m.show(value)} {m.unit}" for m in both if (value := base.mean(m.path)) is not None]
    if not theirs:
        return f"{base.label} was not evaluated."
    found, many = paired.compared(group, base, accuracy), len(base.runs)
    if many > (found.count if found else 1):  # else by seed, or of one
        theirs.append(f"means of {many} seeds")
    named = f"{base.label} ({', '.join(theirs)})"
    if found is None or found.half is None:
        return f"One seed does not tell it from {named}." if found else f"No seed in common with {named}."
    by_seed = [f"{m.short} {paired.words(one, m)}" for m in both if (one := paired.compared(group, base, m))]
    return f"Against {named}, by seed: {', '.join(by_seed)} (95 %, {found.count} seeds)."


def standing(group: Group, base: Group | None, measure: Measure) -> str:
    """What seeds allow to say of an accuracy or of forgetting beside the baseline's; of costs `relative` says it."""
    if base is None or base is group or measure.cost:
        return ""
    found = paired.compared(group, base, measure)
    if found is None or found.half is None:
        return f"; one seed does not tell it from {base.label}"
    said = paired.verdict(found, measure.rising)
    return f"; {said} than {base.label} by seed" if said else f"; {found.count} seeds do not tell it from {base.label}"


def relative(group: Group, base: Group | None, measure: Measure) -> tuple[str, str] | None:
    """A cost's ratio to the baseline's. Of seconds also how sure it is; other costs depend little on the seed."""
    found = paired.ratio(group, base, measure)
    if found is None:
        return None
    seeds = "one seed" if found.count else "no seed in common"
    if found.ends is not None:
        seeds = "95 %: {:.2f} to {:.2f}, {} seeds".format(*found.ends, found.count)
    return paired.times(group, base, measure), seeds if measure.unit == "s" else ""


def problems(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What is wrong, and of what."""
    groups = comparison.groups
    yield from ((folder.name, f" is left out: {why}.") for folder, why in comparison.damaged.items())
    yield from ((g.label, f" is {g.state}; it is shown as far as it got.") for g in groups if g.state)
    yield from ((g.label, f": {warning}.") for g in groups for warning in (*g.worse(), *g.falling()))
    if len(comparison.epochs) > 1:
        trained = f"The runs trained for {' or '.join(map(str, comparison.epochs))} epochs of a task"
        yield "", f"{trained}: their costs, and what costs are relative to, differ for that too; so may their accuracy."
    machines = {run.results["environment"].get("device_name") for group in groups for run in group.runs}
    if len(machines) > 1:
        named = ", ".join(sorted(map(str, machines)))
        yield "", f"The runs are of different machines ({named}): their seconds and peaks do not compare."
    yield from ((g.label, f": {g.doubt}") for g in groups if g.doubt)


def differing_values(comparison: Comparison) -> dict[str, list[str]]:
    """The settings in which the runs differ, with each run's value; the rest they share, or has no effect."""
    flat = [identity_settings(group.config) for group in comparison.groups]
    as_yaml = {"None": "null", "True": "true", "False": "false"}
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = {key: [as_yaml.get(value := str(one.get(key, "-")), value) for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def commands_to_repeat(run: RunRecord) -> list[str]:
    """What repeats it, as long as its folder is there: tasks that arrived are learnt again from where it keeps them."""
    file, arrived = run.folder / "config.yaml", arrived_tasks(run.results)
    packs = sorted(run.folder.glob("tasks/[0-9]*-*"), key=lambda path: path.name.partition("-")[0].zfill(9))
    if not file.exists() or len(packs) != len(arrived):
        return []
    settings, known = f"--config {shlex.quote(str(file))}", Counter(checksum for _, checksum in arrived)
    begins = len(arrived) == len(run.results["tasks"])  # nothing was trained before
    found = [] if begins else [f"ptlf train {settings} --out again"]
    for pack, (name, checksum) in zip(packs, arrived, strict=True):
        words = ["ptlf learn again", shlex.quote(str(pack)), f"--name {shlex.quote(name)}"]
        words += [settings] * (not found) + ["--again"] * (checksum is not None and known[checksum] > 1)
        found.append(" ".join(words))
    return found
