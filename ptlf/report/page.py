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
    COSTS,
    FIRST_PEAK,
    HEADLINE_COSTS,
    MEANS,
    WHOLE_PEAK,
    Measure,
    compiled,
    main_measures,
    probe_measures,
    recorded,
    steady,
)
from ptlf.report.parts import Figure, Part, Picture, parts
from ptlf.report.runs import FEATURES, LATER_KEPT, OLDER, Comparison, Group, RunRecord, read_comparison
from ptlf.run.compat import arrived_tasks, identity_settings
from ptlf.run.results import STEADY

COLUMNS = 8  # of a table
NOISE = 0.02  # share of a cost: a smaller difference is not told in the headline
MANY = 3  # runs beside the baseline, from which on the page says who is best at what in place of a sentence per run


def report(folders: Sequence[Path], out: Path | None, figures: Path | None, baseline: str | None) -> None:
    """The command: the pictures as files, the page, or both."""
    if figures:
        print(f"{write_figures(folders, figures, baseline)} files in {figures}")
    if out or not figures:
        out = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
        runs = write_report(folders, out, baseline)
        print(f"{out} ({runs} run{'s' * (runs > 1)})")


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """How many runs it shows."""
    comparison = read_comparison(folders, baseline)
    write_whole(out, page(comparison))
    return sum(len(group.runs) for group in comparison.groups)


def write_figures(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """Each picture as NAME.svg and NAME.png on white. How many files."""
    comparison = read_comparison(folders, baseline)
    colours = themed(False, comparison.tasks)
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    with style(colours):
        for picture in (p for part in parts(comparison) for figure in part.figures for p in figure.pictures):
            if canvas := picture.draw(colours):
                write_whole(out / f"{picture.name}.svg", file_svg(canvas, picture.name))
                write_whole(out / f"{picture.name}.png", file_png(canvas))
                written += 2
    return written


def page(comparison: Comparison) -> str:
    tidy: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, **tidy)
    templates.filters["code"] = code
    config = comparison.groups[0].config
    colours = coded(comparison.tasks)
    stream, tasks, epochs = config["stream"]["name"], comparison.tasks, comparison.epochs
    numbers = f"{tasks} task{'s' * (tasks != 1)}, {in_words(epochs)} epoch{'s' * (epochs != [1])} each"
    return templates.get_template("page.html").render(
        title=title_of_page(comparison, stream),
        kicker=f"{stream} · {numbers}, {config['encoder']['name']}",
        parts=[shown_part(part, colours) for part in parts(comparison)],
        groups=comparison.groups,
        base=comparison.baseline,
        tables=tables(main_measures(comparison, comparison.probes)),
        probes=comparison.probes,
        tested=any(g.interval(("probes", p, "accuracy")) for g in comparison.groups for p in comparison.probes),
        older=OLDER if any("test_images" not in g.first for g in comparison.groups if g.first["probes"]) else "",
        costs=steady(HEADLINE_COSTS, comparison.groups),
        later=[row for group in comparison.groups for row in later_rows(group)],
        unlabelled=[unlabelled(group) for group in comparison.groups if not group.first["probes"]],
        paired=paired_rows(comparison),
        unit=paired.unit,
        half_of=paired.half_of,
        over_seeds=paired.OVER_SEEDS,
        relative=relative,
        steady=STEADY if compiled(comparison.groups) else "",
        dagger=paired.DAGGER if any(paired.dagger(g, comparison.baseline, COSTS[0]) for g in comparison.groups) else "",
        means=MEANS if any(group.values(LATER_KEPT) for group in comparison.groups) else "",
        first_peak=FIRST_PEAK if recorded(comparison, [WHOLE_PEAK]) else "",
        problems=list(problems(comparison)),
        differences=differences(comparison),
        details=[details(run, group) for group in comparison.groups for run in group.runs],
        version=__version__,
        light=themed(False, comparison.tasks),
        dark=themed(True, comparison.tasks),
        font=Markup(FONT),
        **headline(comparison),
    )


def in_words(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def code(note: str) -> Markup:
    """Words between backticks as code."""
    pieces = [escape(piece) for piece in note.split("`")]
    return Markup("").join(Markup(f"<code>{piece}</code>") if n % 2 else piece for n, piece in enumerate(pieces))


def title_of_page(comparison: Comparison, stream: str) -> str:
    base = comparison.baseline
    others = [group.label for group in comparison.groups if group is not base]
    if not others or len(comparison.groups) == 1:
        return comparison.groups[0].label
    kind = "configurations" if any(len(group.runs) > 1 for group in comparison.groups) else "runs"
    names = " and ".join(others) if len(others) < 3 else f"{len(others)} {kind}"
    return f"{names} against {base.label} on {stream}" if base else f"{names} on {stream}"


def headline(comparison: Comparison) -> dict[str, Any]:
    """What came out: the runs with a sentence each, or who is best at what where there are many."""
    if not comparison.probes:
        return {"told": [], "best": [], "joint": []}
    accuracy, forgetting, before = probe_measures(comparison.probes[0])
    base = comparison.baseline
    others = [group for group in comparison.groups if group is not base] or comparison.groups
    told = [group for group in others if group.values(accuracy.path)]
    if len(told) < MANY:
        lines = [(group, sure(group, base, accuracy), against(group, base, accuracy, forgetting)) for group in told]
        named = {"accuracy": accuracy, "forgetting": forgetting, "before": before}
        return {"told": lines, "best": [], "joint": []} | named
    best, joint = [], [group for group in told if group.joint]
    ranked = [group for group in comparison.groups if group not in joint] or comparison.groups
    scores = [measure for measure in main_measures(comparison, comparison.probes[:1]) if not measure.cost]
    for measure in scores + recorded(comparison, steady(HEADLINE_COSTS, comparison.groups)):
        means = [(mean, group) for group in ranked if (mean := group.mean(measure.path)) is not None]
        means.sort(key=lambda pair: pair[0], reverse=measure.rising)
        if means and not (measure.cost and alike(means, base)):
            best.append((measure, means[0][1], standing(means[0][1], base, measure)))
    return {"told": [], "best": best, "joint": joint, "accuracy": accuracy}


def alike(means: Sequence[tuple[float, Group]], base: Group | None) -> bool:
    """Whether the least of these costs, which are sorted, is no less than the baseline's, but for noise; where it is
    the baseline's own, or there is none, than the next one."""
    least, *others = means
    rival = next((mean for mean, group in others if group is base), others[0][0] if others else None)
    return rival is not None and least[0] > (1 - NOISE) * rival


def unlabelled(group: Group) -> dict[str, Any]:
    """What is known of a run without labels: a row of its features per task, and in words what came out."""
    found = {key: group.feature(key) for key in FEATURES}
    names, tasks = group.first["tasks"], sorted(found["spread"])
    rows = [
        (f"task {task}, {names[task - 1]}", [(title, *found[key][task]) for key, title in FEATURES.items()])
        for task in tasks
    ]
    words = []
    for key, title in FEATURES.items() if tasks else ():
        before, after = found[key][tasks[-1]]
        over = f"{found[key][tasks[0]][1]:.3g} after the first task, {after:.3g} after the last"
        words.append(f"{title} {over if len(tasks) > 1 else f'{after:.3g}'}")
        words[-1] += f" ({group.start} {before:.3g})" if before is not None else ""
    features = f"Of the features: {'; '.join(words)}." if words else ""
    pictures = shown_gallery(group)
    near = ""
    if pictures and len(names) > 1:
        total = sum(map(len, pictures["looks"]["after"]["neighbours"]))
        before, after = (same_class(pictures, moment) for moment in MOMENTS)
        near = f"Of the nearest images below, {after} of {total} are of the same task; {group.start}: {before}."
        near += " Fewer than before training." if after < before else ""
    command = f"ptlf evaluate {shlex.quote(str(group.runs[0].folder))} --stream.labelled FOLDER"
    tests = later_rows(group)
    return {"group": group, "rows": rows, "words": [features, near], "command": command, "test": tests[:1]}


def later_rows(group: Group) -> list[dict[str, Any]]:
    """A row per probe of each seed's latest test on labels that came later."""
    rows = []
    for run in (run for run in group.runs if run.later):
        test, seed, tasks = run.later or {}, run.results.get("seed"), len(run.results["tasks"])
        learnt = str(tasks) if test["tasks"] == tasks else f"{test['tasks']} of {tasks}"
        when = {"tasks": learnt, "date": test["date"][:10]}
        for probe, values in test["probes"].items():
            if (accuracy := values.get("accuracy")) is None:
                continue
            before, images = values.get("untrained_accuracy"), sum(values["test_images"])
            figures = {"accuracy": f"{accuracy:.2f}", "interval": "{:.1f} to {:.1f}".format(*wilson(accuracy, images))}
            figures |= {"before": "-" if before is None else f"{before:.2f}", "images": f"{images} of {test['images']}"}
            k = [f", k = {used['k']}" for used in values.get("used_by_task") or [] if "k" in used]
            rows.append({"group": group, "seed": seed, "probe": probe + "".join(k[:1]), **figures, **when})
    return rows


def sure(group: Group, base: Group | None, accuracy: Measure) -> str:
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
    if found is None:
        return f"No seed in common with {named}."
    if found.half is None:
        return f"One seed does not tell it from {named}."
    by_seed = [(m.short, one) for m in both if (one := paired.words(paired.compared(group, base, m), m)) != "-"]
    words = ", ".join(f"{name} {difference}" for name, difference in by_seed)
    return f"Against {named}, by seed: {words} (95 %, {found.count} seeds)."


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
    times = f"{found.mean:.2f}×{paired.dagger(group, base, measure)}"
    if measure.unit != "s":
        return times, ""
    seeds = "one seed" if found.count else "no seed in common"
    if found.ends is not None:
        seeds = "95 %: {:.2f} to {:.2f}, {} seeds".format(*found.ends, found.count)
    return times, seeds


def paired_rows(comparison: Comparison) -> list[tuple[Measure, list[tuple[Group, str]]]]:
    """A row per measure with the difference of every run that shares two seeds or more with the baseline."""
    others, base = paired.several_seeds(comparison.groups, comparison.baseline), comparison.baseline
    measures = main_measures(comparison, comparison.probes) + recorded(comparison, [WHOLE_PEAK]) if others else []
    return [(m, [(group, paired.by_seed_words(group, base, m)) for group in others]) for m in measures]


def problems(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What is wrong, and of what."""
    for folder, why in comparison.damaged.items():
        yield folder.name, f" is left out: {why}."
    for group in comparison.groups:
        if group.state:
            yield group.label, f" is {group.state}; it is shown as far as it got."
    for group in comparison.groups:
        for warning in (*group.worse(), *group.falling()):
            yield group.label, f": {warning}."
    if len(comparison.epochs) > 1:
        trained = f"The runs trained for {in_words(comparison.epochs)} epochs of a task"
        yield "", f"{trained}: their costs, and what costs are relative to, differ for that too; so may their accuracy."
    machines = {run.results["environment"].get("device_name") for group in comparison.groups for run in group.runs}
    if len(machines) > 1:
        named = ", ".join(sorted(map(str, machines)))
        yield "", f"The runs are of different machines ({named}): their seconds and peaks do not compare."
    for group in comparison.groups:
        if group.doubt:
            yield group.label, f": {group.doubt}"


def shown_part(part: Part, colours: Colours) -> dict[str, Any]:
    """With the figures that have something to show."""
    with style(colours):
        figures = [vars(figure) | {"drawn": drawn(figure, colours)} for figure in part.figures]
    return vars(part) | {"figures": [figure for figure in figures if figure["drawn"]]}


def drawn(figure: Figure, colours: Colours) -> list[tuple[Picture, Markup]]:
    canvases = [(picture, picture.draw(colours)) for picture in figure.pictures]
    labels = {p.name: f"{figure.title}, {p.group.label}" if p.group else figure.title for p in figure.pictures}
    return [(p, page_svg(canvas, p.name, labels[p.name], colours)) for p, canvas in canvases if canvas]


def tables(measures: Sequence[Measure]) -> list[Sequence[Measure]]:
    """The columns of one table, or of several of like width where one would be too wide for the page."""
    size = math.ceil(len(measures) / max(math.ceil(len(measures) / COLUMNS), 1))
    return [measures[start : start + size] for start in range(0, len(measures), size or 1)]


def differences(comparison: Comparison) -> dict[str, list[str]]:
    """The settings in which the runs differ, with each run's value; the rest they share, or has no effect."""
    flat = [identity_settings(group.config) for group in comparison.groups]
    keys = dict.fromkeys(key for one in flat for key in one)
    spoken = {"None": "null", "True": "true", "False": "false"}  # as in config.yaml
    rows = {key: [spoken.get(value := str(one.get(key, "-")), value) for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def details(run: RunRecord, group: Group) -> dict[str, Any]:
    """What a run was made with."""
    results = run.results
    facts = {
        "folder": run.folder,
        "status": results["status"],
        "commit": results.get("commit") or "not known (installed without its source tree)",
        "version": f"ptlf {results.get('ptlf_version')}",
        "environment": ", ".join(f"{key} {value}" for key, value in results["environment"].items() if value),
        "class order": ", ".join(map(str, results["class_order"])) or "no classes",
        "tasks": " | ".join(map(str, results["tasks"])),
    }
    return {
        "group": group,
        "seed": results.get("seed"),
        "commands": commands(run),
        "arrived": results.get("arrived"),
        "facts": facts,
        "config": yaml.safe_dump(run.config, sort_keys=False),
    }


def commands(run: RunRecord) -> list[str]:
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
