"""Recipes STREAM/OBJECTIVE/METHOD: a complete configuration from the stream's protocol and from what the objective and
the method need there (`presets`). METHOD is a method or one of `VARIANTS`. An encoder other than the protocol's may
bring presets too.

`EXPECTED` says what a recipe takes and gives, for those that were run; the runs are kept in `results/`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError, unknown
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict, merge, parse_overrides
from ptlf.core.words import short_repr
from ptlf.encoders import ENCODERS, stored_encoder
from ptlf.freezing.policy import PolicyConfig
from ptlf.methods import METHODS, Method
from ptlf.objectives import OBJECTIVES, Objective
from ptlf.run.config import Config, from_dict, read_yaml
from ptlf.run.fitting import fit_pack, free_settings
from ptlf.run.freezing import POLICIES
from ptlf.stream import STREAMS
from ptlf.training.optimizers import OPTIMIZERS

Settings = Mapping[str, Any]

# A checkpoint of ResNet-18 with its heads is 150 MB; writing one takes longer than an epoch of Split CIFAR-10 on a GPU.
RARELY: Settings = {"every_epochs": 0, "every_minutes": 2}
SGD: Settings = {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
LARS: Settings = {"name": "lars", "momentum": 0.9, "weight_decay": 1e-4}
PROTOCOLS: Mapping[str, Settings] = {
    "lump": {
        "views": {"name": "lump", "memory": "memory"},
        "encoder": {"name": "resnet18"},
        "training": {"epochs": 200, "batch": 256, "optimizer": SGD, "lr": 0.03},
        "memory": {"size": 256},
        "checkpoint": RARELY,
    },
    "cassle": {
        "stream": {"class_order": "seeded"},
        "views": {"name": "cassle-barlow", "memory": "cassle-moco", "size": 224},
        "encoder": {"name": "resnet18-imagenet"},
        "training": {"epochs": 400, "batch": 256, "optimizer": LARS, "lr": 0.4, "schedule": "cosine", "warmup": 10},
        "memory": {"size": 256},
        "probes": {"linear": {"enabled": True, "standardise": False}},
        "checkpoint": RARELY,
    },
    "digits": {
        "views": {"name": "digits", "memory": "digits"},
        "encoder": {"name": "resnet18-mini"},
        "training": {"epochs": 30, "batch": 64, "optimizer": SGD, "lr": 0.3},
        "memory": {"size": 64},
        "probes": {"knn_class": {"k": 20}},
    },
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {  # methods with freezing; other keys are settings of `freezing`
    "ptlf": {"method": "lump", "policy": "correlation"},
    "ptlf-cost": {"method": "lump", "policy": "cost_aware"},
    "ptlf-deep": {"method": "lump", "policy": "cost_aware", "initial": 0.2, "final": 0.6},
    "cassle-ptlf": {"method": "cassle", "policy": "correlation"},
    "layerwise": {"method": "finetune", "policy": "correlation"},
}

DEFAULT = "digits/simsiam/ptlf"


def on_h200(seconds: int, seeds: int, knn_task: float, forgetting: float | None, knn_class: float) -> str:
    """Means over the seeds; a joint method forgets nothing."""
    forgets = "" if forgetting is None else f"forgetting {forgetting:.2f}, "
    count = "1 seed" if seeds == 1 else f"{seeds} seeds"
    return f"{seconds} s on an H200, {count}: knn_task {knn_task:.2f}, {forgets}knn_class {knn_class:.2f}"


EXPECTED: dict[str, str] = {
    "digits/simsiam/lump": "30 s on two cores: knn_class 92.9, random encoder 83.2",
    "digits/simsiam/ptlf": "30 s on two cores: knn_class 93.5, random encoder 83.2",
    "split-cifar10/simsiam/lump": on_h200(251, 3, 91.20, 1.69, 64.60),
    "split-cifar10/simsiam/ptlf": on_h200(235, 3, 91.26, 1.50, 65.00),
    "split-cifar10/simsiam/ptlf-cost": on_h200(217, 3, 90.88, 1.56, 64.59),
    "split-cifar10/simsiam/ptlf-deep": on_h200(205, 3, 90.81, 1.39, 64.41),
    "split-cifar10/simsiam/finetune": on_h200(263, 1, 91.10, 5.42, 66.65),
    "split-cifar10/simsiam/si": on_h200(279, 1, 92.64, 1.96, 69.00),
    "split-cifar10/simsiam/der": on_h200(333, 1, 89.87, 6.26, 58.98),
    "split-cifar10/simsiam/pnn": on_h200(429, 1, 93.96, -0.14, 70.56),
    "split-cifar10/simsiam/cassle": on_h200(344, 1, 93.95, -0.31, 71.94),
    "split-cifar10/simsiam/pfr": on_h200(321, 1, 94.28, 0.82, 73.32),
    "split-cifar10/simsiam/multitask": on_h200(228, 1, 96.65, None, 83.91),
    "split-cifar10/barlow_twins/lump": on_h200(264, 3, 90.30, 0.84, 63.17),
    "split-cifar10/barlow_twins/ptlf": on_h200(234, 3, 89.99, 0.76, 61.80),
    "split-cifar10/barlow_twins/ptlf-deep": on_h200(175, 3, 89.98, 1.12, 62.20),
    "split-cifar100/simsiam/lump": on_h200(260, 2, 82.42, 3.56, 36.21),
    "split-cifar100/simsiam/ptlf": on_h200(255, 2, 81.56, 3.27, 36.04),
    "split-cifar100/simsiam/ptlf-cost": on_h200(224, 2, 81.46, 4.16, 35.74),
    "split-cifar100/simsiam/ptlf-deep": on_h200(189, 2, 80.74, 2.92, 34.59),
    "split-cifar100/simsiam/finetune": on_h200(251, 1, 76.99, 10.01, 30.36),
    "split-cifar100/simsiam/si": on_h200(260, 1, 81.11, 4.52, 38.03),
    "split-cifar100/simsiam/cassle": on_h200(313, 1, 83.78, 1.45, 39.80),
}


def names() -> list[str]:
    """Every stream with every objective and every method or variant that goes with it. Those that need the whole stream
    do not go with tasks that arrive one by one."""
    methods = {**{name: name for name in METHODS}, **{name: variant["method"] for name, variant in VARIANTS.items()}}
    pairs = [
        (f"{objective}/{name}", not OBJECTIVES[objective].needs_labels and not METHODS[method].joint)
        for objective in OBJECTIVES
        for name, method in methods.items()
        if conflict(OBJECTIVES[objective], METHODS[method]) is None
    ]
    return [f"{name}/{pair}" for name, entry in STREAMS.items() for pair, grows in pairs if grows or not entry.arriving]


def conflict(objective: type[Objective], method: type[Method]) -> str | None:
    """Why the objective cannot be trained with the method, and what to do, if it cannot."""
    if objective.needs_labels and method.mixes_images:
        return "the method mixes images, and their labels are not mixed; use --method finetune"
    if method.distills and not objective.can_distill():
        return (
            "the method compares projections with an earlier model's, which the objective does not say how to do; "
            "give it `compare` and `distill`, or use another method"
        )
    return None


def recipe(name: str) -> Settings:
    """The recipe's settings as a nested dict, with `recipe` naming it. Members may be given as package.module:name."""
    if name.count("/") != 2 or (":" not in name and name not in names()):
        raise no_recipe(name)
    stream, objective, word = name.split("/")
    variant = VARIANTS.get(word, {"method": word})
    method, entry = variant["method"], STREAMS.find(stream)
    protocol = entry.protocol
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    chosen = {"stream": {"name": stream}, "objective": {"name": objective}, "method": {"name": method}}
    presets = [
        member.presets.get(place, {})
        for member in (OBJECTIVES.find(objective), METHODS.find(method))
        for place in dict.fromkeys((protocol, stream))
    ]
    freezing = {"freezing": {key: value for key, value in variant.items() if key != "method"}}
    return merge(Config, PROTOCOLS[protocol], entry.presets, {"recipe": name, **chosen}, *presets, freezing)


def no_recipe(name: str) -> UserError:
    """Why objective and method, which are known, make no recipe; or which recipes there are."""
    _, objective, word = name.split("/") if name.count("/") == 2 else ("", "", "")
    method = VARIANTS.get(word, {"method": word})["method"]
    if objective in OBJECTIVES and method in METHODS and (why := conflict(OBJECTIVES[objective], METHODS[method])):
        both = f"objective {objective!r} cannot be trained with method {method!r}"
        return UserError(f"there is no recipe {short_repr(name)}: {both}: {why}")
    return unknown("recipe", name, names())


def name_of(config: Settings) -> str:
    """STREAM/OBJECTIVE/METHOD of these settings: the recipe's variant where its method still holds, and how it freezes
    where that word does not say so."""
    stream, objective, method = (config[section]["name"] for section in ("stream", "objective", "method"))
    word = (config.get("recipe") or "").rpartition("/")[2]
    if VARIANTS.get(word, {}).get("method") != method:
        word = method
    name, policy = f"{stream}/{objective}/{word}", config["freezing"]["policy"]["name"]
    if policy == VARIANTS.get(word, {}).get("policy", PolicyConfig().name):
        return name
    return f"{name} + {policy} freezing" if POLICIES.find(policy).freezes else f"{name}, no freezing"


def resolve_config(
    recipe_name: str | None,
    file: Path | None,
    overrides: Sequence[str],
    *,
    trust_code: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Config:
    """The configuration: command line over file over recipe (the one named, or the file's, or the default). A recipe
    for the user's own images chooses what fits them.

    trust_code: follow names of code, "package.module:attribute", that only the file holds.
    tell: gets a line on what was chosen.
    """
    values = read_yaml(file) if file is not None else {}
    if file is not None and not trust_code:
        with settings_from(file, [recipe_name or "", *overrides]):
            return configured(recipe_name, file, values, overrides, tell)
    return configured(recipe_name, file, values, overrides, tell)


def configured(
    recipe_name: str | None, file: Path | None, values: Settings, overrides: Sequence[str], tell: Callable[[str], None]
) -> Config:
    if not isinstance(values.get("recipe"), str | None):
        raise UserError(f"recipe in {file} must be text, not {short_repr(values['recipe'])}")
    if recipe_name and values.get("recipe") not in (None, recipe_name):
        named = f"{file} is of recipe {short_repr(values['recipe'])}"
        raise UserError(f"{named}, and --recipe says {recipe_name}; leave one of them out")
    given = with_stored_encoder(merge(Config, values, parse_overrides(Config, overrides)))
    free = free_settings(given)
    base = recipe(adapted(recipe_name or values.get("recipe") or DEFAULT, given))
    if encoder := name_in(given, "encoder"):
        presets, (stream, *_) = ENCODERS.find(encoder).presets, base["recipe"].split("/")
        for place in dict.fromkeys((STREAMS.find(stream).protocol, stream)):
            base = merge(Config, base, {"encoder": {"name": encoder}}, presets.get(place, {}))
    rule = name_in(given.get("training"), "optimizer")
    if rule and rule != base["training"]["optimizer"]["name"]:  # the recipe's rate is for another optimizer
        base = merge(Config, base, {"training": {"lr": OPTIMIZERS.find(rule).lr}})
    settings = merge(Config, base, given)
    stream = base["stream"]["name"]
    if free and STREAMS.find(stream).own and name_in(settings, "stream") == stream:
        fitted, told = fit_pack(as_dict(from_dict(settings)), free)
        settings = {**fitted}
        if told:
            tell(told)
    return from_dict(settings)


def with_stored_encoder(given: Settings) -> Settings:
    """The settings, with the encoder whose weights they take where they name none. Code that the weights' file names is
    not followed."""
    encoder = given.get("encoder")
    weights = encoder.get("weights") if isinstance(encoder, Mapping) and "name" not in encoder else None
    stored = stored_encoder(Path(weights).expanduser()) if isinstance(weights, str) else None
    if stored is None or ENCODERS.names_code(stored["name"]):
        return given
    return merge(Config, given, {"encoder": {"name": stored["name"]}}, {"encoder": stored}, {"encoder": encoder})


def adapted(name: str, given: Settings) -> str:
    """The recipe with the objective and the method that the settings choose in place of its own: their presets hold.
    What cannot be trained is left for the settings' own checks."""
    if name.count("/") != 2:
        return name
    stream, objective, word = name.split("/")
    method = name_in(given, "method")
    if method and method != VARIANTS.get(word, {"method": word})["method"]:
        word = method
    changed = f"{stream}/{name_in(given, 'objective') or objective}/{word}"
    return changed if ":" in changed or changed in names() else name


def name_in(settings: Any, section: str) -> str | None:
    """The name that a section chooses, as {"name": ...} or as plain text."""
    chosen = settings.get(section) if isinstance(settings, Mapping) else None
    chosen = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    return chosen if isinstance(chosen, str) else None
