"""Milliseconds and memory of a whole training step, by method and objective.

python benchmarks/methods.py split-cifar10/simsiam/lump split-cifar10/simsiam/cassle
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import add_json, add_steps, positive, run_script, script
from benchmarks.printing import show_rows
from benchmarks.timing import RANGE, save_rows, steps_in_task
from ptlf.report.live import console
from ptlf.run.build import choose_device
from ptlf.run.recipes import resolve_config
from ptlf.run.record import environment, source_commit


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script("python benchmarks/methods.py", __doc__)
    add("recipes", "trained on noise; ratios are to the first", nargs="+", metavar="RECIPE")
    add("--task", "which task, from 1: some methods change", positive, default=2)
    add_steps(add)
    add_json(add)
    return run_script(parser, print_methods, argv)


def print_methods(
    recipes: Sequence[str], task: int, size: int, steps: int, json: Path | None, overrides: Sequence[str]
) -> None:
    configs = [resolve_config(recipe, None, overrides) for recipe in recipes]
    rows = steps_in_task(configs, size, steps, task)
    where = environment(choose_device(configs[0].device))
    title = f"A step in task {task}, images of {size} px on {where['device_name']}; {RANGE}"
    show_rows(console, "methods", title, rows)
    save_rows(json, commit=source_commit(), environment=where, task=task, size=size, steps=steps, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
