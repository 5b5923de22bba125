"""Recipes STREAM/OBJECTIVE/METHOD: a complete configuration from the stream's protocol and from what the members need
there (`presets`). METHOD is a method or one of `VARIANTS`. Scores are in docs/reproduction.md."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from ptlf.core.errors import UserError, short_repr, unknown
from ptlf.core.registry import settings_from
from ptlf.core.settings import as_dict, merge, parse_overrides
from ptlf.encoders import ENCODERS, stored_encoder
from ptlf.freezing import PolicyConfig
from ptlf.methods import METHODS, Method
from ptlf.objectives import OBJECTIVES, Objective
from ptlf.run.config import POLICIES, Config, from_dict, read_yaml
from ptlf.run.fitting import fit_pack, free_settings
from ptlf.stream import STREAMS
from ptlf.training.optimizers import OPTIMIZERS

Settings = Mapping[str, Any]

# A checkpoint of ResNet-18 with its heads is 150 MB; writing one takes longer than an epoch of Split CIFAR-10 on a GPU.
RARELY: Settings = {"every_epochs": 0, "every_minutes": 2}
SGD: Settings = {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4}
LARS: Settings = {"name": "lars", "momentum": 0.9, "weight_decay": 1e-4}
WARMUP: Settings = {"warmup": 10, "warmup_start": 0.003}  # CaSSLe's
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
        "training": {"epochs": 400, "batch": 256, "optimizer": LARS, "lr": 0.4, "schedule": "cosine", **WARMUP},
        "memory": {"size": 256},
        "probes": {"linear": {"enabled": True, "standardise": False, "augment": True}},
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
    "continue": {"method": "anchor", "policy": "ascending", "initial": 0.5, "final": 0.5, "shape": "constant"},
}
DEFAULT = "digits/simsiam/ptlf"
FROM_NOTHING, FROM_GIVEN = "vicreg/ptlf", "vicreg/continue"  # what the user's own images are learnt with by default


def default_recipe(stream: str, explicit: Settings) -> str:
    """For this stream: one for encoders that have learnt something, where the settings give one."""
    name, encoder = name_in(explicit, "encoder") or "", explicit.get("encoder")
    told = encoder if isinstance(encoder, Mapping) else {}
    given = name == "given" or name.startswith(("hf:", "onnx:")) or told.get("weights") or told.get("pretrained")
    if not given and not STREAMS.find(stream).own:
        return f"{stream}/{DEFAULT.partition('/')[2]}"
    return f"{stream}/{FROM_GIVEN if given else FROM_NOTHING}"


def recipe_names() -> list[str]:
    """Every stream with every objective and method or variant that goes with it, and with tasks that arrive."""
    methods = {**{name: name for name in METHODS}, **{name: variant["method"] for name, variant in VARIANTS.items()}}
    return [
        f"{stream}/{objective}/{name}"
        for stream, entry in STREAMS.items()
        for objective, kind in OBJECTIVES.items()
        for name, method in methods.items()
        if conflict(kind, METHODS[method]) is None
        if not (entry.arriving and (kind.needs_labels or METHODS[method].joint))
    ]


def conflict(objective: type[Objective], method: type[Method]) -> str | None:
    """Why the objective cannot be trained with the method, and what to do, if it cannot."""
    if objective.needs_labels and method.mixes_images:
        return "the method mixes images, and their labels are not mixed; use --method finetune"
    if method.distills and not objective.can_distill():
        lacking = "the method compares projections with an earlier model's, which the objective does not say how to do"
        return f"{lacking}; give it `compare` and `distill`, or use another method"
    return None


def recipe(name: str) -> Settings:
    """The recipe's settings as a nested dict, with `recipe` naming it. Members may be given as package.module:name."""
    if name.count("/") != 2:
        raise unknown("recipe", name, recipe_names())
    stream, objective, word = name.split("/")
    variant = VARIANTS.get(word, {"method": word})
    method = variant["method"]
    if ":" not in name and name not in recipe_names():
        if objective in OBJECTIVES and method in METHODS and (why := conflict(OBJECTIVES[objective], METHODS[method])):
            both = f"objective {objective!r} cannot be trained with method {method!r}"
            raise UserError(f"there is no recipe {short_repr(name)}: {both}: {why}")
        raise unknown("recipe", name, recipe_names())
    entry = STREAMS.find(stream)
    if entry.protocol not in PROTOCOLS:
        raise unknown("protocol", entry.protocol, PROTOCOLS)
    chosen = {"recipe": name, "stream": {"name": stream}, "objective": {"name": objective}, "method": {"name": method}}
    members = (OBJECTIVES.find(objective), METHODS.find(method))
    presets = [dict(settings) for member in members for settings in presets_on(stream, member.presets)]
    freezing = {"freezing": {key: value for key, value in variant.items() if key != "method"}}
    known = {field.name for field in fields(members[0].Config)}
    for settings in presets:  # a method's may name keys that not every objective has
        settings["objective"] = {key: v for key, v in settings.get("objective", {}).items() if key in known}
    return merge(Config, PROTOCOLS[entry.protocol], entry.presets, chosen, *presets, freezing)


def presets_on(stream: str, presets: Mapping[str, Settings]) -> list[Settings]:
    """Those for the stream's protocol, and those for the stream itself."""
    return [presets.get(place, {}) for place in dict.fromkeys((STREAMS.find(stream).protocol, stream))]


def name_of(config: Settings) -> str:
    """STREAM/OBJECTIVE/METHOD, or the recipe's variant of it, and how it freezes where that word does not say so."""
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
    """Command line over file over recipe: the one named, or the file's, or the default. A recipe for the user's own
    images chooses what fits them.

    trust_code: follow names of code that only the file holds. tell: gets a line on what was chosen.
    """
    values = read_yaml(file) if file else {}
    untrusted = settings_from(file, [recipe_name or "", *overrides]) if file and not trust_code else nullcontext()
    with untrusted:
        if not isinstance(values.get("recipe"), str | None):
            raise UserError(f"recipe in {file} must be text, not {short_repr(values['recipe'])}")
        if recipe_name and values.get("recipe") not in (None, recipe_name):
            named = f"{file} is of recipe {short_repr(values['recipe'])}"
            raise UserError(f"{named}, and --recipe says {recipe_name}; leave one of them out")
        explicit = with_stored_encoder(merge(Config, values, parse_overrides(Config, overrides)))
        name = recipe_name or values.get("recipe") or default_recipe(DEFAULT.partition("/")[0], explicit)
        settings: Settings = merge(Config, base_settings(name, explicit), explicit)
        free, stream = free_settings(explicit), settings["recipe"].partition("/")[0]
        if free and STREAMS.find(stream).own and name_in(settings, "stream") == stream:
            settings, chosen = fit_pack(as_dict(from_dict(settings)), free)
            if chosen:
                tell(chosen)
        return from_dict(settings)


def base_settings(name: str, explicit: Settings) -> Settings:
    """Of the recipe, with presets of the members chosen in place of its own. The settings' own checks come later."""
    stream = name.partition("/")[0]
    if name.count("/") == 2:
        _, objective, word = name.split("/")
        method = name_in(explicit, "method")
        if method and method != VARIANTS.get(word, {"method": word})["method"]:
            word = method
        changed = f"{stream}/{name_in(explicit, 'objective') or objective}/{word}"
        name = changed if ":" in changed or changed in recipe_names() else name
    base = recipe(name)
    if encoder := name_in(explicit, "encoder"):
        for presets in presets_on(stream, ENCODERS.find(encoder).presets):
            base = merge(Config, base, {"encoder": {"name": encoder}}, presets)
    rule = name_in(explicit.get("training"), "optimizer")
    if rule and rule != base["training"]["optimizer"]["name"]:  # the recipe's rate is for another optimizer
        base = merge(Config, base, {"training": {"lr": OPTIMIZERS.find(rule).lr}})
    return base


def with_stored_encoder(explicit: Settings) -> Settings:
    """The settings, with the encoder and normalisation that their weights' file names. Code in it is not followed."""
    encoder = explicit.get("encoder")
    if not isinstance(encoder, Mapping) or not isinstance(weights := encoder.get("weights"), str):
        return explicit
    if (stored := stored_encoder(Path(weights).expanduser())) is None:
        return explicit
    if "name" in encoder:
        return merge(Config, explicit, {"encoder": {"mean": stored["mean"], "std": stored["std"], **encoder}})
    if ENCODERS.names_code(stored["name"]):
        return explicit
    return merge(Config, explicit, {"encoder": {"name": stored["name"]}}, {"encoder": stored}, {"encoder": encoder})


def name_in(settings: Any, section: str) -> str | None:
    """The name that a section chooses, as {"name": ...} or as plain text."""
    chosen = settings.get(section) if isinstance(settings, Mapping) else None
    chosen = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    return chosen if isinstance(chosen, str) else None
