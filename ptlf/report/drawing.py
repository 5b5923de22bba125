"""A picture as a list of shapes, written as SVG for the page or for a file, or as PNG. Colours are roles."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from ptlf.report.theme import Theme

Point = tuple[float, float]
PRINT, MARGIN = 0.7, 8  # points on paper for one unit; units of white around a picture in a file
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Shape:
    """kind: rect, line, area, mark, dots, text or tile. `at` are its corners, ends or centres."""

    kind: str
    at: tuple[Point, ...]
    fill: str = ""
    stroke: str = ""
    width: float = 1.0
    dash: str = ""
    opacity: float = 1.0
    size: float = 11.0  # of text and marks
    words: str = ""
    anchor: str = "start"
    bold: bool = False
    title: str = ""
    look: str = ""  # circle, square ... of a mark; a class of the page for others
    tile: tuple[int, int] = (0, 0)  # place in the sprite, in pixels


@dataclass
class Drawing:
    width: float
    height: float
    label: str  # what it shows, for those who cannot see it
    sprite: dict[str, Any] | None = None
    sprite_id: str = "sprite"
    shapes: list[Shape] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, **look: Any) -> None:
        self.shapes.append(Shape("rect", ((x, y), (x + w, y + h)), fill, **look))

    def line(self, points: Iterable[Point], stroke: str, **look: Any) -> None:
        self.shapes.append(Shape("line", tuple(points), stroke=stroke, **look))

    def area(self, points: Iterable[Point], fill: str, **look: Any) -> None:
        self.shapes.append(Shape("area", tuple(points), fill, **look))

    def mark(self, x: float, y: float, fill: str, **look: Any) -> None:
        self.shapes.append(Shape("mark", ((x, y),), fill, **{"size": 3.0, "look": "circle", **look}))

    def dots(self, points: Iterable[Point], stroke: str, **look: Any) -> None:
        """Many discs of one colour as one shape; `size` is their radius."""
        self.shapes.append(Shape("dots", tuple(points), stroke=stroke, **look))

    def text(self, x: float, y: float, words: str, fill: str = "ink", **look: Any) -> None:
        """y is the baseline."""
        self.shapes.append(Shape("text", ((x, y),), fill, words=words, **look))

    def tile(self, x: float, y: float, side: float, place: tuple[int, int], **look: Any) -> None:
        self.shapes.append(Shape("tile", ((x, y), (x + side, y + side)), tile=place, **look))


def mark_corners(shape: Shape) -> list[Point]:
    (x, y), r = shape.at[0], shape.size
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        "triangle": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
        "down": [(0, 1.2), (1.15, -0.9), (-1.15, -0.9)],
    }
    return [(x + r * a, y + r * b) for a, b in corners[shape.look]]


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def join(points: Iterable[Point]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


def to_svg(drawing: Drawing, theme: Theme | None = None) -> Markup:
    """Without a theme colours are classes of the page (f-ROLE fills, s-ROLE strokes); with one they are written in."""
    label = escape(drawing.label)
    if theme is None:
        size = f"{number(drawing.width)} {number(drawing.height)}"
        head = f'<svg viewBox="0 0 {size}" role="img" aria-label="{label}" style="max-width:{number(drawing.width)}px">'
    else:
        wide, tall = drawing.width + 2 * MARGIN, drawing.height + 2 * MARGIN
        box = f"{-MARGIN} {-MARGIN} {number(wide)} {number(tall)}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="{FONT}" role="img"'
        head += f' aria-label="{label}" width="{number(wide * PRINT)}pt" height="{number(tall * PRINT)}pt">'
        place = f'x="{-MARGIN}" y="{-MARGIN}" width="{number(wide)}" height="{number(tall)}"'
        head += f'<rect {place} fill="{theme["page"]}"/>{sprite_definition(drawing)}'
    return Markup(head + "".join(svg_shape(shape, drawing, theme) for shape in drawing.shapes) + "</svg>")


def sprite_definition(drawing: Drawing) -> Markup:
    sheet = drawing.sprite
    if sheet is None:
        return Markup()
    size = f'width="{sheet["width"]}" height="{sheet["height"]}" style="image-rendering:{scaling(sheet)}"'
    return Markup(f'<defs><image id="{drawing.sprite_id}" href="{sheet["image"]}" {size}/></defs>')


def scaling(sheet: dict[str, Any]) -> str:
    return "pixelated" if sheet["size"] < 24 else "auto"


def svg_shape(shape: Shape, drawing: Drawing, theme: Theme | None) -> str:
    body = {"rect": svg_rect, "line": svg_line, "area": svg_area, "mark": svg_mark, "dots": svg_dots}
    body |= {"text": svg_text}
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    if shape.kind == "tile":
        return svg_tile(shape, drawing, title)
    return body[shape.kind](shape, paint(shape, theme), title)


def paint(shape: Shape, theme: Theme | None) -> str:
    """Attributes for colour, dash and opacity."""
    filled = shape.kind not in ("line", "dots")
    classes = [f"f-{shape.fill}"] if filled and shape.fill else []
    classes += [f"s-{shape.stroke}"] if shape.stroke else []
    if theme is None:
        names = " ".join([*classes, *([shape.look] if shape.look and shape.kind != "mark" else [])])
        words = f' class="{names}"' if names else ""
        words += "" if filled and shape.fill else ' fill="none"'
    else:
        words = f' fill="{theme[shape.fill]}"' if filled and shape.fill else ' fill="none"'
        words += f' stroke="{theme[shape.stroke]}"' if shape.stroke else ""
    if shape.stroke and shape.kind != "dots":
        words += f' stroke-width="{number(shape.width)}"' if shape.width != 1 else ""
        words += f' stroke-dasharray="{shape.dash}"' if shape.dash else ""
    return words + (f' opacity="{shape.opacity:.2f}"' if shape.opacity < 1 else "")


def svg_rect(shape: Shape, paint: str, title: str) -> str:
    (x, y), (x2, y2) = shape.at
    place = f'x="{number(x)}" y="{number(y)}" width="{number(x2 - x)}" height="{number(y2 - y)}"'
    return f"<rect {place}{paint}>{title}</rect>" if title else f"<rect {place}{paint}/>"


def svg_line(shape: Shape, paint: str, title: str) -> str:
    return f'<polyline points="{join(shape.at)}"{paint} stroke-linejoin="round">{title}</polyline>'


def svg_area(shape: Shape, paint: str, title: str) -> str:
    return f'<polygon points="{join(shape.at)}"{paint}>{title}</polygon>'


def svg_mark(shape: Shape, paint: str, title: str) -> str:
    if shape.look == "circle":
        (x, y), r = shape.at[0], number(shape.size)
        return f'<circle cx="{number(x)}" cy="{number(y)}" r="{r}"{paint}>{title}</circle>'
    return f'<polygon points="{join(mark_corners(shape))}"{paint}>{title}</polygon>'


def svg_dots(shape: Shape, paint: str, title: str) -> str:
    """Strokes of no length with round ends."""
    path = "".join(f"M{number(x)} {number(y)}h0" for x, y in shape.at)
    return f'<path d="{path}"{paint} stroke-width="{number(2 * shape.size)}" stroke-linecap="round">{title}</path>'


def svg_text(shape: Shape, paint: str, title: str) -> str:
    x, y = shape.at[0]
    look = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    look += ' font-weight="600"' if shape.bold else ""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(shape.size)}"'
    return f"<text {place}{look}{paint}>{escape(shape.words)}{title}</text>"


def svg_tile(shape: Shape, drawing: Drawing, title: str) -> str:
    """A window onto the sprite: the nested svg clips what lies outside."""
    assert drawing.sprite is not None
    (x, y), (x2, _) = shape.at
    side, (left, top) = drawing.sprite["size"], shape.tile
    window = f'x="{number(x)}" y="{number(y)}" width="{number(x2 - x)}" height="{number(x2 - x)}"'
    fade = f' opacity="{shape.opacity:.2f}"' if shape.opacity < 1 else ""
    use = f'<use href="#{drawing.sprite_id}"/>'
    return f'<svg {window} viewBox="{left} {top} {side} {side}"{fade}>{title}{use}</svg>'


def to_png(drawing: Drawing, theme: Theme, dpi: int = 300) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide, tall = drawing.width + 2 * MARGIN, drawing.height + 2 * MARGIN
    figure = Figure(figsize=(wide * PRINT / 72, tall * PRINT / 72), dpi=dpi, facecolor=theme["page"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN, drawing.width + MARGIN), ylim=(drawing.height + MARGIN, -MARGIN))
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        for artist in artists(shape, drawing, theme, order, axes):
            axes.add_artist(artist)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def artists(shape: Shape, drawing: Drawing, theme: Theme, order: int, axes: Any) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Polygon
    from matplotlib.text import Text

    common: dict[str, Any] = {"alpha": shape.opacity, "zorder": order}
    if shape.kind == "line":
        dash: Any = (0, tuple(float(part) / shape.width for part in shape.dash.split())) if shape.dash else "-"
        xs, ys = zip(*shape.at, strict=True)
        return [Line2D(xs, ys, color=theme[shape.stroke], linewidth=shape.width * PRINT, linestyle=dash, **common)]
    if shape.kind == "dots":
        xs, ys = zip(*shape.at, strict=True)
        disc: dict[str, Any] = {
            "marker": "o",
            "markersize": 2 * shape.size * PRINT,
            "markeredgewidth": 0,
            "linestyle": "none",
        }
        return [Line2D(xs, ys, color=theme[shape.stroke], **disc, **common)]
    if shape.kind == "text":
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        weight = "bold" if shape.bold else "normal"
        words = shape.words.replace("$", r"\$")
        look: dict[str, Any] = {
            "fontsize": shape.size * 0.92 * PRINT,
            "ha": align,
            "va": "baseline",
            "fontweight": weight,
        }
        x, y = shape.at[0]
        return [Text(x, y, words, color=theme[shape.fill], **look, **common)]
    if shape.kind == "tile":
        picture(shape, drawing, order, axes)
        return []
    common |= {"facecolor": theme[shape.fill]} if shape.fill else {"facecolor": "none"}
    common |= {"edgecolor": theme[shape.stroke], "linewidth": shape.width * PRINT} if shape.stroke else {"linewidth": 0}
    if shape.kind == "mark" and shape.look == "circle":
        return [Circle(shape.at[0], shape.size, **common)]
    if shape.kind == "rect":
        (x, y), (x2, y2) = shape.at
        return [Polygon([(x, y), (x2, y), (x2, y2), (x, y2)], **common)]
    return [Polygon(mark_corners(shape) if shape.kind == "mark" else shape.at, **common)]


def picture(shape: Shape, drawing: Drawing, order: int, axes: Any) -> None:
    from PIL import Image

    assert drawing.sprite is not None
    sheet = Image.open(io.BytesIO(base64.b64decode(drawing.sprite["image"].partition(",")[2]))).convert("RGB")
    (x, y), (x2, y2) = shape.at
    (left, top), side = shape.tile, drawing.sprite["size"]
    smooth = "nearest" if scaling(drawing.sprite) == "pixelated" else "antialiased"
    view = axes.get_xlim(), axes.get_ylim()
    cut = sheet.crop((left, top, left + side, top + side))
    axes.imshow(cut, extent=(x, x2, y2, y), interpolation=smooth, aspect="auto", alpha=shape.opacity, zorder=order)
    axes.set(xlim=view[0], ylim=view[1])
