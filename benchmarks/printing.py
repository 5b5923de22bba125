"""The benchmarks' tables in the terminal."""

from rich.console import Console

from ptlf.core.errors import clipped
from ptlf.report.measures import COSTS, Measure
from ptlf.report.runs import split_prefix
from ptlf.report.tables import new_table, note
from ptlf.run.results import STEADY, Json

TIMES = f"time relative to another run: {STEADY}"


def column(title: str, key: str, unit: str, digits: int, cost: bool = False, scale: float = 0.0) -> Measure:
    """A figure of a benchmark's row."""
    return Measure(title, (key,), unit, digits, cost, scale=scale)


STEP = column("step", "step_ms", "ms", 2, True)


MEMORY = [
    column("views", "views_per_second", "per ms", 1, scale=1000),
    column("kept", "kept_bytes", "MiB", 0, True),
    column("peak", "peak_memory_bytes", "MiB", 0, True),
]


SPREAD, DEVICE = column("±", "step_ms_spread", "ms", 2), column("device", "device_ms", "ms", 2)


STAGE_COLUMNS = [column("steps", "steps", "", 0), STEP, column("median", "median_step_ms", "ms", 2, True), *MEMORY]


FREEZING_COLUMNS = [
    column("kept", "kept_bytes", "MiB", 1, True),
    column("backward", "backward_flops", "GFLOPs", 2, True, 1e9),
    column("step", "seconds", "ms", 0, True, 1e-3),
]


BENCHMARKS = {  # the headings of what names a row, by its key there; the figures of a row
    "freezing": ({"frozen": "frozen", "way": "how"}, FREEZING_COLUMNS),
    "step": ({"frozen": "frozen"}, [STEP, SPREAD, DEVICE, *MEMORY, column("rebuild", "rebuild_seconds", "s", 1)]),
    "methods": ({"recipe": "recipe"}, [STEP, SPREAD, DEVICE, *MEMORY[1:]]),
}


OVERHEADS = [
    *(column(measure.title, measure.path[-1], "s", 1) for measure in COSTS[1:] if measure.unit == "s"),
    column("learning after the first task", "later_learning_seconds", "s", 1, True),
    column("  of it correlation", "later_correlation_share", "%", 1, scale=0.01),
    column("whole run", "wall_seconds", "s", 1, True),
    column("GPU waits for the host", "host_share", "%", 1, scale=0.01),
    *(column(f"{probe} accuracy", f"{probe}_accuracy", "%", 2) for probe in ("knn_task", "knn_class")),
    *(column(f"{probe} forgetting", f"{probe}_forgetting", "points", 2) for probe in ("knn_task", "knn_class")),
]


def show_rows(console: Console, kind: str, title: str, rows: list[Json]) -> None:
    """Of a benchmark of that kind; costs also relative to the first row."""
    names, columns = BENCHMARKS[kind]
    if "recipe" in names:
        common, short = split_prefix([row["recipe"] for row in rows])
        title = f"{common}: {title}" if common else title
        rows = [row | {"recipe": name} for row, name in zip(rows, short, strict=True)]
    table = new_table(title, list(names.values()), [column.heading for column in columns])
    for row in rows:
        ratios = {f"{key}_ratio": ratio_or_none(row[key], rows[0][key]) for column in columns for key in column.path}
        cells = [cell_of(column, row | ratios, row is rows[0]) for column in columns]
        table.add_row(*[str(row[name]) for name in names], *cells)
    console.print(table)


def show_comparison(console: Console, comparison: Json) -> None:
    """The step by run and freeze stage, and below it the overheads; costs also relative to the first run."""
    runs, columns = comparison["runs"], STAGE_COLUMNS
    common, names = split_prefix([run["run"] for run in runs])
    title = f"{common or names[0]} on {runs[0]['environment'].get('device_name')}"
    title += f"; x: relative to {names[0]} in the same tasks"
    table = new_table(title, ["run", "stage"], [column.heading for column in columns])
    for name, run in zip(names, runs, strict=True):
        table.add_section()
        for row in run["stages"]:
            cells = [cell_of(column, row, run is runs[0]) for column in columns]
            table.add_row(name if row is run["stages"][0] else "", row["stage"], *cells)
    console.print(table)
    below = new_table("", [""], names)
    for line in OVERHEADS:
        below.add_row(line.title, *[cell_of(line, run["overheads"], run is runs[0], unit=True) for run in runs])
    console.print(below)
    if len(runs) > 1:
        note(console, TIMES)


def cell_of(measure: Measure, row: Json, first: bool, *, unit: bool = False) -> str:
    """Of a benchmark's row, with the ratio that stands beside a cost there, but in the first row."""
    (key,) = measure.path
    relative = row.get(f"{key}_ratio") if measure.cost and not first else None
    words = (measure.words if unit else measure.show)(row.get(key))
    return words if relative is None else f"{words}  {relative:.2f}x"


def show_kernels(console: Console, rows: list[Json], most: int = 15) -> None:
    """What took the time of a step, for each stage that was profiled."""
    for row in rows:
        kernels = row.get("kernels", [])
        if total := sum(kernel["ms"] for kernel in kernels):
            title = f"{row['frozen']} frozen: {total:.2f} ms in {len(kernels)} kinds"
            table = new_table(title, ["kernel"], ["calls", "ms", "share"])
            for kernel in kernels[:most]:
                share, ms = f"{kernel['ms'] / total:.1%}", f"{kernel['ms']:.3f}"
                table.add_row(clipped(kernel["name"], 60), f"{kernel['calls']:.0f}", ms, share)
            console.print(table)


def ratio_or_none(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
