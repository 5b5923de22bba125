"""Every key of the configuration has an effect: with another value, a tiny run comes to something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny_config
from PIL import Image

from ptlf.core.settings import describe
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.stream.folders import pack_folder

Settings = dict[str, Any]
QUICK: Settings = {"stream.per_class": 20, "training.epochs": 1, "training.batch": 16}
FREEZING: Settings = {"training.epochs": 2, "freezing.final": 0.67}
SPLIT: Settings = {
    "stream.groups": None,
    "stream.classes": 4,
    "stream.tasks": 2,
    "data_root": "one",
    "evaluation.knn_class.k": 5,
}
FOLDER: Settings = {
    "stream.name": "folder",
    "stream.groups": None,
    "data_root": "one",
    "training.batch": 8,
    "evaluation.knn_class.k": 5,
}
PROBES: Settings = {
    "evaluation.knn_task.k": 15,
    "evaluation.linear.enabled": True,
    "evaluation.linear.epochs": 10,
    "evaluation.linear.lr": 1.0,
    "evaluation.ridge.enabled": True,
}
HEADS: Settings = {"objective.projection": 16}
WIDE: Settings = {"objective.hidden": 16, **HEADS}
CHECKPOINTS: Settings = {"evaluation.gallery": False, "checkpoint.keep": 9}
BASES: dict[str, tuple[str, Settings]] = {
    "finetune": ("simsiam/finetune", {}),
    "probes": ("simsiam/finetune", PROBES),
    "two epochs": ("simsiam/finetune", {"training.epochs": 2}),
    "a folder": ("simsiam/finetune", CHECKPOINTS),
    "split": ("simsiam/finetune", SPLIT),
    "classes": ("simsiam/finetune", {**FOLDER, "stream.pack": "pets", "stream.tasks": 2}),
    "tasks": ("simsiam/finetune", {**FOLDER, "stream.pack": "days", "stream.labelled": "pets"}),
    "ptlf": ("simsiam/ptlf", FREEZING),
    "ptlf-cost": ("simsiam/ptlf-cost", FREEZING),
    "simsiam": ("simsiam/finetune", HEADS),
    "barlow_twins": ("barlow_twins/cassle", HEADS),
    "mocov2plus": ("mocov2plus/cassle", {**WIDE, "objective.queue": 32}),
    "byol": ("byol/finetune", WIDE),
    "simclr": ("simclr/cassle", WIDE),
    "vicreg": ("vicreg/finetune", HEADS),
    "lump": ("simsiam/lump", {}),
    "si": ("simsiam/si", {}),
    "der": ("simsiam/der", {}),
    "pnn": ("simsiam/pnn", {"encoder.name": "conftest:tiny_resnet"}),
    "cassle": ("simsiam/cassle", {"method.hidden": 16}),
    "pfr": ("simsiam/pfr", {"method.hidden": 16}),
}
CHANGES: dict[str, Settings] = {
    "finetune": {
        "seed": 1,
        "stream.groups": [[0, 2], [1, 3]],
        "stream.per_class": 10,
        "views.name": "lump",
        "views.size": 12,
        "encoder.name": "conftest:dropping_encoder",
        "objective.name": "simclr",
        "method.name": "si",
        "training.optimizer": "lars",
        "training.lr": 0.1,
        "training.momentum": 0.5,
        "training.weight_decay": 0.0,
        "training.schedule": "cosine",
        "training.batch": 20,
        "training.epochs": 2,
        "training.last_batch": "drop",
        "training.precision": "bf16",
        "training.channels_last": True,
        "evaluation.enabled": False,
    },
    "probes": {
        "evaluation.knn_task.k": 1,
        "evaluation.knn_task.temperature": 0.02,
        "evaluation.knn_class.k": 1,
        "evaluation.knn_class.temperature": 0.02,
        "evaluation.linear.enabled": False,
        "evaluation.linear.epochs": 20,
        "evaluation.linear.batch": 20,
        "evaluation.linear.lr": 5.0,
        "evaluation.linear.momentum": 0.0,
        "evaluation.linear.weight_decay": 0.1,
        "evaluation.ridge.enabled": False,
        "evaluation.ridge.penalty": 100.0,
    },
    "two epochs": {"training.warmup": 1},
    "a folder": {
        "evaluation.gallery": True,
        "checkpoint.enabled": False,
        "checkpoint.every_epochs": 0,
        "checkpoint.every_steps": 2,
        "checkpoint.every_minutes": 1e-9,
        "checkpoint.keep": 1,
    },
    "split": {
        "stream.name": "split-cifar10",
        "stream.tasks": 4,
        "stream.classes": 6,
        "stream.class_order": "seeded",
    },
    "classes": {"stream.pack": "plants", "data_root": "other"},
    "tasks": {"stream.labelled": "plants"},
    "ptlf": {
        "freezing.policy": "ascending",
        "freezing.initial": 0.34,
        "freezing.final": 0.34,
        "freezing.shape": "constant",
        "freezing.update": "per-epoch",
        "freezing.threshold": 0.8,
        "freezing.batches": 1,
        "freezing.batch_statistics": True,
        "freezing.save_memory": False,
    },
    "ptlf-cost": {"freezing.sharpness": 0.0, "freezing.savings": "seconds"},
    "simsiam": {"objective.projection": 8, "objective.bottleneck": 8},
    "barlow_twins": {
        "objective.projection": 8,
        "objective.redundancy": 0.5,
        "objective.scale": 0.5,
        "objective.distill_scale": 1.0,
    },
    "mocov2plus": {
        "objective.hidden": 8,
        "objective.projection": 8,
        "objective.queue": 16,
        "objective.temperature": 1.0,
        "objective.momentum_start": 0.5,
        "objective.momentum_end": 0.995,
        "objective.distill_temperature": 1.0,
    },
    "byol": {
        "objective.hidden": 8,
        "objective.projection": 8,
        "objective.momentum_start": 0.5,
        "objective.momentum_end": 0.95,
    },
    "simclr": {
        "objective.hidden": 8,
        "objective.projection": 8,
        "objective.temperature": 1.0,
        "objective.distill_temperature": 1.0,
    },
    "vicreg": {
        "objective.projection": 8,
        "objective.invariance": 1.0,
        "objective.variance": 1.0,
        "objective.covariance": 10.0,
    },
    "lump": {"method.alpha": 4.0, "method.mix_first_task": False, "memory.size": 8, "views.memory": "lump"},
    "si": {"method.strength": 40.0, "method.damping": 0.01, "method.clip": 0.001},
    "der": {"method.alpha": 4.0},
    "pnn": {"method.width": 0.5},
    "cassle": {"method.weight": 0.1, "method.hidden": 8},
    "pfr": {"method.weight": 0.1, "method.hidden": 8},
}
WITHOUT_EFFECT = {
    "recipe": "says where the other settings came from",
    "device": "the same run elsewhere; the machines that test this may have one device",
    "stream.resident": "the same images from another place",
    "training.engine": "the same step, made faster; compiling takes longer than all of these runs",
    "evaluation.batch": "the same features, in more or fewer forwards",
    "distributed.sync_batch_norm": "one process has nobody to share statistics with",
}


def name_of(base: str, key: str) -> str:
    """A key that only one objective or method has comes after that one's name."""
    section, _, rest = key.partition(".")
    if section not in ("objective", "method") or rest == "name":
        return key
    objective, method = BASES[base][0].split("/")
    return f"{objective if section == 'objective' else method} {key}"


CASES = {name_of(base, key): (base, key, value) for base, some in CHANGES.items() for key, value in some.items()}


def test_every_key_is_changed_or_said_to_have_no_effect() -> None:
    members = {*OBJECTIVES, *METHODS}
    heads = [(about.partition(":")[0], key) for key, _, about in describe(Config)]
    keys = {f"{head} {key}" if head in members else key for head, key in heads}
    assert keys == {*CASES, *WITHOUT_EFFECT}
    assert len(CASES) == sum(map(len, CHANGES.values()))
    assert not CASES.keys() & WITHOUT_EFFECT.keys()


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of packed sets, `one` and `other`, that hold sets of the same names."""
    root = tmp_path_factory.mktemp("packs")
    random = np.random.default_rng(0)
    for place in ("one", "other"):
        for name, folders in (("pets", "classes"), ("plants", "classes"), ("days", "tasks"), ("cifar10", "classes")):
            for label in range(10 if name == "cifar10" else 2):
                folder = root / "images" / place / name / str(label)
                folder.mkdir(parents=True)
                for number in range(10):
                    Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
            held_out = {"test_fraction": 0.2} if folders == "classes" else {}
            source = root / "images" / place / name
            pack_folder(source, root / place, name, size=8, folders=folders, workers=1, progress=False, **held_out)
    return root


@pytest.fixture(autouse=True)
def among_packs(packs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packs)


def without_seconds(value: Any) -> Any:
    """Nor the settings that figures are recorded with."""
    if isinstance(value, Mapping):
        return {k: without_seconds(v) for k, v in value.items() if k != "settings" and "second" not in k}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def shares(costs: Mapping[str, float]) -> dict[str, float]:
    return {name: cost / sum(costs.values()) for name, cost in costs.items()}


def outcome(base: str, out: Path, **changed: Any) -> dict[str, Any]:
    """What a run comes to, with nothing in it that only repeats the configuration."""
    recipe, settings = BASES[base]
    config = tiny_config(f"digits/{recipe}", **{**QUICK, **settings, **changed})
    run = Run(config, out if base == "a folder" else None)
    results = run.train()
    parts = ("class_order", "tasks", "eval_splits", "units", "probes", "freezing", "cost")
    return {
        **without_seconds({part: results[part] for part in parts}),
        "savings": shares({name: saving.weight_cost for name, saving in (run.freezing.context.savings or {}).items()}),
        "encoder": {name: (x.stride(), x.tolist()) for name, x in run.model.encoder.state_dict().items()},
        "files": {str(path.relative_to(out)) for path in out.rglob("*")},
    }


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    """Outcomes of the bases, as far as they were needed."""
    return {}


@pytest.mark.parametrize("base", BASES)
def test_without_a_change_the_outcome_is_the_same(base: str, known: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    known[base] = outcome(base, tmp_path / "first")
    assert known[base] == outcome(base, tmp_path / "again")


@pytest.mark.parametrize("case", CASES)
def test_a_changed_key_changes_the_outcome(case: str, known: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    base, key, value = CASES[case]
    if base not in known:
        known[base] = outcome(base, tmp_path / "base")
    assert known[base] != outcome(base, tmp_path / "changed", **{key: value})
