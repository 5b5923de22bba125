"""Recipes STREAM/OBJECTIVE/METHOD: a complete configuration from a stream's, an objective's and a method's settings.

`EXPECTED` says what a recipe takes and gives, for those that were run; the runs are kept in `results/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptlf.core.errors import unknown
from ptlf.core.settings import merge

# A checkpoint of ResNet-18 with its heads is 150 MB; writing one takes longer than an epoch of Split CIFAR-10 on a GPU.
RARELY: dict[str, Any] = {"every_epochs": 0, "every_minutes": 2}
LUMP_PROTOCOL: dict[str, Any] = {
    "views": {"name": "lump", "memory": "memory"},
    "encoder": {"name": "resnet18"},
    "training": {"epochs": 200, "batch": 256, "lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4},
    "memory": {"size": 256},
    "checkpoint": RARELY,
}
CASSLE_PROTOCOL: dict[str, Any] = {
    "stream": {"class_order": "seeded"},
    "views": {"name": "cassle-barlow", "memory": "cassle-moco", "size": 224},
    "encoder": {"name": "resnet18-imagenet"},
    "training": {
        "epochs": 400,
        "batch": 256,
        "optimizer": "lars",
        "lr": 0.4,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "schedule": "cosine",
        "warmup": 10,
    },
    "memory": {"size": 256},
    "evaluation": {"linear": {"enabled": True}},
    "checkpoint": RARELY,
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
    "imagenet100": CASSLE_PROTOCOL,
    "folder": LUMP_PROTOCOL,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "simsiam": {},
    "barlow_twins": {},
    "mocov2plus": {},
    "byol": {},
    "simclr": {},
    "vicreg": {"objective": {"projection": 2048}},
    "supervised": {"views": {"name": "supervised"}},
}
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {"method": {"name": "finetune"}},
    "multitask": {"method": {"name": "multitask"}},
    "si": {"method": {"name": "si"}},
    "der": {"method": {"name": "der"}},
    "pnn": {"method": {"name": "pnn"}},
    "cassle": {"method": {"name": "cassle"}},
    "pfr": {"method": {"name": "pfr"}},
    "lump": {"method": {"name": "lump"}},
    "ptlf": {"method": {"name": "lump"}, "freezing": {"policy": "correlation"}},
    "ptlf-cost": {"method": {"name": "lump"}, "freezing": {"policy": "cost_aware"}},
    "cassle-ptlf": {"method": {"name": "cassle"}, "freezing": {"policy": "correlation"}},
    "layerwise": {"method": {"name": "finetune"}, "freezing": {"policy": "correlation"}},
}
# Of ResNet-18's 64 channels, so that many columns stay affordable: remembered from LUMP's appendix, not verified.
PNN_WIDTHS = {"split-cifar10": 1.0, "split-cifar100": 12 / 64, "split-tinyimagenet": 8 / 64}
DIGITS: dict[str, dict[str, Any]] = {  # heads and rates for the small network, in place of OBJECTIVES
    "simsiam": {"objective": {"projection": 256, "bottleneck": 64}},
    "barlow_twins": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
    "mocov2plus": {"objective": {"hidden": 256, "projection": 64, "queue": 512}},
    "byol": {"objective": {"hidden": 256, "projection": 64, "momentum_start": 0.9}},
    "simclr": {"objective": {"hidden": 256, "projection": 64}},
    "vicreg": {"objective": {"projection": 256}, "training": {"lr": 0.06}},
    "supervised": {"training": {"lr": 0.06}},
}
EQUAL_VIEWS = {"name": "cassle-moco", "memory": "cassle-moco", "size": 224}
SGD_COSINE = {"optimizer": "sgd", "warmup": 0}
IMAGENET100: dict[str, dict[str, Any]] = {  # CaSSLe's scripts where they have the objective, in place of OBJECTIVES
    "simsiam": {"views": EQUAL_VIEWS, "training": {**SGD_COSINE, "lr": 0.05}},  # SimSiam's own rate
    "barlow_twins": {"objective": {"scale": 0.1}},
    "mocov2plus": {"views": EQUAL_VIEWS, "training": SGD_COSINE},
    "byol": {"objective": {"momentum_start": 0.99}, "training": {"lr": 0.6, "weight_decay": 1e-5}},
    "simclr": {"objective": {"temperature": 0.2}, "views": EQUAL_VIEWS},
    "vicreg": {"objective": {"projection": 2048}},
    "supervised": {"views": EQUAL_VIEWS, "training": {**SGD_COSINE, "lr": 0.1}},
}
HEADS = {"digits": DIGITS, "imagenet100": IMAGENET100}
SUPERVISED_METHODS = ("finetune", "layerwise", "multitask")  # the paper's; `layerwise` is for these alone

DEFAULT = "digits/simsiam/ptlf"
EXPECTED: dict[str, str] = {
    "digits/simsiam/lump": "30 s on two cores: knn_class 92.9, random encoder 83.2",
    "digits/simsiam/ptlf": "30 s on two cores: knn_class 93.5, random encoder 83.2",
    "split-cifar10/simsiam/lump": "254 s on one H200: knn_task 91.20, forgetting 1.69, knn_class 64.60",
    "split-cifar10/simsiam/ptlf": "239 s on one H200: knn_task 91.26, forgetting 1.50, knn_class 65.00",
    "split-cifar10/simsiam/ptlf-cost": "220 s on one H200: knn_task 90.88, forgetting 1.56, knn_class 64.59",
}


def names() -> list[str]:
    return [
        f"{stream}/{objective}/{method}"
        for stream in STREAMS
        for objective in OBJECTIVES
        for method in METHODS
        if (method in SUPERVISED_METHODS if objective == "supervised" else method != "layerwise")
    ]


def recipe(name: str) -> Mapping[str, Any]:
    """The recipe's settings as a nested dict, with `recipe` naming it."""
    if name not in names():
        raise unknown("recipe", name, names())
    stream, objective, method = name.split("/")
    settings = merge(STREAMS[stream], {"recipe": name, "stream": {"name": stream}, "objective": {"name": objective}})
    settings = merge(settings, HEADS.get(stream, OBJECTIVES)[objective])
    settings = merge(settings, METHODS[method])
    if method == "pnn" and stream in PNN_WIDTHS:
        settings = merge(settings, {"method": {"width": PNN_WIDTHS[stream]}})
    return settings


def name_of(config: Mapping[str, Any]) -> str:
    """STREAM/OBJECTIVE/METHOD of these settings: the recipe's words where they still hold, and how it freezes where
    the method's word does not say so."""
    chosen = [config[section]["name"] for section in ("stream", "objective", "method")]
    words = (config.get("recipe") or "").split("/")
    if len(words) != len(chosen):
        words = chosen
    meant = METHODS.get(words[2], {})
    names = [*words[:2], meant.get("method", {}).get("name", words[2])]
    kept = [word if name == now else now for word, name, now in zip(words, names, chosen, strict=True)]
    name, policy = "/".join(kept), config["freezing"]["policy"]
    usual = METHODS.get(kept[2], {}).get("freezing", {}).get("policy", "none")
    if policy == usual:
        return name
    if policy == "none":
        return f"{name}, no freezing"
    return f"{name} + {policy} freezing"
