"""The tables and figures of the paper as data: which run each cell is, and the values the paper prints.

A value that the paper does not print is left out, and rows of ours that it does not have come without any.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ptlf.run.results import STEADY

STREAMS = {
    "split-cifar10": "Split CIFAR-10",
    "split-cifar100": "Split CIFAR-100",
    "split-tinyimagenet": "Split Tiny-ImageNet",
    "imagenet100": "ImageNet-100",
}
SPLIT = list(STREAMS)[:3]
OBJECTIVES = {"simsiam": "SimSiam", "barlow_twins": "Barlow Twins", "mocov2plus": "MoCo v2+"}
METHODS = {
    "finetune": "Finetune",
    "pnn": "PNN",
    "si": "SI",
    "der": "DER",
    "cassle": "CaSSLe",
    "lump": "LUMP",
    "ptlf": "PTLF",
    "multitask": "Multitask",
    "pfr": "PFR",
    "ptlf-cost": "PTLF, cost-aware",
    "ptlf-deep": "PTLF, deep",
}
QUALITY, COST = ("accuracy", "forgetting"), ("time", "memory", "flops")
ADDED = ("just learned", "knn_class")  # measures that the paper does not have
RUNS = 3  # behind each value of the main table
BARLOW, CIFAR10, CIFAR100 = "barlow_twins", "split-cifar10", "split-cifar100"


@dataclass(frozen=True)
class Cell:
    """A run of the paper: `settings`, as on the command line, hold on top of the recipe.

    paper: the values printed, by measure: accuracy in %, forgetting in points, costs as ratios.
    spread: the standard deviations printed beside them, over `RUNS` runs.
    baseline: the recipe that costs are relative to; empty for the baseline itself and where no costs are shown.
    """

    row: str
    column: str
    recipe: str
    paper: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    baseline: str = ""
    spread: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """Cells with the same key are the same run, whatever table they are in."""
        return self.recipe, self.settings

    @property
    def name(self) -> str:
        """The recipe and the values of the settings, such as "split-cifar10/barlow_twins/ptlf per-epoch"."""
        return " ".join([self.recipe, *(word.partition("=")[2] for word in self.settings)])


@dataclass(frozen=True)
class Table:
    """notes: how it was measured, what the paper leaves open here, or prints differently elsewhere."""

    title: str
    measures: tuple[str, ...]
    cells: tuple[Cell, ...]
    probe: str = "knn_task"
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def cell(self, row: str, column: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


# Accuracy and forgetting on the three streams, in the paper's order.
Pairs = tuple[tuple[float | None, float | None], ...]
MAIN: Mapping[str, Mapping[str, Pairs]] = {
    "simsiam": {
        "finetune": ((90.11, 5.43), (75.42, 10.19), (71.07, 9.48)),
        "pnn": ((90.93, None), (66.58, None), (62.15, None)),
        "si": ((92.75, 1.81), (80.08, 5.54), (72.34, 8.26)),
        "der": ((91.22, 4.63), (77.27, 9.31), (71.90, 8.36)),
        "cassle": ((91.04, 2.24), (81.58, 5.02), (75.77, 4.42)),
        "lump": ((91.00, 2.92), (82.30, 4.71), (76.66, 3.54)),
        "ptlf": ((91.03, 1.61), (82.24, 2.73), (76.68, 2.33)),
        "multitask": ((95.76, None), (86.31, None), (82.89, None)),
    },
    "barlow_twins": {
        "finetune": ((87.72, 4.08), (71.97, 9.45), (66.28, 8.89)),
        "pnn": ((87.52, None), (57.93, None), (48.70, None)),
        "si": ((90.21, 2.03), (75.04, 7.43), (56.96, 17.04)),
        "der": ((88.67, 2.41), (73.48, 7.98), (68.56, 7.87)),
        "cassle": ((89.04, 1.89), (77.05, 2.47), (71.76, 2.88)),
        "lump": ((89.72, 1.13), (80.24, 3.53), (72.17, 2.43)),
        "ptlf": ((89.73, 0.92), (80.54, 2.24), (73.56, 1.74)),
        "multitask": ((95.48, None), (87.16, None), (82.42, None)),
    },
}
# What another work prints for CaSSLe on the last two streams: runs of its own in LUMP's public code (InfoUCL, IEEE
# Transactions on Multimedia, 2024; the table in its repository's README, learninginvision/InfoUCL).
ELSEWHERE: Mapping[str, Pairs] = {
    "simsiam": ((82.99, 1.48), (78.42, 2.50)),
    "barlow_twins": ((75.89, 4.58), (71.86, 2.83)),
}
# What stands after ± there: the paper does not say what it is, probably standard deviations over the three runs.
SPREADS: Mapping[str, Mapping[str, Pairs]] = {
    "simsiam": {
        "finetune": ((0.12, 0.08), (0.78, 0.78), (0.20, 0.56)),
        "pnn": ((0.22, None), (1.0, None), (1.35, None)),
        "si": ((0.06, 0.21), (1.3, 1.3), (0.42, 0.64)),
        "der": ((0.3, 0.26), (0.30, 0.09), (1.44, 2.06)),
        "cassle": ((0.24, 0.23), (0.84, 1.12), (1.74, 1.24)),
        "lump": ((0.40, 0.53), (1.35, 1.52), (2.39, 1.04)),
        "ptlf": ((0.44, 0.23), (1.24, 1.13), (2.51, 1.14)),
        "multitask": ((0.08, None), (0.38, None), (0.49, None)),
    },
    "barlow_twins": {
        "finetune": ((0.32, 0.56), (0.54, 1.01), (1.23, 0.66)),
        "pnn": ((0.33, None), (2.98, None), (2.59, None)),
        "si": ((0.08, 0.22), (0.63, 0.67), (1.48, 0.89)),
        "der": ((0.30, 0.26), (0.53, 0.29), (1.47, 0.44)),
        "cassle": ((0.34, 0.14), (0.75, 0.44), (0.65, 0.45)),
        "lump": ((0.30, 0.18), (1.04, 0.83), (0.89, 1.00)),
        "ptlf": ((0.41, 0.23), (0.88, 0.84), (1.02, 0.62)),
        "multitask": ((0.14, None), (0.52, None), (0.74, None)),
    },
}
OURS = ("pfr", "ptlf-cost", "ptlf-deep")  # methods that the paper's tables do not have

# Time, memory and backward FLOPs relative to LUMP. The baselines' are the same on all streams, for both objectives.
BASELINE_COSTS = {"pnn": 1.35, "si": 1.2, "der": 1.0, "lump": 1.0, "cassle": 1.3}
PTLF_COSTS = {
    "simsiam": ((0.88, 0.77, 0.68), (0.86, 0.74, 0.67), (0.88, 0.76, 0.68)),
    "barlow_twins": ((0.87, 0.78, 0.65), (0.88, 0.79, 0.66), (0.88, 0.75, 0.67)),
}


def values(measures: Sequence[str], printed: Sequence[float | None]) -> dict[str, float]:
    return {measure: value for measure, value in zip(measures, printed, strict=True) if value is not None}


def main_cells() -> Iterator[Cell]:
    for objective, rows in MAIN.items():
        for method in (*rows, *OURS):
            for place, stream in enumerate(SPLIT):
                paper = values(QUALITY, rows[method][place]) if method in rows else {}
                spread = values(QUALITY, SPREADS[objective][method][place]) if method in rows else {}
                row, recipe = f"{OBJECTIVES[objective]}, {METHODS[method]}", f"{stream}/{objective}/{method}"
                yield Cell(row, STREAMS[stream], recipe, paper, spread=spread)


def cost_cells() -> Iterator[Cell]:
    for objective, own in PTLF_COSTS.items():
        for method in (*BASELINE_COSTS, "ptlf", "ptlf-cost", "ptlf-deep"):
            for place, stream in enumerate(SPLIT):
                same = BASELINE_COSTS.get(method)
                printed = own[place] if method == "ptlf" else (same, same, same)
                baseline = "" if method == "lump" else f"{stream}/{objective}/lump"
                row, recipe = f"{OBJECTIVES[objective]}, {METHODS[method]}", f"{stream}/{objective}/{method}"
                yield Cell(row, STREAMS[stream], recipe, values(COST, printed), baseline=baseline)


def imagenet_cells() -> Iterator[Cell]:
    measures = (*QUALITY, *COST[:2])
    for objective, method, row, printed in (
        ("barlow_twins", "cassle", "CaSSLe", (68.2, 1.3, 1.0, 1.0)),
        ("barlow_twins", "cassle-ptlf", "PTLF", (68.5, 0.7, 0.88, 0.78)),
        ("mocov2plus", "cassle", "CaSSLe", (68.0, 2.2, 1.0, 1.0)),
        ("mocov2plus", "cassle-ptlf", "PTLF", (67.9, 1.4, 0.89, 0.79)),
    ):
        baseline = "" if method == "cassle" else f"imagenet100/{objective}/cassle"
        name, recipe = f"{OBJECTIVES[objective]}, {row}", f"imagenet100/{objective}/{method}"
        yield Cell(name, STREAMS["imagenet100"], recipe, values(measures, printed), baseline=baseline)


def barlow_cells(rows: Mapping[str, tuple[tuple[str, ...], Pairs]]) -> Iterator[Cell]:
    """PTLF with Barlow Twins on CIFAR-10 and CIFAR-100: by row, its settings and the paper's values on each."""
    for row, (settings, printed) in rows.items():
        for stream, pair in zip((CIFAR10, CIFAR100), printed, strict=True):
            yield Cell(row, STREAMS[stream], f"{stream}/{BARLOW}/ptlf", values(QUALITY, pair), settings)


def ratio_cells() -> Iterator[Cell]:
    for final, printed in {
        "0.4": (89.73, 0.86, 0.87, 0.78),
        "0.5": (89.01, 0.75, 0.83, 0.70),
        "0.6": (88.40, 0.66, 0.76, 0.64),
        "0.7": (87.62, 0.60, 0.71, 0.57),
    }.items():
        settings = () if final == "0.4" else (f"--freezing.final={final}",)
        recipe, baseline = f"{CIFAR10}/{BARLOW}/ptlf", f"{CIFAR10}/{BARLOW}/lump"
        yield Cell(final, STREAMS[CIFAR10], recipe, values((*QUALITY, *COST[:2]), printed), settings, baseline)


def supervised_cells() -> Iterator[Cell]:
    for row, recipe, baseline, printed in (
        ("supervised, Finetune", "supervised/finetune", "", (82.87, 14.26, 1.0, 1.0)),
        ("supervised, layer-wise", "supervised/layerwise", "supervised/finetune", (80.45, 16.52, 0.85, 0.72)),
        ("Barlow Twins, LUMP", f"{BARLOW}/lump", "", (89.72, 1.13, 1.0, 1.0)),
        ("Barlow Twins, layer-wise", f"{BARLOW}/ptlf", f"{BARLOW}/lump", (89.73, 0.86, 0.87, 0.75)),
    ):
        paper, base = values((*QUALITY, *COST[:2]), printed), f"{CIFAR10}/{baseline}" if baseline else ""
        yield Cell(row, STREAMS[CIFAR10], f"{CIFAR10}/{recipe}", paper, baseline=base)


KNN = (
    "Accuracy is that of `knn_task` in %: k nearest neighbours among the task's own training images, where k is the "
    "number of tasks seen so far, as in LUMP's code since October 2022. The code published with LUMP's paper has "
    "k = 200 (`knn_task_k200` in newer records). Forgetting is counted from a task's best accuracy before the last "
    "task, in points; 'just learned' counts it from the accuracy right after the task, as LUMP's code does since then. "
    "The published code counts it from the best of all checkpoints, over all tasks. The paper's formula can be read as "
    "any of the three. `knn_class` is the accuracy among all classes."
)
CHANCE = (
    f"The paper's ± is taken for the standard deviation of its {RUNS} runs. The ± of a difference is half the width of "
    "its 95 % t interval (Welch's); a single run of ours is taken to spread as the paper's do. ‡ the interval excludes "
    "zero. One in twenty does so by chance, and at a single run it rests on the paper's spread alone."
)
COSTS = (
    f"Time: seconds of all steps, correlations and rebuilds, where {STEADY}; memory: activation bytes saved for "
    "backward, mean over the epochs; FLOPs: counted, backward only; each as a ratio of runs with the same seed. The "
    "paper's memory also counts weights and replay memory."
)
TABLES: Mapping[str, Table] = {
    "main": Table("Accuracy and forgetting", (*QUALITY, *ADDED), tuple(main_cells()), notes=[KNN, CHANCE]),
    "cost": Table("Cost relative to LUMP", COST, tuple(cost_cells()), notes=[COSTS]),
    "imagenet100": Table(
        "ImageNet-100, linear probe",
        (*QUALITY, *COST[:2]),
        tuple(imagenet_cells()),
        probe="linear",
        notes=["PTLF is CaSSLe with correlation freezing; costs are relative to CaSSLe.", COSTS],
    ),
    "one-shot": Table(
        "Ratios computed once or in every epoch",
        QUALITY,
        tuple(barlow_cells({
            "one-shot": ((), ((89.73, 0.86), (80.54, 2.24))),
            "per-epoch": (("--freezing.update=per-epoch",), ((89.81, 0.80), (80.33, 2.10))),
        })),
        notes=[
            "The paper does not name the objective; its one-shot accuracies are Barlow Twins' in the main table.",
            "It prints a forgetting of 0.86 for the run that has 0.92 in the main table.",
        ],
    ),
    "top-layers": Table(
        "Order of freezing",
        QUALITY,
        tuple(barlow_cells({
            "from the input on": (("--freezing.policy=ascending",), ((89.24, 0.96), (78.87, 2.57))),
            "by correlation": ((), ((90.03, 0.92), (80.54, 2.24))),
            "random": (("--freezing.policy=random",), ((None, None), (None, None))),
        })),
        notes=[
            "Barlow Twins. The paper prints 90.03 for the run that has 89.73 in the main table.",
            "The random order is a control of ours.",
        ],
    ),
    "ratio": Table(
        "Final freeze ratio",
        (*QUALITY, *COST[:2]),
        tuple(ratio_cells()),
        notes=["Barlow Twins; costs are relative to LUMP.", COSTS],
    ),
    "supervised": Table(
        "Layer-wise freezing with labels and without",
        (*QUALITY, *COST[:2]),
        tuple(supervised_cells()),
        notes=[
            "The paper does not name the stream; its rows without labels are Barlow Twins on Split CIFAR-10.",
            "For them it prints a memory of 0.75 here, 0.78 in the cost table.",
        ],
    ),
}  # fmt: skip

# The runs of the paper's figures, by what they are there for.
FIGURES = Table(
    "Figures",
    (),
    (
        Cell("self-supervised", STREAMS[CIFAR10], f"{CIFAR10}/simsiam/ptlf"),
        Cell("supervised", STREAMS[CIFAR10], f"{CIFAR10}/supervised/layerwise"),
        Cell("per-epoch", STREAMS[CIFAR10], f"{CIFAR10}/simsiam/ptlf", settings=("--freezing.update=per-epoch",)),
        Cell("ratio 0.3", STREAMS[CIFAR10], f"{CIFAR10}/simsiam/ptlf", settings=("--freezing.final=0.3",)),
        Cell("ratio 0.5", STREAMS[CIFAR10], f"{CIFAR10}/simsiam/ptlf", settings=("--freezing.final=0.5",)),
    ),
)
