"""What a recipe's name stands for, which recipes there are, and what a run is called."""

from pathlib import Path
from typing import Any

import pytest

from ptlf.core.errors import UserError
from ptlf.core.settings import as_dict
from ptlf.methods import METHODS
from ptlf.objectives import OBJECTIVES, Objective
from ptlf.run import compat
from ptlf.run.build import contradictions
from ptlf.run.config import from_dict
from ptlf.run.recipes import VARIANTS, conflict, name_of, recipe, recipe_names, resolve_config
from ptlf.run.results import read_results
from ptlf.stream import STREAMS
from ptlf.views import named_views
from reproduction.runs import kept_runs

RESULTS = Path(__file__).parents[2] / "results"


def settings_of(name: str) -> dict[str, Any]:
    return as_dict(from_dict(recipe(name)))


SGD = {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
LARS = {"name": "lars", "momentum": 0.9, "weight_decay": 1e-4, "eta": 0.02}
# The public code of LUMP (Madaan et al. 2022), but for what docs/paper-notes.md says.
LUMP = {
    "encoder": {"name": "resnet18", "width": None},
    "training": {"lr": 0.03, "schedule": "constant", "warmup": 0, "batch": 256, "optimizer": SGD, "epochs": 200},
    "memory": {"size": 256},
    "method": {"name": "lump", "alpha": 0.4, "mix_first_task": True},
    "probes": {"knn_task": {"enabled": True, "k": None, "temperature": 0.1}, "linear": {"enabled": False}},
}
# The public scripts of CaSSLe (Fini et al. 2022) for Barlow Twins on ImageNet-100.
CASSLE = {
    "stream": {"name": "imagenet100", "class_order": "seeded"},
    "views": {"name": "cassle-barlow", "memory": "cassle-moco", "size": 224},
    "encoder": {"name": "resnet18-imagenet", "width": None},
    "training": {"lr": 0.4, "schedule": "cosine", "warmup": 10, "batch": 256, "optimizer": LARS, "epochs": 400},
    "objective": {"name": "barlow_twins", "projection": 2048, "scale": 0.1},
    "probes": {"linear": {"enabled": True, "epochs": 100, "lr": 0.1, "standardise": False}},
}


def contains(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return all(contains(found[name], value) for name, value in wanted.items())
    return found == wanted


def test_the_protocols_of_lump_and_cassle_and_rows_of_the_paper() -> None:
    for stream in ("split-cifar10", "split-cifar100", "split-tinyimagenet"):
        settings = settings_of(f"{stream}/simsiam/lump")
        assert contains(settings, LUMP), stream
        fresh = "memory-tinyimagenet" if stream == "split-tinyimagenet" else "memory"
        assert settings["views"] == {"name": "lump", "memory": fresh, "size": None}
    for view in named_views("lump", 32):
        assert (view.brightness, view.contrast, view.saturation, view.hue) == (0.4, 0.4, 0.4, 0.1)
        assert (view.jitter, view.crop_scale, view.grey, view.flip) == (0.8, (0.2, 1.0), 0.2, 0.5)
    assert contains(settings_of("imagenet100/barlow_twins/cassle"), CASSLE)
    byol = settings_of("imagenet100/byol/cassle")["training"]
    assert (byol["lr"], byol["optimizer"]["name"], byol["optimizer"]["weight_decay"]) == (0.6, "lars", 1e-5)
    for objective, rate in {"simsiam": 0.05, "mocov2plus": 0.4, "supervised": 0.1}.items():
        training = settings_of(f"imagenet100/{objective}/finetune")["training"]
        assert (training["lr"], training["warmup"], training["schedule"]) == (rate, 0, "cosine")
        assert training["optimizer"] == {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
    barlow, moco = (from_dict(recipe(f"imagenet100/{o}/cassle-ptlf")) for o in ("barlow_twins", "mocov2plus"))
    assert (barlow.training.optimizer.name, barlow.training.warmup, barlow.views.name) == ("lars", 10, "cassle-barlow")
    assert (moco.training.optimizer.name, moco.training.warmup, moco.views.name) == ("sgd", 0, "cassle-moco")
    assert barlow.views.size == moco.views.size == 224 and not barlow.probes["linear"].standardise
    assert (moco.method.name, moco.freezing.policy.name) == ("cassle", "correlation") and moco.probes["linear"].enabled
    assert from_dict(recipe("split-cifar10/supervised/layerwise")).freezing.policy.name == "correlation"
    assert from_dict(recipe("split-cifar100/simsiam/pnn")).method.width == 12 / 64


def test_kept_runs_are_of_todays_recipes_and_settings() -> None:
    """All that `python -m reproduction` looks for among the records."""
    records = [read_results(path.parent) for path in RESULTS.glob("split-*-seed?/results.json")]
    kept = kept_runs([RESULTS])
    for record in records:
        config = resolve_config(record["config"]["recipe"], None, [])
        assert record["seed"] in kept[compat.identity_key(as_dict(config))], record["name"]
    paths = list(RESULTS.rglob("results.json"))
    assert len(paths) > 40
    for path in paths:
        config = read_results(path.parent)["config"]
        assert compat.identity_key(config) == compat.identity_key(as_dict(from_dict(config))), path
    lump = [read_results(RESULTS / f"split-cifar10-barlow_twins-lump-seed{seed}")["config"] for seed in (0, 1)]
    assert "clip" not in lump[0]["training"] and "clip" in lump[1]["training"]
    assert compat.identity_key(lump[0]) == compat.identity_key(lump[1])


def test_heads_and_rates_of_the_small_network_and_how_deep_variants_freeze() -> None:
    mini = {"encoder": {"name": "resnet18-mini"}, "probes": {"knn_class": {"k": 20}}}
    deep = {"freezing": {"policy": {"name": "cost_aware"}, "initial": 0.2, "final": 0.6}, "method": {"name": "lump"}}
    for name, expected in {
        "digits/simsiam/finetune": mini | {"objective": {"projection": 256, "bottleneck": 64}, "training": {"lr": 0.3}},
        "digits/barlow_twins/finetune": mini | {"objective": {"projection": 256}, "training": {"lr": 0.06}},
        "digits/mocov2plus/finetune": mini | {"objective": {"hidden": 256, "projection": 64, "queue": 512}},
        "digits/byol/finetune": mini | {"objective": {"hidden": 256, "projection": 64, "momentum_start": 0.9}},
        "digits/vicreg/finetune": mini | {"objective": {"projection": 256}, "training": {"lr": 0.06}},
        "digits/supervised/finetune": mini | {"training": {"lr": 0.06}},
        "split-cifar10/simsiam/ptlf-deep": deep,
        "split-cifar10/simsiam/ptlf-cost": {"freezing": {"initial": 0.0, "final": 0.4}},
    }.items():
        assert contains(settings_of(name), expected), name


def test_which_recipes_there_are() -> None:
    """Every stream, objective, method and variant, but labels with mixed images, and, where tasks arrive one by one,
    what needs them all at once. Each is a complete configuration."""
    wanted = {
        f"{stream}/{objective}/{method}"
        for stream in STREAMS
        for objective in OBJECTIVES
        for method in (*METHODS, *VARIANTS)
        if objective != "supervised" or method not in ("lump", "ptlf", "ptlf-cost", "ptlf-deep")
        if stream != "arriving" or (objective != "supervised" and method != "multitask")
    }
    assert set(recipe_names()) == wanted
    assert len(recipe_names()) == len(wanted)
    for name in wanted:
        config = from_dict(recipe(name))
        assert (config.recipe, config.stream.name, config.objective.name) == (name, *name.split("/")[:2])


class LossOnly(Objective):
    def loss(self, features, batch):
        return features[0].mean()


class ComparesOnly(Objective):
    def compare(self, projected, batch):
        return projected[0].mean()


def test_an_objective_that_cannot_distill_goes_with_methods_that_do_not(monkeypatch) -> None:
    for objective in (LossOnly, ComparesOnly):
        monkeypatch.setitem(OBJECTIVES, "mine", objective)
        assert {method for method in METHODS if conflict(objective, METHODS[method])} == {"cassle"}, objective
        methods = {name.split("/")[2] for name in recipe_names() if "/mine/" in name}
        assert methods == {*METHODS, *VARIANTS} - {"cassle", "cassle-ptlf"}, objective
        (why,) = contradictions(from_dict({"objective": "mine", "method": "cassle"}), None)
        assert why.startswith("objective 'mine' cannot be trained with method 'cassle'") and "`compare` and" in why


def test_a_run_is_called_what_it_is() -> None:
    def name(recipe: str, policy: str = "correlation", **sections: str) -> str:
        chosen = {"stream": "digits", "objective": "simsiam", "method": "lump", **sections}
        settings = {section: {"name": value} for section, value in chosen.items()}
        return name_of({"recipe": recipe, **settings, "freezing": {"policy": {"name": policy}}})

    assert name("digits/simsiam/ptlf") == "digits/simsiam/ptlf"
    assert name("digits/simsiam/ptlf", "none") == "digits/simsiam/ptlf, no freezing"
    assert name("digits/simsiam/ptlf", "random") == "digits/simsiam/ptlf + random freezing"
    assert name("digits/simsiam/ptlf", "none", objective="byol", method="der") == "digits/byol/der"
    assert name("digits/simsiam/ptlf", stream="folder") == "folder/simsiam/ptlf"
    assert name("", "none") == "digits/simsiam/lump"
    assert name("") == "digits/simsiam/lump + correlation freezing"


def test_presets_hold_however_a_member_is_chosen() -> None:
    """SimSiam's rate of 0.3 makes VICReg diverge."""
    for words, same in (
        (["--objective", "vicreg"], "digits/vicreg/lump"),
        (["--objective.name", "vicreg", "--method", "der"], "digits/vicreg/der"),
        (["--method", "cassle", "--freezing.policy", "correlation"], "digits/simsiam/cassle-ptlf"),
    ):
        chosen, wanted = resolve_config("digits/simsiam/lump", None, words), from_dict(recipe(same))
        assert {**as_dict(chosen), "recipe": ""} == {**as_dict(wanted), "recipe": ""}, words
    for words, rate in ((["adamw"], 1e-3), (["adamw", "--training.lr", "0.01"], 0.01), (["sgd"], 0.3)):
        config = resolve_config("digits/simsiam/lump", None, ["--training.optimizer", *words])
        assert config.training.lr == rate, "another optimizer has its own rate"


def test_a_recipe_may_name_anybodys_members() -> None:
    config = from_dict(recipe("digits/plugin_members:Align/lump"))
    assert (config.objective.name, config.method.name) == ("plugin_members:Align", "lump")
    with pytest.raises(UserError, match="unknown recipe 'digits/simsiam'"):
        recipe("digits/simsiam")
