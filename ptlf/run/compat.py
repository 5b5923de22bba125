"""Which settings may differ between two runs: of one run that continues, of one configuration, or to be compared."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ptlf.core.errors import UserError
from ptlf.core.reading import flatten
from ptlf.core.words import short_repr

Json = dict[str, Any]
# Settings that may change when a run continues: its results are the same, but for rounding.
MAY_CHANGE = {"device", "data_root", "log", "stream.resident", "evaluation.batch", "evaluation.tasks", "checkpoint"}
NO_EFFECT = MAY_CHANGE - {"evaluation.tasks"}  # on the figures of a finished run, which is not tested again
# Runs that differ in these alone are of one configuration: they learn the same, and are tested on the same.
NON_IDENTITY = NO_EFFECT | {"seed", "recipe", "evaluation.gallery"}
# Methods that did not read `objective.distill_scale`, which is no more.
WITHOUT_DISTILLING = {"finetune", "lump", "si", "der", "pnn", "pfr", "multitask"}

OLDER_LINEAR = {"enabled", "epochs", "batch", "lr", "momentum", "weight_decay"}  # settings of `probes.linear`
# Settings that are no more, with the values under which they can be left out: nothing else follows from them.
REMOVED: Mapping[str, Sequence[Any]] = {
    "freezing.ratios": ("needed", "all"),  # both gave the same choices
    "freezing.stream_final": (None,),
}


def upgrade_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings as this version says them; what it cannot say is left, for others to refuse.

    `objective.distill_scale` of Barlow Twins is `objective.scale` now: left out where it was that, or had no effect.
    Linear probes with all settings but `standardise` are of a version that did not standardise.
    The ridge probe is no more: its settings are left out where it was off.
    `views.memory` of Split Tiny-ImageNet has a name of its own, since its statistics no longer follow from 64 px.
    """
    if not isinstance(config, Mapping):
        return config
    config = dict(config)

    def section(name: str, within: Mapping[str, Any] = config) -> Mapping[str, Any]:
        value = within.get(name)
        return value if isinstance(value, Mapping) else {"name": value} if isinstance(value, str) else {}

    def leave_out(name: str, key: str) -> None:
        config[name] = {other: value for other, value in section(name).items() if other != key}

    for dotted, harmless in REMOVED.items():
        place, _, name = dotted.partition(".")
        if section(place).get(name, ...) in harmless:
            leave_out(place, name)
    objective, probes, views = section("objective"), section("probes"), section("views")
    if objective.get("name") == "barlow_twins" and "distill_scale" in objective:
        same = objective["distill_scale"] == objective.get("scale", 1.0)
        if same or section("method").get("name") in WITHOUT_DISTILLING:
            leave_out("objective", "distill_scale")
    if "ridge" in probes and not section("ridge", probes).get("enabled"):
        leave_out("probes", "ridge")
    linear = section("linear", probes)
    if linear.get("enabled") is True and linear.keys() == OLDER_LINEAR:
        config["probes"] = {**config["probes"], "linear": {**linear, "standardise": False}}
    tiny = section("stream").get("name") == "split-tinyimagenet" and views.get("size") in (None, 64)
    if tiny and views.get("memory", "memory") == "memory":
        config["views"] = {**views, "memory": "memory-tinyimagenet"}
    return config


# Settings that records of older versions do not have, with the value that does what these versions did.
ADDED: Mapping[str, Any] = {
    "encoder.weights": None,
    "encoder.width": None,
    "evaluation.reference": None,
    "evaluation.reference_test": 0.2,
    "evaluation.tasks": "all",
    "freezing.thaw": "all",
    "memory.images": None,
    "probes.linear.standardise": True,  # of runs without this probe; see `upgrade_settings` for others
    "training.clip": None,
}


def is_identity(name: str) -> bool:
    """Whether the setting with this dotted key changes what a run learns or is tested on."""
    parts = name.split(".")
    return not any(".".join(parts[:count]) in NON_IDENTITY for count in range(1, len(parts) + 1))


def identity_settings(config: Mapping[str, Any]) -> Json:
    """The settings that runs of several seeds, on any machine, have in common, by dotted key. One that a record of an
    older version does not have has the value that does what that version did."""
    return {key: value for key, value in {**ADDED, **flatten(upgrade_settings(config))}.items() if is_identity(key)}


def identity_key(config: Mapping[str, Any]) -> str:
    """`identity_settings` as text."""
    return json.dumps(identity_settings(config), sort_keys=True)


def differing_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], may: Collection[str] = MAY_CHANGE, place: str = ""
) -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) of the settings that differ and are not among those that may."""
    found: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys((*before, *now)):
        where, old, new = f"{place}{name}", before.get(name), now.get(name)
        if where in may or old == new:
            continue
        both = isinstance(old, Mapping) and isinstance(new, Mapping)
        found += differing_settings(old, new, may, f"{where}.") if both else [(where, old, new)]  # type: ignore[arg-type]
    return found


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any], may: Collection[str] = MAY_CHANGE) -> str:
    """The first of `differing_settings` in words; empty if there is none."""
    found = differing_settings(before, now, may)
    words = ", ".join(f"{key} was {short_repr(old)} and is {short_repr(new)}" for key, old, new in found[:3])
    return words + (f", and {len(found) - 3} more" if len(found) > 3 else "")


def stream_settings(config: Json) -> Json:
    """What runs must have in common to be compared."""
    return {key: value for key, value in config.get("stream", {}).items() if key != "resident"}


def check_comparable(configs: Sequence[Json]) -> None:
    """Of runs that are to be compared, before they are made. Their seconds are, so the epochs must be the same."""
    first, *others = configs
    for other in others:
        if found := describe_difference(stream_settings(first), stream_settings(other)):
            raise UserError(f"the runs are of different streams ({found}) and cannot be compared")
        epochs = [config.get("training", {}).get("epochs") for config in (first, other)]
        if epochs[0] != epochs[1]:
            both = f"the runs are of different epochs (training.epochs: {epochs[0]} and {epochs[1]})"
            raise UserError(f"{both} and their seconds cannot be compared; give all the same --training.epochs")


def other_images(mine: Json, theirs: Json) -> str:
    """Of two records: the first task that arrived in both and has other images, in words; empty if there is none."""
    pairs = zip(arrived_tasks(mine), arrived_tasks(theirs), strict=False)
    for number, ((name, checksum), (their_name, their_checksum)) in enumerate(pairs, start=1):
        known = checksum and their_checksum  # not in records of older versions
        if checksum != their_checksum if known else name != their_name:
            same = f"{name} has others in each" if name == their_name else f"{name} and {their_name}"
            return f"number {number} of those that arrived: {same}"
    return ""


def arrived_tasks(results: Json) -> list[tuple[str, str | None]]:
    """Name and checksum of the tasks that `ptlf learn` brought. Streams of a name and settings have the same images."""
    count = results.get("arrived", 0)
    names = [str(name) for name in results["tasks"][-count:]] if count else []
    return list(zip(names, results.get("arrived_sha256") or [None] * count, strict=True))


def describe_difference(mine: Json, theirs: Json) -> str:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    return ", ".join(f"{key}: {mine.get(key)} and {theirs.get(key)}" for key in keys[:3])
