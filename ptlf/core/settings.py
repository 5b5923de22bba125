"""Settings as plain dataclasses, built strictly from nested dicts: an unknown key, a wrong type or a value out of range
is one sentence that names it. Recipes, YAML files and the command line all come through `build`."""

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from ptlf.core.errors import Refusals, UserError, short_repr, unknown
from ptlf.core.reading import TYPE_NAMES, load_yaml
from ptlf.core.registry import Registry

Presets = Mapping[str, Mapping[str, Any]]  # nested settings that a member's recipes need, by protocol or stream
as_dict = dataclasses.asdict
Kind = type | Registry[Any]  # of a section: a dataclass, or a registry for the `Config`s of all its members
Limit = float | None
DECIMAL = re.compile("[-+]?(0|[1-9][0-9]{0,18})")  # an octal of YAML 1.1, such as 010, is no number here
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NAMES = {**TYPE_NAMES, int: "a whole number"}
MAX = 1_000_000  # a number without a bound of its own
LIMITS = {"gt": (operator.gt, "more than"), "ge": (operator.ge, "at least"), "le": (operator.le, "at most")}


def key(default: Any, about: str, *, choices: tuple = (), gt: Limit = None, ge: Limit = None, le: float = MAX) -> Any:
    """A dataclass field with its help text and the values it accepts."""
    meta = {"about": about, "choices": choices, "gt": gt, "ge": ge, "le": le}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def section(kind: Kind, *, family: Registry[Any] | None = None) -> Any:
    """A nested dataclass. With `family`, its `name` says which member's `Config` it is: a subclass of `kind`, whose
    own `name` is the default. Plain text for such a section means its name.

    kind: a registry stands for a dict with the `Config` of every member, by name.
    """
    default = functools.partial(_default, kind, family)
    return dataclasses.field(default_factory=default, metadata={"section": kind, "family": family})


def _default(kind: Kind, family: Registry[Any] | None) -> Any:
    if isinstance(kind, Registry):
        return {name: member.Config() for name, member in kind.items()}
    return kind() if family is None else family.find(kind().name).Config()


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Type and metadata of every field, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: (hints[field.name], field.metadata) for field in dataclasses.fields(kind)}


def _section(kind: Kind, name: str) -> Mapping[str, Any] | None:
    """Metadata of the section called `name`; None for a plain or unknown key."""
    if isinstance(kind, Registry):
        return {"section": kind.find(name).Config, "family": None}
    _, meta = _fields(kind).get(name, (None, {}))
    return meta if "section" in meta else None


def _named(meta: Mapping[str, Any], value: Any) -> Any:
    """Text for a section of a family as {"name": text}."""
    return {"name": value} if meta["family"] is not None and isinstance(value, str) else value


def _kind(meta: Mapping[str, Any], value: Any) -> Kind:
    """What a section is built as: fixed, or the `Config` of the family member that `name` names."""
    kind, family = meta["section"], meta["family"]
    if family is None or not isinstance(value, Mapping):
        return kind
    return family.find(value.get("name", kind().name)).Config


def build(kind: Kind, values: Mapping[str, Any], path: str = "") -> Any:
    """An instance of the dataclass `kind` from a nested dict. Keys left out keep their defaults. All that is wrong is
    reported at once."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'the configuration'} must hold keys and values, not {short_repr(values)}")
    prefix = f"{path}." if path else ""
    made: dict[str, Any] = {}
    refused = Refusals()
    for name, value in values.items():
        where = f"{prefix}{name}"
        with refused:
            if meta := _section(kind, name):
                named = _named(meta, value)
                made[name] = build(_kind(meta, named), named, where)
                continue
            fields = _fields(typing.cast("type", kind))
            if name not in fields:
                deeper = [key for key, *_ in describe(kind, path) if key.endswith(f".{name}")]
                raise unknown("key", where, [f"{prefix}{known}" for known in fields], *deeper[:1])
            hint, limits = fields[name]
            made[name] = _cast(hint, value, where)
            _check(made[name], limits, where)
    refused.end()
    return {**_default(kind, None), **made} if isinstance(kind, Registry) else kind(**made)


def _cast(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type. Numbers and truth values may be text, such as 1e-3, +5 or yes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(arguments, key=lambda option: option is not type(value)):  # the value's own type first
            with suppress(UserError):
                return _cast(option, value, where)
    elif origin is list:
        if isinstance(value, str) and arguments[0] is str:  # one name
            return [value]
        if isinstance(value, list | tuple):
            return [_cast(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    elif hint is bool and isinstance(value, str) and value.lower() in TRUTHS:
        return TRUTHS[value.lower()]
    elif isinstance(value, bool):  # which Python counts as an int
        if hint is bool:
            return value
    elif hint is int and isinstance(value, str) and DECIMAL.fullmatch(value):
        return int(value)
    elif hint is float and isinstance(value, int | float | str):
        with suppress(ValueError, OverflowError):
            return float(value)
    elif hint is str and isinstance(value, int | float):
        return str(value)
    elif isinstance(value, hint):
        return value
    raise UserError(f"{where} must be {_type_name(hint)}, not {short_repr(value)}")


def _type_name(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return "a list of lists" if typing.get_origin(arguments[0]) is list else "a list"
    return " or ".join(map(_type_name, arguments)) or NAMES.get(hint, str(hint))


def _check(value: Any, limits: Mapping[str, Any], where: str) -> None:
    choices = limits.get("choices")
    if choices and isinstance(value, str) and value not in choices:
        raise unknown(f"value for {where}:", value, choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where} must be a finite number, not {value}")
        for name, (holds, phrase) in LIMITS.items():
            if (limit := limits.get(name)) is not None and not holds(value, limit):
                raise UserError(f"{where} must be {phrase} {limit}, not {short_repr(value)}")


def merge(kind: Kind, base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the dataclass `kind`: `base` with those of each layer on top, key by key. A section of a family starts
    afresh where its `name` changes: the old member's keys are not the new one's."""
    merged = dict(base)
    for layer in layers:
        for name, new in layer.items():
            if name in merged and (meta := _section(kind, name)):
                old, new = _named(meta, merged[name]), _named(meta, new)
                if isinstance(old, Mapping) and isinstance(new, Mapping):
                    both_named = meta["family"] is not None and "name" in old and "name" in new
                    renamed = both_named and old["name"] != new["name"]
                    new = dict(new) if renamed else merge(_kind(meta, {**old, **new}), old, new)
            merged[name] = new
    return merged


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` -> {"a": {"b": 1}}. A member such as "package.module:Name" is one name."""
    head, colon, tail = dotted.partition(":")
    names = head.split(".", 1 if colon else -1)
    if colon:
        member, *rest = tail.split(".")
        names = [*names[:-1], f"{names[-1]}:{member}", *rest]
    return functools.reduce(lambda inner, name: {name: inner}, reversed(names), value)


def parse(text: str) -> Any:
    """A command-line value as `load_yaml` reads it: numbers, true/false, null, [lists]; anything else is text."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def parse_overrides(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """`--training.epochs 2 --device=cpu` as a nested dict of values for the dataclass `kind`."""
    values: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--"):
            example = f"--recipe {word}" if word.count("/") == 2 else "--training.epochs 2"
            what = f"unexpected argument {short_repr(word)}"
            raise UserError(f"{what}: settings are given as --key value, such as {example}")
        name, equals, text = word[2:].partition("=")
        value = text if equals else next(remaining, None)
        if value is None:
            raise UserError(f"{word} needs a value, such as {word} 2")
        values = merge(kind, values, nested(name.replace("-", "_"), parse(value)))
    return values


def describe(kind: Kind, path: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, help) for every key below the dataclass, for `--help`. The help of a key that only some
    members of a family have begins with their names; members with the same key, default and help have one row."""
    if isinstance(kind, Registry):
        return [row for name, member in kind.items() for row in describe(member.Config, f"{path}.{name}")]
    rows = []
    for name, (_, meta) in _fields(kind).items():
        where = f"{path}.{name}" if path else name
        if "section" not in meta:
            default, choices = getattr(kind(), name), meta.get("choices")
            about = meta.get("about", "") + (f" [{', '.join(choices)}]" if choices else "")
            rows.append((where, "" if default is None else str(default), about))
            continue
        shared = describe(meta["section"], where)
        keys = {key for key, _, _ in shared}
        owners: dict[tuple[str, str, str], list[str]] = {}
        family = meta["family"] or {}
        by_prefix = {f"{prefix}:NAME": make("NAME") for prefix, make in getattr(family, "prefixes", {}).items()}
        for member, entry in {**family, **by_prefix}.items():
            for row in describe(entry.Config, where):
                if row[0] not in keys:
                    owners.setdefault(row, []).append(member)
        rows += shared
        rows += [(key, default, f"{', '.join(names)}: {about}") for (key, default, about), names in owners.items()]
    return rows
