"""The report: one HTML file that needs nothing else, and the same pictures as files."""

import html
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ptlf import __version__
from ptlf.core.errors import UserError, quoted
from ptlf.core.files import write_whole
from ptlf.core.reading import read_text
from ptlf.report.drawing import FONT, Colours, coded, page_svg, save_picture, style, themed
from ptlf.report.intervals import neighbours_used, wilson
from ptlf.report.measures import HEADLINE_COSTS, Measure, main_measures, notes, probe_measures, recorded
from ptlf.report.runs import FEATURES, Comparison, Group, read_comparison
from ptlf.report.sections import Figure, Picture, sections
from ptlf.report.tables import percent
from ptlf.report.verdicts import copies, group_verdicts, ranking
from ptlf.run.compat import identity_settings

COLUMNS = 8  # of a table
MARK = "<footer>Made by ptlf"  # of a page, in its template


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """How many runs it shows."""
    comparison = read_comparison(folders, baseline)
    if out.exists() and MARK not in read_text(out):
        raise UserError(f"{out} exists and is no page of `ptlf report`; choose another --out, or remove it")
    write_whole(out, page(comparison))
    return sum(len(group.runs) for group in comparison.groups)


def inline_report(folder: Path) -> str:
    """For notebooks."""
    try:
        write_report([folder], out := folder / "report.html")
    except UserError as error:
        return f"<p>{html.escape(str(error))}</p>"
    inside = html.escape(read_text(out), quote=True)
    return f'<iframe srcdoc="{inside}" style="width: 100%; height: 50em; border: 0"></iframe>'


def write_figures(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """Each picture as NAME.svg and NAME.png on white. How many files."""
    comparison = read_comparison(folders, baseline)
    colours, written = themed(False, comparison.tasks), 0
    out.mkdir(parents=True, exist_ok=True)
    with style(colours):
        for picture in [p for section in sections(comparison) for figure in section.figures for p in figure.pictures]:
            if canvas := picture.draw(colours):
                save_picture(canvas, out, picture.name)
                written += 2
    return written


def page(comparison: Comparison) -> str:
    tidy: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, **tidy)
    groups, base, measures = comparison.groups, comparison.baseline, main_measures(comparison, comparison.probes)
    scores = probe_measures(comparison.probes[0])[:2] if comparison.probes else []
    headline = recorded(comparison, [*scores, *HEADLINE_COSTS])
    with style(colours := coded(comparison.tasks)):
        drawn = [
            (section, [(f, svgs) for f in section.figures if (svgs := pictures_as_svg(f, colours))])
            for section in sections(comparison)
        ]
    return templates.get_template("page.html").render(
        comparison=comparison,
        groups=groups,
        base=base,
        epochs=" or ".join(map(str, comparison.epochs)),
        title=title_of_page(comparison),
        sentences=[(group, sentence(group, base, headline)) for group in groups],
        sections=drawn,
        measures=measures,
        columns=math.ceil(len(measures) / max(math.ceil(len(measures) / COLUMNS), 1)) or 1,  # of tables of like width
        later=[row for group in groups for row in later_rows(group)],
        unlabelled=[features_table(group) for group in groups if not group.first["probes"]],
        others=comparison.paired,
        caption=caption(comparison, measures),
        problems=list(problems(comparison)),
        settings=differing_values(comparison),
        quote=quoted,
        to_yaml=lambda config: yaml.safe_dump(config, sort_keys=False),
        version=__version__,
        light=themed(False, comparison.tasks),
        dark=themed(True, comparison.tasks),
        font=Markup(FONT),
    )


def caption(comparison: Comparison, measures: Sequence[Measure]) -> str:
    """How to read the table."""
    groups = comparison.groups
    tested = any(group.interval(("probes", p, "accuracy")) for group in groups for p in comparison.probes)
    small = "in small print: the accuracy before training"
    small += ", and the 95 % interval (Wilson) from the number of test images alone" * tested
    words = [small] * bool(comparison.probes) + notes(comparison, measures)
    words.append("activation memory: the bytes that autograd saves between forward and backward")
    return ". ".join(part[0].upper() + part[1:] for part in words) + "."


def pictures_as_svg(figure: Figure, colours: Colours) -> list[tuple[Picture, Markup]]:
    found = []
    for picture in figure.pictures:
        if canvas := picture.draw(colours):
            label = f"{figure.title}, {picture.group.label}" if picture.group else figure.title
            found.append((picture, page_svg(canvas, picture.name, label, colours)))
    return found


def title_of_page(comparison: Comparison) -> str:
    base, groups = comparison.baseline, comparison.groups
    if len(groups) == 1:
        return groups[0].label
    others = [group.label for group in groups if group is not base]
    names = " and ".join(others) if len(others) < 3 else f"{len(others)} configurations"
    return f"{names}{f' against {base.label}' if base else ''} on {groups[0].config['stream']['name']}"


def sentence(group: Group, base: Group | None, measures: Sequence[Measure]) -> str:
    """What came out of a run: its figures, and what the seeds in common with the baseline's say of them."""
    said, single, tasks = [], False, len(group.first["tasks"])
    for measure in [measure for measure in measures if group.values(measure.path)]:
        days = f" of all {tasks} tasks" * (measure.short == "time" and tasks > 1)
        words = f"{measure.short}{days} {measure.words(group.mean(measure.path))}"
        difference, ratio = measure.difference(group, base), measure.ratio(group, base)
        single = single or bool(difference and difference.half is None)
        if ratio:
            words += f" ({ratio.mean:.2f}×" + (", 95 % {:.2f} to {:.2f})".format(*ratio.ends) if ratio.ends else ")")
        elif difference and base:
            words += f" ({measure.said(difference)} against {base.label})"
        said.append(words)
    found = group_verdicts(group)
    if not group.first["probes"] and not found:
        tested = [f"{row['accuracy']} % ({row['probe']}) on labels that came later" for row in later_rows(group)]
        said = [*(tested[:1] or ["no labelled test images: its accuracy is not known"]), *said]
    joint = "; it learned all tasks at once: a bound for continual methods, not one of them" * group.joint
    figures = ", ".join(said) + joint + "; one seed does not tell a difference" * single
    return " ".join([*found, figures[:1].upper() + figures[1:] if found else figures])


def features_table(group: Group) -> dict[str, Any]:
    """Of a run without labels: a row of its features per task, and how labels that come later test it."""
    found = {title: group.feature(key) for key, title in FEATURES.items()}
    rows = [
        (f"task {task}, {name}", [(title, *values[task]) for title, values in found.items()])
        for task, name in enumerate(group.first["tasks"], start=1)
        if task in found["spread"]
    ]
    command = f"ptlf evaluate {quoted(group.runs[0].folder)} --stream.labelled FOLDER"
    return {"group": group, "rows": rows, "command": command}


def later_rows(group: Group) -> list[dict[str, Any]]:
    """A row per probe of each seed's latest test on labels that came later."""
    rows = []
    for run, test in [(run, run.later) for run in group.runs if run.later]:
        for probe, values in test["probes"].items():
            if (accuracy := values.get("accuracy")) is not None:
                images, row = sum(values["test_images"]), {"group": group, "seed": run.results["seed"]}
                row["probe"] = ", ".join(filter(None, (probe, neighbours_used(values))))
                row |= {"accuracy": percent(accuracy), "before": percent(values.get("untrained_accuracy"))}
                row["interval"] = "{:.1f} to {:.1f}".format(*wilson(accuracy, images))
                row |= {"images": f"{images} of {test['images']}", "date": test["date"][:10]}
                rows.append(row | {"tasks": f"{test['tasks']} of {len(run.results['tasks'])}"})
    return rows


def problems(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What is wrong, and of what."""
    groups = comparison.groups
    yield from ((folder.name, f" is left out: {why}.") for folder, why in comparison.damaged.items())
    yield from ((g.label, f" is {g.state}; it is shown as far as it got.") for g in groups if g.state)
    yield from ((g.label, f": {warning}.") for g in groups for warning in g.warnings())
    if len(comparison.epochs) > 1:
        trained = f"The runs trained for {' or '.join(map(str, comparison.epochs))} epochs of a task"
        yield "", f"{trained}: their costs, and what costs are relative to, differ for that too; so may their accuracy."
    runs = [run for group in groups for run in group.runs]
    yield from (("", words) for words in [*[ranking(comparison)], *copies(runs)] if words)
    records = [run.results for run in runs]
    if len(machines := {str(record["environment"].get("device_name")) for record in records}) > 1:
        named = ", ".join(sorted(machines))
        yield "", f"The runs are of different machines ({named}): their seconds and peaks do not compare."
    if len({record.get("commit") for record in records}) > 1:
        yield "", "The runs are of different commits: compare their seconds with care."


def differing_values(comparison: Comparison) -> dict[str, list[str]]:
    """The settings in which the runs differ, with each run's value; the rest they share, or has no effect."""
    flat = [identity_settings(group.config) for group in comparison.groups]
    shown = [{key: value if isinstance(value, str) else json.dumps(value) for key, value in f.items()} for f in flat]
    rows = {key: [one.get(key, "-") for one in shown] for key in dict.fromkeys(key for one in shown for key in one)}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
