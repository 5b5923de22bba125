"""Every key of the configuration has an effect: another value changes the outcome of a tiny run.

Keys are found by walking the configuration and the families, and another value is worked out from the default, the
type, the bounds and the choices. A new key or member needs no line here, unless its effect does not show in these runs.
"""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config, tiny_encoder
from PIL import Image

from ptlf.core.registry import Registry
from ptlf.core.settings import as_dict, describe
from ptlf.objectives import OBJECTIVES
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.stream.packing import pack_folder
from ptlf.training.trainer import MeasuredStep

pytestmark = pytest.mark.slow

Settings = dict[str, Any]
QUICK: Settings = {
    "stream.per_class": 10, "training.epochs": 1, "training.batch": 14, "training.lr": 0.1, "probes.knn_class.k": 8,
}  # fmt: skip
PLAIN: Settings = {"objective.projection": 16}
SPLIT: Settings = {**PLAIN, "stream.groups": None, "stream.classes": 4, "stream.tasks": 2, "data_root": "one"}
FOLDER: Settings = {**PLAIN, "stream.name": "folder", "stream.groups": None, "data_root": "one", "training.batch": 8}
FREEZING: Settings = {**PLAIN, "training.epochs": 2, "freezing.final": 0.67, "freezing.policy": "correlation"}
SAVING: Settings = {**PLAIN, "checkpoint.keep": 9}
# What a key is tried with, by how it begins; the longest beginning counts. SAVING means: in a folder.
BASES: dict[str, Settings] = {
    "": PLAIN,
    "stream.name": SPLIT,
    "stream.tasks": SPLIT,
    "stream.class": SPLIT,
    "stream.pack": {**FOLDER, "stream.pack": "pets", "stream.tasks": 2},
    "data_root": {**FOLDER, "stream.pack": "pets", "stream.tasks": 2},
    "stream.labelled": {**FOLDER, "stream.pack": "days", "stream.labelled": "pets"},
    "objective.": {},
    "views.memory": {**PLAIN, "method": "lump"},
    "memory.": {**PLAIN, "method": "lump"},
    "encoder.mean": {**PLAIN, "encoder.mean": [0.5] * 3, "encoder.std": [0.5] * 3},
    "encoder.std": {**PLAIN, "encoder.mean": [0.5] * 3, "encoder.std": [0.5] * 3},
    "training.keep_views": {
        **PLAIN, "method": "anchor", "freezing.policy": "ascending", "freezing.initial": 0.34, "freezing.final": 0.34,
        "freezing.shape": "constant",
    },
    "freezing.": FREEZING,
    "freezing.thaw": {**FREEZING, "stream.groups": [[0, 1], [2, 3], [4, 5]]},
    "training.warmup": {**PLAIN, "training.epochs": 2},
    "training.warmup_start": {**PLAIN, "training.epochs": 2, "training.warmup": 1},
    "evaluation.gallery": SAVING,
    "log": SAVING,
    "evaluation.reference_test": {**PLAIN, "evaluation.reference": "images/one/pets"},
    "checkpoint.": SAVING,
    "probes.": {
        **PLAIN, "stream.per_class": 20, "probes.knn_task.k": 15, "probes.knn_class.k": 20, "probes.linear.epochs": 10,
        "probes.linear.lr": 1.0,
    },
}  # fmt: skip
# What a key of one member of a family needs besides.
SMALL: Settings = {"hidden": 16, "projection": 16, "queue": 32}  # where a member has such keys
NEEDS: dict[str, Settings] = {
    "pnn": {"encoder": "conftest:tiny_resnet"},
    "vit-small": {"encoder.width": 32, "encoder.depth": 1},
}
# Where half, double, the opposite or the next choice shows nothing or cannot be.
VALUES: Settings = {
    "log": ["tensorboard"], "stream.name": "split-cifar10", "stream.pack": "plants", "stream.tasks": 1,
    "stream.classes": 6, "stream.per_class": 8, "stream.class_order": "seeded", "stream.groups": [[0, 2], [1, 3]],
    "stream.labelled": "plants", "data_root": "other", "views.name": "lump", "views.memory": "lump", "views.size": 12,
    "encoder.name": "conftest:dropping_encoder", "encoder.weights": "weights.pt", "objective.name": "supervised",
    "resnet18-mini encoder.width": 4, "vit-small encoder.patch": 8, "vit-small encoder.heads": 2,
    "si method.clip": 0.001, "memory.images": "images/one/pets", "evaluation.reference": "images/one/pets",
    "freezing.policy.name": "ascending", "cost_aware freezing.policy.sharpness": 0.0, "freezing.initial": 0.34,
    "freezing.shape": "constant", "lars training.optimizer.eta": 1e-4, "training.clip": 0.01, "training.head_lr": 0.01,
    "training.keep_views": 2, "encoder.mean": [0.4] * 3, "encoder.std": [0.3] * 3,
    "training.precision": "bf16", "checkpoint.every_minutes": 1e-9, "checkpoint.keep": 1, "checkpoint.keep_tasks": 1,
    "evaluation.tasks": "last:1", "probes.knn_task.temperature": 0.02, "probes.knn_class.temperature": 0.005,
    "probes.linear.batch": 20, "probes.linear.lr": 5.0, "probes.linear.momentum": 0.0,
    "probes.linear.weight_decay": 0.1, "barlow_twins objective.layers": 3, "byol objective.predictor_hidden": 8,
    "training.warmup_start": 0.02,
}  # fmt: skip
WITHOUT_EFFECT = {
    "cost_aware freezing.policy.savings": "has one choice",
    "recipe": "names the origin of the other settings",
    "device": "the same run elsewhere; the machines that test this may have one device",
    "stream.resident": "the same images from another place",
    "vit-small encoder.image_size": "another than the size of the views does not fit",
    "training.engine": "the same step, made faster; compiling takes longer than all of these runs",
    "evaluation.batch": "the same features, in more or fewer forwards",
    "checkpoint.keep_images": "deletes what `ptlf learn` packed",
    "distributed.sync_batch_norm": "one process has nobody to share statistics with",
}


@dataclasses.dataclass
class Case:
    key: str
    settings: Settings  # that it is tried with
    field: dataclasses.Field[Any]
    hint: Any
    family: Registry[Any] | None = None  # whose members it names

    def config(self, **changed: Any) -> Config:
        return tiny_config("digits/simsiam/finetune", **{**QUICK, **self.settings, **changed})


def cases(kind: type, path: str = "", member: Settings | None = None) -> Iterator[tuple[str, Case]]:
    """Every key below the dataclass. The name of a key that only one member of a family has begins with that."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        where, hint = f"{path}.{field.name}" if path else field.name, hints[field.name]
        if "section" not in field.metadata:
            usual = BASES[max((begin for begin in BASES if where.startswith(begin)), key=len)]
            yield where, Case(where, {**usual, **member} if member else usual, field, hint)
            continue
        family, members = field.metadata["family"], field.metadata["section"]
        if isinstance(members, Registry):
            enabled = {f"{where}.{name}.enabled": True for name in members}
            for name, found in members.items():
                yield from cases(found.Config, f"{where}.{name}", enabled)
            continue
        for name, case in cases(hint, where, member):
            yield name, dataclasses.replace(case, family=family) if name == f"{where}.name" else case
        shared = {f"{where}.{field.name}" for field in dataclasses.fields(hint)}
        by_config = {found.Config: name for name, found in (family or {}).items()}  # of those that share one, the last
        for config, name in by_config.items():
            for key, case in cases(config, where, member_settings(where, name, config)):
                if key not in shared:
                    yield f"{name} {key}", case


def member_settings(where: str, name: str, config: type) -> Settings:
    """Choose the member, small, in a run that uses all of it."""
    settings = {where: name, **{f"{where}.{key}": value for key, value in SMALL.items() if hasattr(config, key)}}
    if where == "stream":
        settings["stream.groups"] = None
    if where == "objective" and OBJECTIVES[name].can_distill():
        settings |= {"method": "cassle", "method.hidden": 16}
    return {**settings, **NEEDS.get(name, {})}


CASES = dict(cases(Config))


def another(case: Case) -> Any:
    """Half of a number, or double or one where it has no half; the other bool; the next choice or member."""
    value, bounds = value_at(case.config(), case.key), case.field.metadata
    if options := list(case.family or bounds.get("choices") or ()):
        return options[(options.index(value) + 1) % len(options)]
    kinds = typing.get_args(case.hint) or (case.hint,)
    if bool in kinds:
        return not value
    ge, gt, le = (bounds.get(name) for name in ("ge", "gt", "le"))
    assert value is not None and not {int, float}.isdisjoint(kinds), f"name another value of {case.key} in VALUES"
    for other in [value // 2, 2 * value, 1] if int in kinds else [value / 2, 2 * value, 0.5]:
        low = (gt is not None and other <= gt) or (ge is not None and other < ge)
        if other != value and not low and not (le is not None and other > le):
            return other
    raise AssertionError(f"no other value follows from {value!r} for {case.key}; name one in VALUES")


def value_at(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = config[name] if isinstance(config, Mapping) else getattr(config, name)
    return config


def test_the_tables_name_keys_that_exist_and_the_help_names_the_same() -> None:
    assert {*VALUES, *WITHOUT_EFFECT} <= set(CASES)
    assert not VALUES.keys() & WITHOUT_EFFECT.keys()
    of_prefixes = {"encoder.pretrained", "encoder.channels"}  # of timm:, torchvision: and onnx:; tested with them
    assert {key for key, _, _ in describe(Config)} == {case.key for case in CASES.values()} | of_prefixes


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of packed sets, `one` and `other`, that hold sets of the same names."""
    root = tmp_path_factory.mktemp("packs")
    random = np.random.default_rng(0)
    torch.save(tiny_encoder().state_dict(), root / "weights.pt")
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


def outcome(case: Case, out: Path, **changed: Any) -> dict[str, Any]:
    """The results of a run, without what only repeats the configuration."""
    run = Run(case.config(**changed), out if case.settings is SAVING else None)
    if not run.freezing.policy.freezes:  # then nothing is saved, and measuring takes longer than training
        run.trainer.cost_of_step = lambda indices: MeasuredStep(0, 0.0, None)
    results = run.train()
    parts = ("class_order", "tasks", "eval_splits", "units", "probes", "reference", "freezing", "cost")
    encoder = run.model.encoder.state_dict()
    costs = {name: saving.weight_cost for name, saving in (run.freezing.context.savings or {}).items()}
    return {
        **without_seconds({part: results[part] for part in parts}),
        "savings": {name: cost / sum(costs.values()) for name, cost in costs.items()},
        "encoder": {name: (x.stride(), x.contiguous().numpy().tobytes()) for name, x in encoder.items()},
        "files": {str(path.relative_to(out)) for path in out.rglob("*")},
    }


SECTIONS = sorted({case.key.partition(".")[0] for name, case in CASES.items() if name not in WITHOUT_EFFECT})


# The keys of a section are tried together, so that they share the outcomes of their bases.
@pytest.mark.parametrize("section", SECTIONS)
def test_a_changed_key_changes_the_outcome(section: str, tmp_path: Path) -> None:
    known: dict[str, dict[str, Any]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if case.key.partition(".")[0] != section or name in WITHOUT_EFFECT:
            continue
        base = json.dumps(as_dict(case.config()))
        if not known:
            known[base] = outcome(case, tmp_path / "again")
            assert known[base] == outcome(case, tmp_path / "base"), f"{name}: without a change it differs too"
        if base not in known:
            known[base] = outcome(case, tmp_path / f"{number}-base")
        changed = {case.key: VALUES[name] if name in VALUES else another(case)}
        assert known[base] != outcome(case, tmp_path / str(number), **changed), f"{changed} has no effect"
