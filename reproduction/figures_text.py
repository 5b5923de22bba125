"""What docs/reproduction.md says of the paper's figures."""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from ptlf.run.results import Json

Found = Mapping[tuple[str, tuple[str, ...]], Sequence[Json]]  # by `Cell.key`: the results of every seed
PTLF = ("split-cifar10/simsiam/ptlf", ())
LAST_STAGE = "stages.3."  # of ResNet-18
HEADING = "## The paper's figures: `python -m reproduction figures`\n"
FULL = """**At the full protocol**: the PTLF runs of Split CIFAR-10 with SimSiam in the tables above, drawn by
`python -m reproduction figures --show --pictures docs/pictures/full`. Supervised learning, ratios computed in every
epoch and other final ratios were not run at this scale; small runs of them are below.

![A panel per pair of tasks, ratios of 20 units; small dots are single seeds.](pictures/full/paper-correlation.png)

As in the paper, the ratios are lowest in the last layers: in the {late} units of the last stage they lie between
{late_low:.3f} and {late_high:.3f}, in the {early} units before it between {early_low:.3f} and {early_high:.3f}.
So the order among most units rests on small differences, but it is no accident. Of the {chosen} units that are frozen
at a task's end two seeds share {seeds:.0f} % in the mean, and consecutive tasks of a run {tasks:.0f} %; {chosen} of
{units} units drawn at random would share {random:.0f} %.

![Units down, tasks across; hollow units are frozen at the task's end.](pictures/full/paper-units.png)

*Units that are updated to the end of each task (filled), seed 0.* As in the paper the choice is much the same in all
tasks, and the last layers are updated. But the paper finds the first layer updated too. Here the first unit is frozen
at the end of {stem} of {ptlf} tasks, and the first to freeze in {stem_first} of them (every PTLF run at the full
protocol, tasks after the first). In {in_order} of the {cost_aware} such tasks of `ptlf-cost` and `ptlf-deep` the units
froze one after the other from the input on: what the paper calls "top layers".
"""
SMALL_RUNS = """**Small runs**, kept in [results/figures](../results/figures): 600 images per class of CIFAR-10,
ResNet-18 with 16 channels, 30 epochs per task, one seed, on a CPU, by

```sh
# needs CIFAR-10
python -m reproduction figures --scale paper --runs runs/figures --pictures docs/pictures --encoder.width 16 \\
  --training.precision bf16 --stream.per_class 600 --training.epochs 30 --training.batch 64 --probes.knn_class.k 50
```

**Task-correlation ratio by unit**, for consecutive tasks: PTLF with SimSiam beside supervised learning with the same
freezing. Units are counted from the input. The paper draws them for LUMP, without freezing, and finds the ratios of
supervised learning lower and more varied. These runs do not show that: with labels the ratio is the higher one in 69 of
80 places (a unit in a task), and the ratios without labels vary more.

![A panel per pair of tasks, ratios of 20 units, self-supervised and supervised.](pictures/paper-correlation.png)

**Overlap of the selected units between epochs**, by task, where ratios are computed anew in every epoch in which a unit
freezes. The paper has more than 0.8, the dashed line; here 0.92, 0.95, 0.97, 0.92 in tasks 2 to 5, so that this agrees.
Units that are frozen already are in both selections: with the others drawn at random it would be 0.61.

![A bar per task: the share of a selection that the next one keeps, and that of chance.](pictures/paper-overlap.png)

**Units that are updated in each task**, at final freeze ratios of 0.3 and 0.5: filled dots train to the task's end,
hollow ones are frozen by then. In the first task nothing freezes.

![Units down, tasks across, a panel per ratio.](pictures/paper-units.png)
"""


def overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Share of the larger selection that the other one also holds; 1 for two empty ones."""
    larger = max(len(set(first)), len(set(second)))
    return len(set(first) & set(second)) / larger if larger else 1.0


def full_figures(found: Found) -> str:
    """What the ratios and the choice of units are at the full protocol; empty without two seeds of it."""
    runs = found.get(PTLF, ())
    if len(runs) < 2:
        return ""
    units, entries = runs[0]["units"], [entry for run in runs for entry in run["freezing"]]
    late = [unit for unit in units if unit.startswith(LAST_STAGE)]
    of_late = [entry["ratios"][unit] for entry in entries for unit in late]
    of_early = [entry["ratios"][unit] for entry in entries for unit in units if unit not in late]
    same_task = [(one, two) for one, two in itertools.combinations(entries, 2) if one["task"] == two["task"]]
    in_a_row = [pair for run in runs for pair in itertools.pairwise(run["freezing"])]
    chosen, ptlf, cost_aware = (
        len(entries[0]["order"]),
        orders(found, "/ptlf"),
        orders(found, "/ptlf-cost", "/ptlf-deep"),
    )
    return FULL.format(
        late=len(late),
        late_low=min(of_late),
        late_high=max(of_late),
        early=len(units) - len(late),
        early_low=min(of_early),
        early_high=max(of_early),
        chosen=chosen,
        units=len(units),
        seeds=100 * shared(same_task),
        tasks=100 * shared(in_a_row),
        random=100 * chosen / len(units),
        stem=sum(all_units[0] in order for order, all_units in ptlf),
        stem_first=sum(all_units[0] == order[0] for order, all_units in ptlf),
        ptlf=len(ptlf),
        in_order=sum(order == all_units[: len(order)] for order, all_units in cost_aware),
        cost_aware=len(cost_aware),
    )


def shared(pairs: Sequence[tuple[Json, Json]]) -> float:
    return statistics.fmean(overlap(one["order"], two["order"]) for one, two in pairs)


def orders(found: Found, *methods: str) -> list[tuple[list[str], list[str]]]:
    """Of every task after the first in these methods' runs: units in the order in which they froze, and all units."""
    named = [runs for (recipe, settings), runs in found.items() if recipe.endswith(methods) and not settings]
    return [(entry["order"], run["units"]) for runs in named for run in runs for entry in run["freezing"]]
