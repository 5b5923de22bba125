"""Which settings may differ between two runs: of one run that continues, of one configuration, or to be compared."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ptlf.core.errors import UserError, short_repr
from ptlf.core.reading import flatten

Json = dict[str, Any]
# Settings that may change when a run continues: its results are the same, but for rounding.
MAY_CHANGE = {"device", "data_root", "log", "stream.resident", "evaluation.batch", "evaluation.tasks", "checkpoint"}
NO_EFFECT = MAY_CHANGE - {"evaluation.tasks"}  # on the figures of a finished run, which is not tested again
# Runs that differ in these alone are of one configuration: they learn the same, and are tested on the same.
NON_IDENTITY = NO_EFFECT | {"seed", "recipe", "evaluation.gallery"}
# Settings that records of older versions do not have, with the value that does what these versions did.
ADDED: Mapping[str, Any] = {
    "encoder.mean": None,
    "encoder.std": None,
    "encoder.weights": None,
    "encoder.width": None,
    "evaluation.reference": None,
    "evaluation.reference_test": 0.2,
    "evaluation.tasks": "all",
    "freezing.reach": True,
    "freezing.thaw": "all",
    "memory.images": None,
    "objective.layers": 2,
    "objective.predictor_hidden": None,
    "probes.linear.augment": False,
    "probes.linear.standardise": True,  # of runs without this probe
    "training.clip": None,
    "training.head_lr": None,
    "training.keep_views": 0,
    "training.warmup_start": None,
}


def is_among(name: str, names: Collection[str]) -> bool:
    """Whether the setting with this dotted key, or a section that it is in, is one of these."""
    return any(f"{name}.".startswith(f"{each}.") for each in names)


def identity_settings(config: Mapping[str, Any]) -> Json:
    """The settings that runs of several seeds, on any machine, have in common, by dotted key. One that a record of an
    older version does not have has the value that does what that version did."""
    settings = {**ADDED, **flatten(config)}
    return {key: value for key, value in settings.items() if not is_among(key, NON_IDENTITY)}


def identity_key(config: Mapping[str, Any]) -> str:
    """`identity_settings` as text."""
    return json.dumps(identity_settings(config), sort_keys=True)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both: None where there is none."""
    both = [(key, one.get(key), other.get(key)) for key in {**one, **other}]
    return [(key, mine, theirs) for key, mine, theirs in both if mine != theirs]


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any], may: Collection[str] = MAY_CHANGE) -> str:
    """The first settings, by dotted key, that differ and are not among those that may; empty if there is none."""
    changed = [each for each in differences(flatten(before), flatten(now)) if not is_among(each[0], may)]
    words = ", ".join(f"{key} was {short_repr(old)} and is {short_repr(new)}" for key, old, new in changed[:3])
    return words + (f", and {len(changed) - 3} more" if len(changed) > 3 else "")


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
        if checksum != their_checksum:
            same = f"{name} has others in each" if name == their_name else f"{name} and {their_name}"
            return f"number {number} of those that arrived: {same}"
    return ""


def arrived_tasks(results: Json) -> list[tuple[str, str]]:
    """Name and checksum of the tasks that `ptlf learn` brought. Streams of a name and settings have the same images."""
    sums = results.get("arrived_sha256") or []
    return list(zip(map(str, results["tasks"][-len(sums) :]), sums, strict=False))


def describe_difference(mine: Json, theirs: Json) -> str:
    return ", ".join(f"{key}: {one} and {other}" for key, one, other in differences(mine, theirs)[:3])
