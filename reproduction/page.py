"""The paper's tables with our figures in them: in the terminal, and as docs/reproduction.md."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from scipy.special import stdtrit

from benchmarks.frontier_picture import later_seconds
from ptlf.core.errors import UserError
from ptlf.report.intervals import Interval, Ratio, interval, mean_ratio, verdict
from ptlf.report.runs import RunRecord, at, later_mean
from ptlf.report.tables import new_table, note
from ptlf.run.results import STEADY, Json, epoch_lines
from reproduction.figures_text import HEADING, SMALL_RUNS, full_figures
from reproduction.tables import (
    ADDED,
    ELSEWHERE,
    METHODS,
    OBJECTIVES,
    QUALITY,
    RUNS,
    SPLIT,
    STREAMS,
    TABLES,
    Cell,
    Table,
)

Key = tuple[str, tuple[str, ...]]  # `Cell.key`
Found = Mapping[Key, Sequence[Json]]  # the results of every seed of a run
Remarks = Mapping[str, str]  # by `Cell.name`
Value = Callable[[Json], float | None]
MINUS = "−"
DAGGER = "† runs of different commits; compare with care."
RATIOS = "Ratios: geometric mean over seeds; in brackets the 95 % t interval of their logarithms."
WIDEST = 1000  # columns, more than any table has


COSTS: Mapping[str, Value] = {
    "time": lambda run: RunRecord(Path(), run).value(("cost", "steady_learning_seconds")),
    "memory": lambda run: at(run, ("cost", "mean_kept_bytes")),
    "flops": lambda run: at(run, ("cost", "backward_flops")),
}


def score(table: Table, measure: str, run: Json) -> float | None:
    probe, name = {
        "just learned": (table.probe, "forgetting_just_learned"),
        "knn_class": ("knn_class", "accuracy"),
    }.get(measure, (table.probe, measure))
    return at(run, ("probes", probe, name))


def figure(table: Table, cell: Cell, measure: str, found: Found) -> Interval | Ratio | None:
    """Ours, over the seeds. Costs are ratios to the baseline's run of the same seed; seconds only on one device."""
    runs = found.get(cell.key, ())
    if measure not in COSTS:
        values = [score(table, measure, run) for run in runs]
        return interval([value for value in values if value is not None])
    cost = COSTS[measure]
    if not cell.baseline:
        return Ratio(1.0, None, len(runs)) if any(map(cost, runs)) else None
    both = [(cost(run), cost(base)) for run, base in pairs(cell, measure, found)]
    return mean_ratio([mine / base for mine, base in both if mine and base])


def pairs(cell: Cell, measure: str, found: Found) -> list[tuple[Json, Json]]:
    """The cell's runs, each with the baseline's of the same seed, of which both have this cost."""
    runs, bases = found.get(cell.key, ()), found.get((cell.baseline, ()), ())
    cost, both = COSTS[measure], matched(runs, bases, same_device=measure == "time")
    return [(run, base) for run, base in both if cost(run) and cost(base)]


def matched(runs: Sequence[Json], bases: Sequence[Json], *, same_device: bool) -> list[tuple[Json, Json]]:
    """Each with the baseline's run of the same seed, where there is one."""
    seeds = {base["seed"]: base for base in bases}
    both = [(run, seeds[run["seed"]]) for run in runs if run["seed"] in seeds]
    return [(run, base) for run, base in both if not same_device or device(run) == device(base)]


def mixed(both: Iterable[tuple[Json, Json]]) -> bool:
    """Whether any run and its baseline are of different commits."""
    return any(run.get("commit") != base.get("commit") for run, base in both)


def dagger(cell: Cell, measure: str, found: Found) -> str:
    """Stands beside a ratio of seconds of different commits; `DAGGER` explains it."""
    if measure != "time" or not cell.baseline:
        return ""
    return "†" * mixed(pairs(cell, measure, found))


def notes(table: Table, found: Found) -> list[str]:
    marked = any(dagger(cell, measure, found) for cell in table.cells for measure in table.measures)
    return [*table.notes, *[DAGGER] * marked]


def device(results: Json) -> str:
    return str(results["environment"].get("device_name"))


def commit(results: Json) -> str:
    """Its first seven digits; `-dirty` where files had changed."""
    words = str(results.get("commit") or "not known")
    return words[:7] + "-dirty" * words.endswith("-dirty") if words[:7].isalnum() else words


def number(value: float | None, measure: str, *, sign: bool = False) -> str:
    if value is None:
        return ""
    shown = f"{value:{'+' if sign else ''}.2f}".replace("-", MINUS)
    return shown + "x" * (measure in COSTS and not sign)


def ours(found: Interval | Ratio | None, measure: str, mark: str = "") -> list[str]:
    """The mean and its interval: as ±, of a ratio in brackets, in a part of its own. mark: `dagger`, of a ratio."""
    if found is None:
        return []
    mean = number(found.mean, measure)
    if isinstance(found, Ratio):
        return [mean + mark] + (["({:.2f} to {:.2f})".format(*found.ends)] if found.ends else [])
    return [mean if found.half is None else f"{mean} ±{found.half:.2f}"]


def printed(cell: Cell, measure: str) -> str:
    """The paper's value and its standard deviation."""
    spread = cell.spread.get(measure)
    return number(cell.paper.get(measure), measure) + (f" (sd {spread:.2f})" if spread is not None else "")


def difference_to(mine: Interval, mean: float, spread: float | None, count: int) -> Interval:
    """`mine` minus the mean of `count` other values, of which only the standard deviation, `spread`, is known: Welch's
    t interval, with degrees of freedom rounded down. A single value of mine is taken to spread as the others do."""
    half = None
    if spread is not None:
        theirs, degrees = spread**2 / count, float(count - 1)
        own = spread**2 / mine.count
        if mine.half is not None:
            own = (mine.half / float(stdtrit(mine.count - 1, 0.975))) ** 2
            degrees = (own + theirs) ** 2 / (own**2 / (mine.count - 1) + theirs**2 / (count - 1))
        half = float(stdtrit(int(degrees), 0.975)) * math.sqrt(own + theirs)
    return Interval(mine.mean - mean, half, mine.count)


def from_paper(cell: Cell, measure: str, mine: Interval | Ratio | None) -> str:
    """Ours minus the paper's; ‡ where its interval excludes zero."""
    theirs = cell.paper.get(measure)
    if mine is None or theirs is None:
        return ""
    if isinstance(mine, Ratio):
        return number(mine.mean - theirs, measure, sign=True)
    both = difference_to(mine, theirs, cell.spread.get(measure), RUNS)
    shown = number(both.mean, measure, sign=True)
    return shown if both.half is None else f"{shown} ±{both.half:.2f}" + "‡" * both.excludes_zero


def show_table(console: Console, table: Table, found: Found) -> None:
    """As in the paper, a row per method and a column per stream and measure; where the console is too narrow for that,
    a table per stream."""
    whole = drawn(table, table.columns, found)
    fits = console.measure(whole, options=console.options.update(width=WIDEST)).maximum <= console.width
    for shown in [whole] if fits else [drawn(table, [column], found) for column in table.columns]:
        console.print(shown)
    costs = [RATIOS] * any(measure in COSTS for measure in table.measures)
    for words in ("±: 95 % t interval over seeds.", *costs, *notes(table, found)):
        note(console, words)


def drawn(table: Table, columns: Sequence[str], found: Found) -> RichTable:
    """Below ours the paper's and the difference; of a line without any figure nothing is shown."""
    headings = [f"{column.removeprefix('Split ')}\n{measure}" for column in columns for measure in table.measures]
    title = table.title
    if len(columns) == 1:
        title, headings = f"{title}, {columns[0]}", list(table.measures)
    shown = new_table(title, ["", ""], headings)
    for column in shown.columns:
        column.no_wrap = column is not shown.columns[0]
    for row in table.rows:
        lines: dict[str, list[str]] = {"ours": [], "paper": [], "diff.": []}
        for stream in columns:
            cell = table.cell(row, stream)
            for measure in table.measures:
                mine = figure(table, cell, measure, found) if cell else None
                lines["ours"].append("\n".join(ours(mine, measure, dagger(cell, measure, found) if cell else "")))
                lines["paper"].append(number(cell.paper.get(measure), measure) if cell else "")
                lines["diff."].append(from_paper(cell, measure, mine) if cell else "")
        shown.add_section()
        known = {name: cells for name, cells in lines.items() if any(cells)} or {"ours": lines["ours"]}
        for place, (name, cells) in enumerate(known.items()):
            shown.add_row("" if place else row, name, *cells)
    return shown


def seconds_of_later_tasks(results: Json) -> float | None:
    return later_seconds(epoch_lines(results))


def later_mebibytes(results: Json) -> float | None:
    kept = later_mean(epoch_lines(results), "kept_bytes")
    return None if kept is None else kept / 2**20


# What methods are compared by; whether more is better. Later tasks are those after the first, in which units freeze.
DIFFERENCES: Mapping[str, tuple[Value, bool]] = {
    "accuracy, points": (lambda run: at(run, ("probes", "knn_task", "accuracy")), True),
    "forgetting, points": (lambda run: at(run, ("probes", "knn_task", "forgetting")), False),
    "knn_class, points": (lambda run: at(run, ("probes", "knn_class", "accuracy")), True),
    "knn_class forgetting, points": (lambda run: at(run, ("probes", "knn_class", "forgetting")), False),
    "training of later tasks, s": (seconds_of_later_tasks, False),
    "kept in later tasks, MiB": (later_mebibytes, False),
}


class Difference(NamedTuple):
    """By seed, what may be said of it, and whether it is of seconds of different commits."""

    said: str
    both: Interval | None
    mixed: bool


def differences(found: Found) -> dict[str, dict[str, list[Difference]]]:
    """For every stream and objective, each method with two seeds or more in common with LUMP: its differences."""
    tables: dict[str, dict[str, list[Difference]]] = {}
    for (recipe, settings), runs in found.items():
        stream, objective, method = recipe.split("/")
        bases = found.get((f"{stream}/{objective}/lump", ()), ())
        if method not in METHODS or method == "lump" or settings or len(matched(runs, bases, same_device=False)) < 2:
            continue
        row = []
        for value, rising in DIFFERENCES.values():
            seconds = value is seconds_of_later_tasks
            compared = matched(runs, bases, same_device=seconds)
            values = [(value(run), value(base)) for run, base in compared]
            both = interval([mine - theirs for mine, theirs in values if mine is not None and theirs is not None])
            row.append(Difference(verdict(both, rising), both, seconds and both is not None and mixed(compared)))
        tables.setdefault(f"{STREAMS[stream]}, {OBJECTIVES[objective]}", {})[METHODS[method]] = row
    return tables


def signed(found: Difference) -> str:
    if found.both is None:
        return ""
    half = "" if found.both.half is None else f" ± {found.both.half:.2f}"
    return f"{found.both.mean:+.2f}{half}".replace("-", MINUS) + "†" * found.mixed


def show_differences(console: Console, found: Found) -> None:
    for title, rows in differences(found).items():
        shown = new_table(f"{title}: difference to LUMP by seed, 95 % t interval", ["", "", "", ""], [])
        for method, cells in rows.items():
            count = max(cell.both.count for cell in cells if cell.both)
            shown.add_section()
            for place, (measure, cell) in enumerate(zip(DIFFERENCES, cells, strict=True)):
                shown.add_row({0: method, 1: f"{count} seeds"}.get(place, ""), measure, signed(cell), cell.said)
        shown.show_header = False
        console.print(shown)
        if any_mixed(rows):
            note(console, DAGGER)


def any_mixed(rows: Mapping[str, Sequence[Difference]]) -> bool:
    return any(cell.mixed for cells in rows.values() for cell in cells)


HEAD = """# The paper's tables, and ours

Made by `python -m reproduction all --write docs/reproduction.md` from the runs in [results](../results); a test checks
it. `python -m reproduction TABLE` makes the runs that are missing. An empty cell was not run: {filled} of the paper's
{printed} values have one of ours beside them (a run that stands in several tables counts once, costs that are 1 by
definition do not count). ± is half the width of a 95 % t interval over the seeds; a single seed has none. A ratio is
the geometric mean of the ratios by seed, with the 95 % t interval of their logarithms in brackets. Seconds are
those of steps, correlations and rebuilds, where {steady}; the
mean over the seeds. Rows without a value of the paper are ours.
"""
PAIRED = """## Differences to LUMP, by seed

A method's value minus LUMP's with the same seed: mean and 95 % t interval. "Better" and "worse" stand only where the
interval excludes zero. Later tasks are all but the first, the ones in which units freeze; training is the seconds of
steps, correlations and rebuilds; kept is the mean over their epochs of what is saved for backward.
"""


def document(found: Found, remarks: Remarks, kept: Sequence[tuple[str, Json]] = ()) -> str:
    """docs/reproduction.md. kept: every finished run at the full protocol, with its folder's name."""
    unknown = set(remarks) - {cell.name for table in TABLES.values() for cell in table.cells}
    if unknown:
        raise UserError(f"results/remarks.yaml speaks of runs that no table has: {', '.join(sorted(unknown))}")
    values = {
        (cell.key, table.probe, measure): figure(table, cell, measure, found)
        for table in TABLES.values()
        for cell in table.cells
        for measure in cell.paper
        if measure not in COSTS or cell.baseline  # else 1 by definition
    }
    filled = sum(value is not None for value in values.values())
    head = HEAD.format(filled=filled, printed=len(values), steady=STEADY)
    shown: set[str] = set()
    sections = [head, *(section(name, table, found, remarks, shown) for name, table in TABLES.items())]
    sections += [both_k(kept), elsewhere(found), paired_section(found), HEADING, full_figures(found), SMALL_RUNS]
    return "\n".join(sections)


BOTH_K = """## The k of the nearest neighbours

Runs that recorded `knn_task` with both k: as many as tasks seen, as LUMP's code has it since October 2022, and 200, as
in the code published with its paper. One seed each, and three runs shared the GPU, so their seconds are not compared.
Accuracy / forgetting from the best before the last task; 'all checkpoints' is the published code's forgetting.

"""
WHICH_K = """
- With k = 200 accuracy is 1.0 to 1.9 points lower. Finetune's accuracy then agrees with the paper's, which spreads by
  0.12; its forgetting fits the growing k better. LUMP fits either: its seeds spread too much to tell. CaSSLe stays 1.6
  above the paper's. So which k the paper's rows have is not decided by these runs.
- The order of the methods is the same with either k.
- PFR with the first 8 of 20 units frozen from a task's first step (`pfr-prefix-0.4`) ends 4.7 above LUMP in `knn_class`
  and 1.8 below PFR. One seed: LUMP's own seeds spread by 2.1.
- `ptlf-below-0.965` has TRGP's threshold and one direction fewer than the formula (`freezing.reach false`). Its first
  unit has the highest ratio in every task all the same, and is frozen first. So the threshold does not explain why the
  paper's first layer trains.
"""


def both_k(kept: Sequence[tuple[str, Json]]) -> str:
    """Nothing where no run has both."""
    rows, table = [], TABLES["main"]
    papers = {cell.recipe: cell.paper for cell in table.cells}
    for name, run in kept:
        if "knn_task_k200" not in run["probes"]:
            continue
        probes = [run["probes"][name] for name in ("knn_task", "knn_task_k200")]
        pairs = [[number(probe["accuracy"], ""), number(probe["forgetting"], "")] for probe in probes]
        plain = re.fullmatch(r"([\w-]+)-seed\d+(-\w+)?", name) and not re.search(r"\d\.\d", name)
        paper = papers.get(run["config"]["recipe"], {}) if plain else {}
        theirs = [number(paper[measure], "") for measure in QUALITY if measure in paper]
        every = number(probes[1]["forgetting_all_checkpoints"], "")
        whole = number(run["probes"]["knn_class"]["accuracy"], "")
        rows.append([f"`{name}`", *(" / ".join(pair) for pair in (*pairs, theirs)), every, whole])
    headings = ["run", "k = tasks seen", "k = 200", "the paper's", "k = 200, all checkpoints", "`knn_class`"]
    return BOTH_K + markdown(headings, rows) + WHICH_K if rows else ""


SAME_ROWS = """## The paper's rows in another work

InfoUCL (IEEE Transactions on Multimedia, 2024), which builds on LUMP's public code, prints the paper's values of
Finetune, PNN, SI, DER, LUMP and Multitask on Split CIFAR-100 and Split Tiny-ImageNet to the hundredth, with both
objectives ([its README](https://github.com/learninginvision/InfoUCL)). Two works do not get the same hundredths by
running anew: these rows of the paper are most likely LUMP's own, taken over, and what they were run with is for LUMP's
paper to say. InfoUCL's CaSSLe is a run of its own. Its configurations have the weight 1 and its loss is the negative
cosine, as here; its predictor has 512 hidden units. It tests with a constant k (20 on Split CIFAR-100) and counts
forgetting from the best of all checkpoints, those before the task included, so its forgetting is another measure.
Accuracy / forgetting:

"""


def elsewhere(found: Found) -> str:
    """CaSSLe: ours, the paper's, and that of another work."""
    table, rows = TABLES["main"], []
    for objective, streams in ELSEWHERE.items():
        for stream, pair in zip(SPLIT[1:], streams, strict=True):
            cell = table.cell(f"{OBJECTIVES[objective]}, {METHODS['cassle']}", STREAMS[stream])
            assert cell is not None
            mine = [one.mean for measure in QUALITY if (one := figure(table, cell, measure, found))]
            three = mine, [cell.paper[measure] for measure in QUALITY], pair
            rows.append([cell.row, cell.column, *(" / ".join(number(value, "") for value in some) for some in three)])
    return SAME_ROWS + markdown(["", "stream", "ours", "the paper's", "InfoUCL's"], rows)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def section(name: str, table: Table, found: Found, remarks: Remarks, shown: set[str]) -> str:
    """A table with its remarks. shown: runs whose remark stands in an earlier section; those of this one are added."""
    compared = [measure for measure in table.measures if measure not in ADDED]
    headings = ["", "stream", *(words for measure in compared for words in (measure, "paper", "difference"))]
    headings += [measure for measure in table.measures if measure in ADDED]
    rows, said, above = [], [], False
    for cell in table.cells:
        runs, row = found.get(cell.key, ()), [cell.row, cell.column]
        if cell.baseline and set(table.measures) <= COSTS.keys():
            runs = [run for run, _ in pairs(cell, table.measures[-1], found)]  # seeds that the baseline has too
        for measure in table.measures:
            mine = figure(table, cell, measure, found)
            row.append(" ".join(ours(mine, measure, dagger(cell, measure, found))))
            if measure in compared:
                row += [printed(cell, measure), from_paper(cell, measure, mine)]
        rows.append([*row, *made_with(runs)])
        if cell.name in remarks:
            where = f"{cell.row}, {cell.column}"
            above |= cell.name in shown
            said += [] if cell.name in shown else [f"- {where}: {remarks[cell.name]}\n"]
            shown.add(cell.name)
    text = f"## {table.title}: `python -m reproduction {name}`\n\n" + " ".join(notes(table, found)) + "\n\n"
    text += markdown([*headings, "seeds", "commit", "device", "seconds"], rows)
    if said:
        text += "\n" + "".join(said)
    if above:
        text += "\nRemarks on runs that stand in a table above are there.\n"
    return text


def made_with(runs: Sequence[Json]) -> list[str]:
    if not runs:
        return [""] * 4
    seconds = [value for run in runs if (value := COSTS["time"](run)) is not None]
    return [
        ", ".join(str(run["seed"]) for run in runs),
        ", ".join(dict.fromkeys(map(commit, runs))),
        ", ".join(dict.fromkeys(map(device, runs))),
        f"{statistics.fmean(seconds):.0f}" if seconds else "",
    ]


def paired_section(found: Found) -> str:
    tables = differences(found)
    said = [
        bool(cell.said)
        for rows in tables.values()
        for cells in rows.values()
        for cell, measure in zip(cells, DIFFERENCES, strict=True)
        if measure.endswith("points")
    ]
    count = f"that exclude zero: {sum(said)} of {len(said)}; one in twenty would by chance."
    text = f"{PAIRED}Intervals of accuracies and forgetting {count}\n"
    text += f"{DAGGER}\n" * any(map(any_mixed, tables.values()))
    for title, rows in tables.items():
        text += f"\n**{title}**\n\n"
        shown = []
        for method, cells in rows.items():
            count = max(cell.both.count for cell in cells if cell.both)
            shown.append([method, str(count), *[f"{signed(cell)} {cell.said}".strip() for cell in cells]])
        text += markdown(["", "seeds", *DIFFERENCES], shown)
    return text
