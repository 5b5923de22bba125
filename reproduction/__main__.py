"""The command line: find the runs, make those that are missing, print ours beside the paper's."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.options import run_script, script
from benchmarks.planning import PLAN, show_plan
from ptlf.commands.parser import Parser, new_file, seed
from ptlf.commands.train import check_alone
from ptlf.core.errors import UserError
from ptlf.core.files import write_whole
from ptlf.report.live import Live, console, tell
from ptlf.run.sweep import describe_runs
from ptlf.stream.pack import data_root
from reproduction import runs as found_runs
from reproduction.figures import write_paper_figures
from reproduction.page import document, show_differences, show_table
from reproduction.tables import FIGURES, TABLES


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(make_parser(), reproduce, argv, several=True)


def make_parser() -> Parser:
    parser, add = script("python -m reproduction", __doc__)
    parser.epilog = (
        "It can be stopped at any moment; the same command continues. Settings, such as --training.epochs 20, hold for "
        "all runs."
    )
    names = [*TABLES, "all", "figures"]
    add("table", f"one of {', '.join(names)}", choices=names, metavar="TABLE")
    scales = "smoke: minutes on a CPU, once `ptlf data get` has the sets; short: 20 epochs; paper: the full protocol"
    add("--scale", scales, choices=found_runs.SCALES, default="paper")
    about = "every run is trained with every seed; runs with other seeds that are there count too"
    add("--seeds", about, seed, nargs="+", default=[0], metavar="SEED")
    add("--runs", "a folder below this for each run (default: runs/reproduce/SCALE)", Path, metavar="DIR")
    add("--plan", PLAN, bool)
    add("--show", "train nothing: print the tables, or draw the figures, from the runs that are there", bool)
    about = "train nothing: write this Markdown page from the runs that are there"
    add("--write", about, partial(new_file, ends=[".md"]), metavar="FILE")
    add("--pictures", "folder for the pictures of `figures` (default: figures in the folder of the runs)", Path)
    return parser


def reproduce(
    table: str,
    scale: str,
    seeds: list[int],
    runs: Path | None,
    plan: bool,
    show: bool,
    write: Path | None,
    pictures: Path | None,
    overrides: Sequence[str],
) -> None:
    if any(word.partition("=")[0] == "--seed" for word in overrides):
        raise UserError("--seed is of one run; give --seeds, such as --seeds 0 1 2")
    check_alone("python -m reproduction")
    if write and (table, scale) != ("all", "paper"):
        raise UserError("--write is of all tables at the paper's scale: `python -m reproduction all --write FILE`")
    chosen = {"figures": FIGURES, **TABLES}
    tables = list(TABLES.values()) if table == "all" else [chosen[table]]
    runs = runs or Path("runs", "reproduce", scale)
    kept, here = found_runs.KEPT, Path.cwd()
    if kept.is_relative_to(here):
        kept = kept.relative_to(here)  # as a user in the clone would name it
    planned = found_runs.make_plan(tables, scale, seeds, runs, overrides, [kept])
    if write:
        return write_whole(write, document(planned.results(), found_runs.remarks(kept), found_runs.full_runs(kept)))
    small = f"at --scale {scale} differences to the paper mean nothing; its protocol is --scale paper"
    if scale != "paper":
        tell(small)
    for pack, lacking in sorted(planned.left_out.items()):
        root = data_root(lacking[0].config.data_root)
        left = f"{len(lacking)} run{'s' * (len(lacking) > 1)} of it cannot be made"
        tell(f"{pack} is not in {root}: `ptlf data get {pack}` brings it; until then {left}")
    if plan:
        for folder in planned.of_other_seeds():
            tell(f"done, of another seed: {folder}")
        return show_plan(planned.there(), planned.missing, cannot_be_made(planned))
    done = len(planned.there())
    tell(describe_runs(done, planned.missing) + cannot_be_made(planned))
    failed = []
    if planned.missing and scale == "paper" and not show:
        tell("--plan says how long that takes on this machine; --show prints what is there")
    for run, results in () if show else found_runs.train_missing(planned, Live, tell):
        if isinstance(results, UserError):
            failed.append(run.name)
            tell(f"{run.name}: failed: {results}")
    if table == "figures":
        without = [cell.row for cell in FIGURES.cells if not planned.results().get(cell.key)]
        drawn = write_paper_figures(planned.results(), pictures or runs / "figures")
        tell(f"{drawn} files in {pictures or runs / 'figures'}" if drawn else "no figure can be drawn")
        if without:
            tell(f"without runs of: {', '.join(without)}")
    for one in tables if table != "figures" else []:
        show_table(console, one, planned.results())
    show_differences(console, planned.results())
    if scale != "paper":
        tell(small)
    if failed:
        raise UserError(f"{len(failed)} runs failed (see above): {', '.join(failed)}; the same command tries again")


def cannot_be_made(planned: found_runs.Plan) -> str:
    """How many runs wait for data sets, and for which."""
    if not planned.left_out:
        return ""
    count, sets = sum(map(len, planned.left_out.values())), ", ".join(sorted(planned.left_out))
    return f", {count} cannot be made without the data: {sets} (`ptlf data get NAME`)"


if __name__ == "__main__":
    sys.exit(main())
