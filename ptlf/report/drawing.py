"""How a picture looks: colours by role, light and dark; matplotlib draws, once for the page and once for files.

The page shows each picture at any width, in its own font and in the reader's theme: colours are drawn as codes, which
become variables of the style sheet. Runs differ by hue, dash and marker; ordered things by lightness.
"""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from ptlf.core.errors import clipped
from ptlf.core.files import write_whole
from ptlf.report.runs import Group

Colours = dict[str, str]  # by role

STEPS = 11  # of a heat map's ramp
ROLES = {  # light, dark; the baseline (run0) is grey, the others keep their distance for all kinds of colour blindness
    "page": ("#ffffff", "#161615"),
    "card": ("#f7f7f5", "#1f1f1d"),
    "ink": ("#1a1a19", "#f2f1ec"),
    "soft": ("#5c5b57", "#a9a8a1"),
    "line": ("#dddcd6", "#3a3a37"),
    "empty": ("#ecebe6", "#2b2b28"),
    "frozen": ("#1f5fa8", "#6fb1f5"),
    "good": ("#12764b", "#4cc38a"),
    "bad": ("#b4371b", "#ff8a6b"),
    "run0": ("#6b6a66", "#a3a29b"),
    "run1": ("#1668c1", "#62aaf7"),
    "run2": ("#bf4a00", "#ff9d5c"),
    "run3": ("#0b7a56", "#46c79b"),
    "run4": ("#a8408c", "#e58fce"),
    "run5": ("#8a6d00", "#d9b93a"),
    "run6": ("#5a45b0", "#a99bf5"),
    "run7": ("#0f7a8e", "#5fcbe0"),
}
HEAT = (
    ["#f0f5fb", "#d3e3f5", "#a5c8eb", "#69a3dc", "#3479bf", "#174f8f"],
    ["#22282e", "#25405c", "#2a5f94", "#3f86c9", "#74b0ea", "#b9d9f8"],
)
TASK = (
    ["#2b1d63", "#3b4f9e", "#1c7f9c", "#1e9f78", "#7db33a", "#d9b400"],
    ["#8f83ea", "#6c9bf2", "#4fc0d6", "#5bd8a4", "#b5e06a", "#fff08a"],
)
# From the eighth run on colours come again, with another dash and marker.
DASHES: Sequence[Any] = (
    *((0, (4, 3)), "-", (0, (7, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)), "-", (0, (5, 3)), (0, (3, 1)), (0, (5, 2))),
    *("-", "-", "-", (0, (4, 2)), "-", "-"),
)
MARKERS = "oosD^sD^^Dsoo^o"
HALF, THIRD = 360.0, 290.0  # widths in points: a column of the page is a little wider, a phone a little narrower
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def themed(dark: bool, tasks: int) -> Colours:
    """Every role: those above, heat0.., on0.. (text upon heat), task0..."""
    found = {role: pair[dark] for role, pair in ROLES.items()}
    for step, heat in enumerate(ramp(HEAT[dark], STEPS)):
        found |= {f"heat{step}": heat, f"on{step}": "#ffffff" if (step < 6 if dark else step > 7) else "#10151c"}
    return found | {f"task{number}": colour for number, colour in enumerate(ramp(TASK[dark], tasks))}


def ramp(stops: Sequence[str], count: int) -> list[str]:
    scale = LinearSegmentedColormap.from_list("", stops)
    return [to_hex(scale(place / max(count - 1, 1))) for place in range(count)]


def coded(tasks: int) -> Colours:
    """A code for every role, which `page_svg` makes a variable of the style sheet."""
    return {role: f"#fe{number:04x}" for number, role in enumerate(themed(False, tasks))}


def style(colours: Colours) -> AbstractContextManager[None]:
    """Within it pictures are made and written; matplotlib's own settings come back after it."""
    soft = colours["soft"]
    values: Any = {
        **{"svg.fonttype": "none", "text.parse_math": False, "font.size": 9.0, "text.color": colours["ink"]},
        **{"axes.titlesize": 10.0, "axes.titleweight": "bold", "axes.titlelocation": "left"},
        **{"axes.titlecolor": colours["ink"], "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft},
        **{"axes.facecolor": "none", "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y"},
        **{"grid.color": colours["line"], "lines.linewidth": 1.5, "lines.markersize": 4.5},
        **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
        **{"xtick.major.size": 0, "ytick.major.size": 0, "xaxis.labellocation": "right", "legend.frameon": False},
        **{"legend.borderpad": 0, "legend.borderaxespad": 0, "legend.columnspacing": 1.4, "legend.handlelength": 1.6},
    }
    return matplotlib.rc_context(values)


def look(group: Group, colours: Colours) -> dict[str, Any]:
    """How a run's line is drawn everywhere."""
    dash, marker = DASHES[group.place % len(DASHES)], MARKERS[group.place % len(MARKERS)]
    return {"color": colours[f"run{group.colour}"], "linestyle": dash, "marker": marker}


def frame(
    colours: Colours,
    height: float,
    *,
    width: float = HALF,
    left: float = 40.0,
    bottom: float = 30.0,
    title: str = "",
    keys: Sequence[tuple[str, dict[str, Any]]] = (),
) -> tuple[Canvas, Axes]:
    """Axes of this height in points, with a title and a legend of (label, look of a line) above them."""
    labels = [clipped(label, 60) for label, _ in keys]
    columns = max(1, int((width - left) / (5.4 * max(map(len, labels), default=1) + 34)))
    legend = 14.0 * -(-len(labels) // columns) + 6 if labels else 0.0
    whole = legend + (20.0 if title else 6.0) + height + bottom
    canvas = Canvas(figsize=(width / 72, whole / 72), facecolor=colours["page"])
    axes = canvas.add_axes((left / width, bottom / whole, (width - left - 8) / width, height / whole), title=title)
    if labels:
        handles = [Line2D([], [], **style) for _, style in keys]
        canvas.legend(handles, labels, loc="upper left", bbox_to_anchor=(left / width, 1 - 2 / whole), ncols=columns)
    return canvas, axes


def end_of(name: str, most: int) -> str:
    """Long names of one family begin alike and end differently."""
    return name if len(name) <= most else "…" + name[1 - most :]


def run_keys(groups: Sequence[Group], colours: Colours) -> list[tuple[str, dict[str, Any]]]:
    return [(group.label, look(group, colours)) for group in groups]


def page_svg(canvas: Canvas, name: str, label: str, colours: Colours) -> Markup:
    """For the page, drawn with `coded` colours. name: of the picture, so that no two have an id in common."""
    canvas.patch.set_visible(False)
    roles = list(colours)
    text = written_svg(canvas, name)
    body = re.sub(r'(?<=<g) id="[^"]*"| id="image\w+"', "", text[text.index(">", text.index("<svg")) + 1 :])
    body = re.sub(r"<metadata>.*?</metadata>|font-family: [^;\"]*;? ?", "", body, flags=re.DOTALL)
    body = re.sub(r"#fe([0-9a-f]{4})", lambda found: f"var(--{roles[int(found[1], 16)]})", body)
    width, height = (72 * side for side in canvas.get_size_inches())
    head = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
    style = f'style="max-width:{1.25 * width:g}px"'
    return Markup(f"{head} {style}>" + re.sub(r"\s+", " ", body))


def save_picture(canvas: Canvas, folder: Path, name: str) -> None:
    """As NAME.svg and NAME.png."""
    svg = re.sub(r"font-family: [^;\"]*", f"font-family: {FONT}", written_svg(canvas, name))
    write_whole(folder / f"{name}.svg", svg)
    canvas.savefig(png := io.BytesIO(), format="png", dpi=300)
    write_whole(folder / f"{name}.png", png.getvalue())


def written_svg(canvas: Canvas, name: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        canvas.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
