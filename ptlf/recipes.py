"""Recipes STREAM/OBJECTIVE/METHOD: a complete configuration from a stream's, an objective's and a method's settings.

`EXPECTED` says what a recipe takes and gives, for those that were run; the runs are kept in `results/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptlf.errors import unknown
from ptlf.settings import merge

LUMP_PROTOCOL: dict[str, Any] = {
    "views": {"name": "lump", "memory": "memory"},
    "encoder": {"name": "resnet18"},
    "training": {"epochs": 200, "batch": 256, "lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4},
    "memory": {"size": 256},
}
STREAMS: dict[str, dict[str, Any]] = {
    "digits": {
        "views": {"name": "digits", "memory": "digits"},
        "encoder": {"name": "resnet18-mini"},
        "training": {"epochs": 30, "batch": 64, "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4},
        "memory": {"size": 64},
        "evaluation": {"knn_class": {"k": 20}},
    },
    "split-cifar10": LUMP_PROTOCOL,
    "split-cifar100": LUMP_PROTOCOL,
    "split-tinyimagenet": LUMP_PROTOCOL,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "simsiam": {},
    "barlow_twins": {},
    "supervised": {"views": {"name": "supervised"}},
}
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {"method": {"name": "finetune"}},
    "multitask": {"method": {"name": "multitask"}},
    "lump": {"method": {"name": "lump"}},
    "ptlf": {"method": {"name": "lump"}, "freezing": {"policy": "correlation"}},
}
DIGITS: dict[str, dict[str, Any]] = {  # heads and rates for the small network, in place of OBJECTIVES
    "simsiam": {"objective": {"projection": 256, "bottleneck": 64}},
    "barlow_twins": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
    "supervised": {"training": {"lr": 0.06}},
}
SUPERVISED_METHODS = ("finetune", "multitask")  # mixing images without mixing their labels makes no sense

DEFAULT = "digits/simsiam/ptlf"
EXPECTED: dict[str, str] = {}


def names() -> list[str]:
    return [
        f"{stream}/{objective}/{method}"
        for stream in STREAMS
        for objective in OBJECTIVES
        for method in METHODS
        if objective != "supervised" or method in SUPERVISED_METHODS
    ]


def recipe(name: str) -> Mapping[str, Any]:
    """The recipe's settings as a nested dict, with `recipe` naming it."""
    if name not in names():
        raise unknown("recipe", name, names())
    stream, objective, method = name.split("/")
    settings = merge(STREAMS[stream], {"recipe": name, "stream": {"name": stream}, "objective": {"name": objective}})
    settings = merge(settings, (DIGITS if stream == "digits" else OBJECTIVES)[objective])
    return merge(settings, METHODS[method])
