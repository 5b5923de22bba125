"""The report: one HTML file that needs nothing else, and the same pictures as files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ptlf import __version__
from ptlf.report.details import details_part
from ptlf.report.drawing import Drawing, sprite_definition, to_png, to_svg
from ptlf.report.figures.accuracy import COSTS, Measure, accuracy_measures, measured
from ptlf.report.parts import PHONE, Figure, Part, Picture, drawings, parts
from ptlf.report.runs import Comparison, Group, doubt_about_seconds, read_comparison, unsteady
from ptlf.report.style import style
from ptlf.report.theme import colours
from ptlf.run.results import write_whole

COLUMNS = 8  # of a table


def write_report(folders: Sequence[Path], out: Path, baseline: str | None = None) -> int:
    """How many runs it shows."""
    comparison = read_comparison(folders, baseline)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page(comparison))
    return sum(len(group.runs) for group in comparison.groups)


def write_figures(folders: Sequence[Path], out: Path, baseline: str | None = None) -> list[Path]:
    """Each picture as NAME.svg and NAME.png on white, at print size."""
    comparison = read_comparison(folders, baseline)
    theme = colours(False, comparison.tasks)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawing in drawings(comparison):
        drawing.sprite_id = "sprite"
        write_whole(out / f"{name}.svg", to_svg(drawing, theme))
        write_whole(out / f"{name}.png", to_png(drawing, theme))
        written += [out / f"{name}.svg", out / f"{name}.png"]
    return written


def page(comparison: Comparison) -> str:
    first = comparison.groups[0]
    stream, epochs = first.config["stream"]["name"], first.config["training"]["epochs"]
    title = title_of_page(comparison, stream)
    sprites: dict[str, str] = {}
    body = "".join(render_part(part, comparison, sprites) for part in parts(comparison))
    sheets = "".join(sprites.values())
    hidden = f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{sheets}</svg>' if sheets else ""
    facts = f"{count(comparison.tasks, 'task')}, {count(epochs, 'epoch')} each, {first.config['encoder']['name']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style(comparison.tasks)}</style></head><body>{hidden}<main>"
        f'<header><p class="kicker">{escape(stream)} · {escape(facts)}</p><h1>{escape(title)}</h1>'
        f"{headline(comparison)}{problems(comparison)}</header>{body}{details_part(comparison)}"
        f"<footer>Made by ptlf {escape(__version__)} from results.json of each run.</footer></main></body></html>\n"
    )


def title_of_page(comparison: Comparison, stream: str) -> str:
    base = comparison.baseline
    others = [group.label for group in comparison.groups if group is not base]
    if not others or len(comparison.groups) == 1:
        return comparison.groups[0].label
    names = " and ".join(others) if len(others) < 3 else f"{len(others)} runs"
    return f"{names} against {base.label} on {stream}" if base else f"{names} on {stream}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def headline(comparison: Comparison) -> str:
    """What came out: a sentence per run against the baseline, or who is best at what where there are many."""
    if not comparison.probes:
        return ""
    accuracy, forgetting = accuracy_measures(comparison.probes[0])
    base = comparison.baseline
    others = [group for group in comparison.groups if group is not base] or comparison.groups
    others = [group for group in others if group.mean(*accuracy.path) is not None]
    if len(others) < 3:
        lines = [sentence(group, base if base is not group else None, accuracy, forgetting) for group in others]
    else:
        lines = [best(comparison, measure) for measure in measured(comparison, [accuracy, forgetting, *COSTS])]
    return f'<ul class="headline">{"".join(f"<li>{line}</li>" for line in lines)}</ul>'


def best(comparison: Comparison, measure: Measure) -> str:
    rising = measure.title.startswith("accuracy")
    found = [(value, group) for group in comparison.groups if (value := group.mean(*measure.path)) is not None]
    value, group = (max if rising else min)(found, key=lambda pair: pair[0])
    base = comparison.baseline.mean(*measure.path) if comparison.baseline else None
    ratio = f" ({value / base:.2f}×)" if measure.cost and base else ""
    return (
        f"{'Highest' if rising else 'Least'} {escape(measure.title)}: {colour_name(group)}, "
        f"<b>{measure.show(value)} {measure.unit}</b>{ratio}"
    )


def colour_name(group: Group) -> str:
    return f'<b class="f-run{group.colour}">{escape(group.label)}</b>'


def sentence(group: Group, base: Group | None, accuracy: Measure, forgetting: Measure) -> str:
    right, lost = group.mean(*accuracy.path), group.mean(*forgetting.path)
    words = f"{colour_name(group)} gets <b>{accuracy.show(right)} %</b> right"
    words += f" and has forgotten <b>{forgetting.show(lost)} points</b>" if lost is not None else ""
    if base is None:
        return words + "."
    before, kept = base.mean(*accuracy.path), base.mean(*forgetting.path)
    words += f" ({escape(base.label)}: {accuracy.show(before)} % and {forgetting.show(kept)})"
    ratios = []
    for measure in COSTS:
        value, other = group.mean(*measure.path), base.mean(*measure.path)
        if value is not None and other:
            ratios.append(f"<b>{value / other:.2f}×</b> the {measure.title}")
    return f"{words}, with {', '.join(ratios)}." if ratios else f"{words}."


def problems(comparison: Comparison) -> str:
    lines = [f"<b>{escape(bad.folder.name)}</b> is left out: {escape(bad.reason)}." for bad in comparison.damaged]
    halves = [group for group in comparison.groups if group.state]
    lines += [
        f"<b>{escape(group.label)}</b> is {escape(group.state)}; it is shown as far as it got." for group in halves
    ]
    machines = {run.results["environment"].get("device_name") for group in comparison.groups for run in group.runs}
    if len(machines) > 1:
        named = escape(", ".join(sorted(map(str, machines))))
        lines.append(f"The runs are of different machines ({named}): their seconds and peaks do not compare.")
    for group in comparison.groups:
        if doubt := doubt_about_seconds(max(unsteady(run.epochs) for run in group.runs)):
            lines.append(f"<b>{escape(group.label)}</b>: {doubt}.")
    return "".join(f'<p class="problem">{line}</p>' for line in lines)


def render_part(part: Part, comparison: Comparison, sprites: dict[str, str]) -> str:
    figures = "".join(render_figure(figure, sprites) for figure in part.figures)
    table = answer_table(comparison) if part.name == "answer" else ""
    notes = "".join(f'<p class="note">{code(note)}</p>' for note in part.notes)
    head = f'<section id="part-{part.name}"><h2>{escape(part.title)}</h2>'
    return f'{head}<div class="figures">{figures}</div>{table}{notes}</section>'


def code(note: str) -> str:
    """Words between backticks as code."""
    pieces = escape(note).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def render_figure(figure: Figure, sprites: dict[str, str]) -> str:
    pictures = [rendered for picture in figure.pictures if (rendered := render_picture(picture, figure.width, sprites))]
    if not pictures:
        return ""
    size = "full" if figure.width > 600 or len(pictures) > 1 else "half"
    grid = "whole" if figure.width > 600 or len(pictures) == 1 else "halves" if figure.width > 400 else "thirds"
    return (
        f'<figure class="{size}"><figcaption><h3>{escape(figure.title)}</h3><p>{escape(figure.how)}</p></figcaption>'
        f'<div class="{grid}">{"".join(pictures)}</div></figure>'
    )


def render_picture(picture: Picture, width: float, sprites: dict[str, str]) -> str:
    """Drawn twice, for a desk and for a phone; the style sheet shows one."""
    versions = []
    for size, name in ((width, "desk"), (PHONE, "phone")):
        drawing = picture.draw(size)
        if drawing is None:
            return ""
        versions.append(f'<div class="{name}">{to_svg(with_sprite(drawing, sprites))}</div>')
    group = picture.group
    label = f'<p class="run f-run{group.colour}">{escape(group.label)}</p>' if group else ""
    return f'<div class="picture" id="{picture.name}">{label}{"".join(versions)}</div>'


def with_sprite(drawing: Drawing, sprites: dict[str, str]) -> Drawing:
    """Every sheet of tiles is in the page once."""
    if drawing.sprite is not None:
        image = drawing.sprite["image"]
        drawing.sprite_id = f"sprite{list(sprites).index(image) if image in sprites else len(sprites)}"
        sprites.setdefault(image, sprite_definition(drawing))
    return drawing


def answer_table(comparison: Comparison) -> str:
    """Every figure of every run; further tables where one would be too wide for the page."""
    measures = measured(comparison, [m for probe in comparison.probes for m in accuracy_measures(probe)] + COSTS)
    tables = -(-len(measures) // COLUMNS)
    size = -(-len(measures) // max(tables, 1))
    parts = [measures[start : start + size] for start in range(0, len(measures), size)] if measures else []
    caption = "Mean ± standard deviation over seeds. " if any(len(g.runs) > 1 for g in comparison.groups) else ""
    caption += "Memory for backward is what autograd keeps in the last epoch, with everything frozen that will be."
    return "".join(table(comparison, part) for part in parts) + f'<p class="note">{caption}</p>'


def table(comparison: Comparison, measures: Sequence[Measure]) -> str:
    head = "".join(f"<th>{escape(m.title)} <small>{m.unit}</small></th>" for m in measures)
    rows = "".join(f"<tr>{row_head(g)}{table_cells(g, comparison, measures)}</tr>" for g in comparison.groups)
    return f'<table class="answer"><thead><tr><th>run</th>{head}</tr></thead><tbody>{rows}</tbody></table>'


def row_head(group: Group) -> str:
    seeds = f" <small>{count(len(group.runs), 'seed')}</small>" if len(group.runs) > 1 else ""
    state = f" <small>{escape(group.state)}</small>" if group.state else ""
    return f'<th scope="row"><span class="f-run{group.colour}">{escape(group.label)}</span>{seeds}{state}</th>'


def table_cells(group: Group, comparison: Comparison, measures: Sequence[Measure]) -> str:
    cells = []
    for measure in measures:
        value, spread = group.mean(*measure.path), group.spread(*measure.path)
        base = comparison.baseline.mean(*measure.path) if comparison.baseline else None
        words = measure.show(value) + (f" ± {measure.show(spread)}" if spread is not None else "")
        if measure.cost and base and value is not None and group is not comparison.baseline:
            words += f" <b>{value / base:.2f}×</b>"
        data = f' data-measure="{".".join(measure.path)}" data-value="{value!r}"' if value is not None else ""
        cells.append(f'<td data-label="{escape(measure.title)}, {measure.unit}"{data}><span>{words}</span></td>')
    return "".join(cells)
