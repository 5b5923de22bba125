"""What the figures share: scales, ticks, legends, and how wide words are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ptlf.report.drawing import Drawing
from ptlf.report.runs import Group

SMALL, TINY = 12.0, 10.5
Series = dict[int, tuple[float, float]]  # by task or epoch: mean over seeds, standard deviation
Lines = Sequence[tuple[Group, Series]]


def words_width(words: str, size: float = SMALL) -> float:
    """Close to the true width in a common sans serif; generous, so that nothing runs into its neighbour."""
    narrow = sum(letter in "iljtf.,:;|!'()[] 1" for letter in words)
    return size * (0.6 * (len(words) - narrow) + 0.36 * narrow)


def shortened(words: str, room: float, size: float = SMALL, *, head: bool = True) -> str:
    """Cut in the middle, or without a head at the beginning, where names of units differ least."""
    short, keep = words, len(words)
    while keep > 3 and words_width(short, size) > room:
        keep -= 1
        first = keep // 3 if head else 0
        short = words[:first] + "…" + words[len(words) - (keep - first) + 1 :]
    return short


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1) * (self.end - self.start)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high]."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Sequence[float], *, zero: bool = False, least: float = 1.0) -> tuple[float, float]:
    """Bounds with a little air; from zero where lengths are compared."""
    low, high = (0.0 if zero else min(values)), max(values)
    air = max((high - low) * 0.08, 0.0 if high - low >= least else (least - (high - low)) / 2)
    return (0.0 if zero else low - air), high + air if high + air > low else low + least


def plain(value: float) -> str:
    return f"{value:.6g}".replace("-", "−")


def legend(drawing: Drawing, x: float, y: float, width: float, groups: Sequence[Group]) -> float:
    """Runs with line, marker and name, wrapped to the width. Returns the y below it."""
    at = x
    for group in groups:
        label = shortened(group.label, width - 34)
        need = 34 + words_width(label) + 14
        if at > x and at + need - 14 > x + width:
            at, y = x, y + 18
        role = f"run{group.colour}"
        drawing.line([(at, y), (at + 26, y)], role, width=2, dash=group.dash)
        drawing.mark(at + 13, y, role, size=3.2, look=group.marker)
        drawing.text(at + 32, y + 4, label, "ink", size=SMALL)
        at += need
    return y + 14


def task_key(drawing: Drawing, x: float, y: float, width: float, numbers: Sequence[int]) -> float:
    """A swatch per task in the order of the stream. Returns the y below it."""
    drawing.text(x, y + 4, "task", "soft", size=SMALL)
    room = min(34.0, (width - 36) / max(len(numbers), 1))
    sparse = math.ceil(15 / room) if room < 26 else 1
    for place, number in enumerate(numbers):
        left = x + 34 + place * room
        if room >= 26:
            drawing.mark(left + 4, y, f"task{number - 1}", size=4)
            drawing.text(left + 11, y + 4, str(number), "ink", size=SMALL)
        else:
            drawing.rect(left, y - 6, room - 1, 7, f"task{number - 1}")
            if place % sparse == 0:
                drawing.text(left + room / 2, y + 11, str(number), "soft", size=8, anchor="middle")
    return y + (14 if room >= 26 else 20)


def grid_y(
    drawing: Drawing, scale: Scale, left: float, right: float, *, most: int = 5, highest: float = math.inf
) -> None:
    for value in ticks(scale.low, min(scale.high, highest), most):
        y = scale(value)
        drawing.line([(left, y), (right, y)], "line")
        drawing.text(left - 6, y + 3.5, plain(value), "soft", size=TINY, anchor="end")


def line_chart(
    label: str,
    below: str,
    lines: Lines,
    last: int,
    places: Sequence[float],
    ends: tuple[float, float],
    width: float,
    first: int = 1,
) -> Drawing:
    """A line per run from `first` to `last`, with a band of one standard deviation where there are seeds. `places` are
    named on the axis, and `below` says what they are; `ends` are the least and the greatest value shown. The legend
    names the runs that have a line."""
    drawing, left, height = Drawing(width, 0, label), 40.0, 190.0
    top = legend(drawing, left, 10, width - left, [group for group, series in lines if series]) + 8
    y = Scale(*ends, top + height, top)
    x = Scale(first, last, left + 12, width - 12) if last > first else Scale(first - 1, first + 1, left, width)
    highest = 100.0 if ends[1] < 101 else math.inf  # nothing but the air above 100 %
    grid_y(drawing, y, left, width, highest=highest)
    for place in places:
        drawing.text(x(place), top + height + 16, plain(place), "soft", size=TINY, anchor="middle")
    drawing.text(width, top + height + 31, below, "soft", size=TINY, anchor="end")
    for group, series in lines:
        role = f"run{group.colour}"
        if any(spread for _, spread in series.values()):
            upper = [(x(place), y(min(value + spread, y.high, highest))) for place, (value, spread) in series.items()]
            lower = [(x(place), y(value - spread)) for place, (value, spread) in series.items()]
            drawing.area([*upper, *reversed(lower)], role, opacity=0.15)
        if len(series) > 1:
            drawing.line([(x(place), y(value)) for place, (value, _) in series.items()], role, width=2, dash=group.dash)
        for place, (value, _) in series.items():
            title = f"{group.label}: {value:.2f}"
            drawing.mark(x(place), y(value), role, size=3.4, look=group.marker, title=title)
    drawing.height = top + height + 36
    return drawing
