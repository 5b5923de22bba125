"""A picture as a list of shapes, written as SVG for the page or for a file, or as PNG. Colours are roles."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from ptlf.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
PRINT, MARGIN = 0.7, 8  # points on paper for one unit; units of white around a picture in a file
PIXELATED = 24  # tiles with fewer pixels to a side keep them visible
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
    look: str = ""  # of a mark: circle, or one of MARKS
    tile: tuple[int, int] = (0, 0)  # place in the sprite, in pixels


@dataclass
class Drawing:
    width: float
    height: float
    label: str  # what it shows, for those who cannot see it
    sprite: dict[str, Any] | None = None  # the sheet of a gallery that its tiles are cut from
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


MARKS = {  # corners around the centre, in radii
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    "triangle": [(0, -1.2), (1.15, 0.9), (-1.15, 0.9)],
    "down": [(0, 1.2), (1.15, -0.9), (-1.15, -0.9)],
}


def corners(shape: Shape) -> list[Point]:
    """Of a mark that is no circle, of a rectangle or of an area."""
    (x, y), (x2, y2) = shape.at[0], shape.at[-1]
    if shape.kind == "mark":
        return [(x + shape.size * a, y + shape.size * b) for a, b in MARKS[shape.look]]
    return [(x, y), (x2, y), (x2, y2), (x, y2)] if shape.kind == "rect" else list(shape.at)


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
        view = f"{-MARGIN} {-MARGIN} {number(wide)} {number(tall)}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" font-family="{FONT}" role="img"'
        head += f' aria-label="{label}" width="{number(wide * PRINT)}pt" height="{number(tall * PRINT)}pt">'
        head += f'<rect {box(-MARGIN, -MARGIN, wide, tall)} fill="{theme["page"]}"/>{sprite_definition(drawing)}'
    return Markup(head + "".join(svg_shape(shape, drawing, theme) for shape in drawing.shapes) + "</svg>")


def sprite_definition(drawing: Drawing) -> Markup:
    if (sheet := drawing.sprite) is None:
        return Markup()
    size = f'width="{sheet["width"]}" height="{sheet["height"]}"'
    look = f'{size} style="image-rendering:{"pixelated" if sheet["size"] < PIXELATED else "auto"}"'
    return Markup(f'<defs><image id="{sprite_id(sheet)}" href="{sheet["image"]}" {look}/></defs>')


def sprite_id(sheet: dict[str, Any]) -> str:
    return f"sprite{zlib.crc32(sheet['image'].encode())}"


def svg_shape(shape: Shape, drawing: Drawing, theme: Theme | None) -> str:
    (x, y), (x2, y2) = shape.at[0], shape.at[-1]
    look, inner = paint(shape, theme), f"<title>{escape(shape.title)}</title>" if shape.title else ""
    if shape.kind == "rect":
        tag, place = "rect", box(x, y, x2 - x, y2 - y)
    elif shape.kind == "line":
        tag, place = "polyline", f'points="{join(shape.at)}" stroke-linejoin="round"'
    elif shape.kind == "dots":  # strokes of no length with round ends
        path = "".join(f"M{number(x)} {number(y)}h0" for x, y in shape.at)
        tag, place = "path", f'd="{path}" stroke-width="{number(2 * shape.size)}" stroke-linecap="round"'
    elif shape.kind == "text":
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(shape.size)}"'
        place += "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        tag, place = "text", place + (' font-weight="600"' if shape.bold else "")
        inner = escape(shape.words) + Markup(inner)
    elif shape.kind == "tile":  # a window onto the sprite: the nested svg clips what lies outside
        assert drawing.sprite is not None
        side, (left, top) = drawing.sprite["size"], shape.tile
        tag, place = "svg", f'{box(x, y, x2 - x, x2 - x)} viewBox="{left} {top} {side} {side}"'
        inner += f'<use href="#{sprite_id(drawing.sprite)}"/>'
    elif shape.look == "circle":
        tag, place = "circle", f'cx="{number(x)}" cy="{number(y)}" r="{number(shape.size)}"'
    else:
        tag, place = "polygon", f'points="{join(corners(shape))}"'
    return f"<{tag} {place}{look}>{inner}</{tag}>" if inner else f"<{tag} {place}{look}/>"


def box(x: float, y: float, wide: float, tall: float) -> str:
    return f'x="{number(x)}" y="{number(y)}" width="{number(wide)}" height="{number(tall)}"'


def paint(shape: Shape, theme: Theme | None) -> str:
    """Attributes for colour, dash and opacity."""
    fill = "" if shape.kind in ("line", "dots") else shape.fill
    roles = [f"f-{fill}"] * bool(fill) + [f"s-{shape.stroke}"] * bool(shape.stroke)
    if theme is None:
        words = (f' class="{" ".join(roles)}"' if roles else "") + ("" if fill else ' fill="none"')
    else:
        words = f' fill="{theme[fill] if fill else "none"}"'
        words += f' stroke="{theme[shape.stroke]}"' if shape.stroke else ""
    if shape.stroke and shape.kind != "dots":
        words += f' stroke-width="{number(shape.width)}"' if shape.width != 1 else ""
        words += f' stroke-dasharray="{shape.dash}"' if shape.dash else ""
    return words + (f' opacity="{shape.opacity:.2f}"' if shape.opacity < 1 else "")


def to_png(drawing: Drawing, theme: Theme, dpi: int = 300) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide, tall = drawing.width + 2 * MARGIN, drawing.height + 2 * MARGIN
    figure = Figure(figsize=(wide * PRINT / 72, tall * PRINT / 72), dpi=dpi, facecolor=theme["page"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-MARGIN, drawing.width + MARGIN), ylim=(drawing.height + MARGIN, -MARGIN))
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        add_artist(axes, shape, drawing, theme, order)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def add_artist(axes: Axes, shape: Shape, drawing: Drawing, theme: Theme, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, Polygon
    from PIL import Image

    common: dict[str, Any] = {"alpha": shape.opacity, "zorder": order}
    if shape.kind == "tile":
        assert drawing.sprite is not None
        (x, y), (x2, y2) = shape.at
        (left, top), side = shape.tile, drawing.sprite["size"]
        sheet = Image.open(io.BytesIO(base64.b64decode(drawing.sprite["image"].partition(",")[2]))).convert("RGB")
        cut = sheet.crop((left, top, left + side, top + side))
        smooth = "nearest" if side < PIXELATED else "antialiased"
        axes.imshow(cut, extent=(x, x2, y2, y), interpolation=smooth, aspect="auto", **common)
    elif shape.kind == "text":
        align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        common |= {"fontsize": shape.size * 0.92 * PRINT, "fontweight": "bold" if shape.bold else "normal", "ha": align}
        axes.text(*shape.at[0], shape.words.replace("$", r"\$"), color=theme[shape.fill], va="baseline", **common)
    elif shape.kind in ("line", "dots"):
        common |= {"color": theme[shape.stroke], "linewidth": shape.width * PRINT}
        if shape.kind == "dots":
            size = 2 * shape.size * PRINT
            common |= {"marker": "o", "markersize": size, "markeredgewidth": 0, "linestyle": "none"}
        elif shape.dash:
            common["linestyle"] = (0, tuple(float(part) / shape.width for part in shape.dash.split()))
        axes.add_artist(Line2D(*zip(*shape.at, strict=True), **common))
    else:
        common["facecolor"] = theme[shape.fill] if shape.fill else "none"
        common["linewidth"] = shape.width * PRINT if shape.stroke else 0
        if shape.stroke:
            common["edgecolor"] = theme[shape.stroke]
        circle = shape.kind == "mark" and shape.look == "circle"
        axes.add_artist(Circle(shape.at[0], shape.size, **common) if circle else Polygon(corners(shape), **common))
