"""Train a recipe with growing shares of its units frozen; list and draw what accuracy costs.

    python benchmarks/frontier.py digits/simsiam/lump --out runs/frontier --final 0.4 0.8

The pictures are written beside the runs, as frontier-*.svg and .png.
"""

import itertools
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.frontier_picture import COSTS, leading, points, relative_costs, write_frontier
from benchmarks.options import run_script, script
from benchmarks.planning import PLAN, show_plan
from ptlf.commands.parser import seed, share
from ptlf.commands.train import check_alone, write_page
from ptlf.core.errors import UserError
from ptlf.report.live import Live, console, tell
from ptlf.report.measures import OVER_SEEDS, RATIOS, probe_measures, title_of
from ptlf.report.runs import Comparison, read_comparison
from ptlf.report.tables import cell, new_table, note, show_results
from ptlf.run.folder import has_finished_as
from ptlf.run.recipes import resolve_config
from ptlf.run.sweep import Planned, Tell, describe_runs, train_all


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script(
        "python benchmarks/frontier.py", __doc__, epilog="Settings, such as --training.epochs 20, hold for all runs."
    )
    add("recipe", "STREAM/OBJECTIVE/METHOD; it is also trained without freezing", metavar="RECIPE")
    add("--orders", "policies", nargs="+", default=["correlation", "cost_aware"], metavar="POLICY")
    add("--initial", "shares of the units frozen in a task's first epoch", share, nargs="+", default=[0.0, 0.2])
    add("--final", "shares frozen in its last epoch", share, nargs="+", default=[0.2, 0.4, 0.6, 0.8])
    add("--seeds", "every setting is trained with every seed", seed, nargs="+", default=[0], metavar="SEED")
    add("--out", "a folder below this for each run; finished ones are kept", Path, required=True, metavar="DIR")
    add("--plan", PLAN, bool)
    return run_script(parser, train_frontier, argv, several=True)


def train_frontier(recipe: str, seeds: list[int], out: Path, plan: bool, overrides: Sequence[str], **grid: Any) -> None:
    """grid: `orders`, `initial` and `final`, for `plan_frontier`."""
    check_alone("python benchmarks/frontier.py")
    for word in overrides:
        if word.partition("=")[0] in ("--seed", "--freezing.policy", "--freezing.initial", "--freezing.final"):
            raise UserError(f"{word.partition('=')[0]} is varied here; see --help")
    runs = plan_frontier(recipe, seeds=seeds, out=out, overrides=overrides, tell=cache(tell), **grid)
    missing = [run for run in runs if not has_finished_as(run.folder, run.config)]
    if plan:
        return show_plan([run.folder for run in runs if run not in missing], missing)
    done = len(runs) - len(missing)
    tell(describe_runs(done, missing))
    for run, results in train_all(missing, Live, tell, done):
        show_results(console, results, run.folder, brief=True)
    folders, baseline = [run.folder for run in runs], f"no-freezing-seed{seeds[0]}"
    comparison = read_comparison(folders, baseline)
    show_frontier(console, recipe, comparison)
    write_frontier(comparison, out)
    write_page(folders, out / "report.html", baseline)


def plan_frontier(
    recipe: str,
    orders: Sequence[str],
    initial: Sequence[float],
    final: Sequence[float],
    seeds: Sequence[int],
    out: Path,
    overrides: Sequence[str],
    tell: Tell = lambda line: None,
) -> list[Planned]:
    """The recipe without freezing, then every order with every initial share and every final one that is not less."""
    shares = list(itertools.product(initial, final))
    if above := ", ".join(f"{low:g} to {high:g}" for low, high in shares if low > high):
        if all(low > high for low, high in shares):
            hint = "give a lower --initial or a higher --final"
            raise UserError(f"every initial share is above the final one ({above}): nothing would freeze; {hint}")
        tell(f"left out, initial share above the final one: {above}")
    runs = []
    for number in dict.fromkeys(seeds):
        settings = {"no-freezing": ["--freezing.policy=none"]}
        for order, (low, high) in itertools.product(orders, shares):
            if low <= high:
                words = [f"--freezing.policy={order}", f"--freezing.initial={low}", f"--freezing.final={high}"]
                settings[f"{order}-{low:g}-{high:g}"] = words
        for name, words in settings.items():
            config = resolve_config(recipe, None, [*overrides, *words, f"--seed={number}"], tell=tell)
            runs.append(Planned(f"{recipe} {name} seed {number}", config, out / f"{name}-seed{number}"))
    return runs


def show_frontier(console: Console, recipe: str, comparison: Comparison) -> None:
    """One row per policy and shares, with the costs of the picture: those of the tasks after the first."""
    probe = comparison.probes[0] if comparison.probes else ""
    scores = probe_measures(probe)[:2] if probe else []
    columns = []  # per cost, its cells by label
    for kind in COSTS:
        best = leading(points(comparison, kind, scores[0].path), scores[0].rising) if scores else set()
        costs = relative_costs(comparison, kind)
        columns.append({label: f"{'* ' * (label in best)}{cost:.2f}x" for label, cost in costs.items()})
    title = f"What accuracy costs: {recipe}" + (f", {title_of(probe)}" if probe else "")
    headings = ["initial", "final", *(f"{measure.short}\n{measure.unit}" for measure in scores), "time", "bytes\nkept"]
    table = new_table(title, ["policy"], headings, padding=(0, 1 if console.width >= 100 else 0))
    for group in comparison.groups:
        freezing = group.config["freezing"]
        policy = freezing["policy"]["name"]
        shares = ["", ""] if policy == "none" else [f"{freezing[key]:g}" for key in ("initial", "final")]
        cells = [cell(measure, group, None, brief=True) for measure in scores]
        table.add_row(policy, *shares, *cells, *[column.get(group.label, "-") for column in columns])
    console.print(table)
    if any(len(group.runs) > 1 for group in comparison.groups):
        note(console, f"{OVER_SEEDS}; {RATIOS}")
    note(console, "time, bytes kept: in the tasks after the first, relative to no freezing")
    if scores:
        note(console, "*: on the Pareto front; no other setting is better in one and at least as good in the other")


if __name__ == "__main__":
    sys.exit(main())
