"""Settings as plain dataclasses, built strictly from nested dicts: an unknown key, a wrong type or a value out of range
is one sentence that names it. Recipes, YAML files and the command line all come through `build`."""

import contextlib
import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ptlf.core.errors import Refusals, UserError, unknown
from ptlf.core.reading import load_yaml
from ptlf.core.registry import Registry
from ptlf.core.words import short_repr

Presets = Mapping[str, Mapping[str, Any]]  # nested settings that a member's recipes need, by protocol or stream
as_dict = dataclasses.asdict
Kind = type | Registry[Any]  # of a section: a dataclass, or a registry for the `Config`s of all its members
Limit = float | None
DECIMAL = re.compile("[-+]?(0|[1-9][0-9]{0,18})")  # an octal of YAML 1.1, such as 010, is no number here
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MAX = 1_000_000  # a number without a bound of its own
LIMITS = {"gt": (operator.gt, "more than"), "ge": (operator.ge, "at least"), "le": (operator.le, "at most")}


def key(default: Any, about: str, *, choices: tuple = (), gt: Limit = None, ge: Limit = None, le: float = MAX) -> Any:
    """A dataclass field with its help text and the values it accepts."""
    meta = {"about": about, "choices": choices, "gt": gt, "ge": ge, "le": le}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
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
    told at once."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'the configuration'} must hold keys and values, not {short_repr(values)}")
    prefix = f"{path}." if path else ""
    made: dict[str, Any] = {}
    refused = Refusals()
    for name, value in values.items():
        with refused:
            made[name] = _value(kind, name, value, prefix)
    refused.end()
    return {**_default(kind, None), **made} if isinstance(kind, Registry) else kind(**made)


def _value(kind: Kind, name: str, value: Any, prefix: str) -> Any:
    """Of a key or section of `kind`, checked."""
    where = f"{prefix}{name}"
    if meta := _section(kind, name):
        value = _named(meta, value)
        return build(_kind(meta, value), value, where)
    fields = _fields(typing.cast("type", kind))
    if name not in fields:
        raise unknown("key", where, [f"{prefix}{known}" for known in fields])
    hint, limits = fields[name]
    return _checked(_cast(hint, value, where), limits, where)


def _cast(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type. Numbers and truth values may be text, such as 1e-3, +5 or yes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(arguments, key=lambda option: option is not type(value)):  # the value's own type first
            with contextlib.suppress(UserError):
                return _cast(option, value, where)
        wanted = " or ".join(_spoken(option) for option in arguments)
        raise UserError(f"{where} must be {wanted}, not {short_repr(value)}")
    if origin is list:
        if isinstance(value, (list, tuple)):
            return [_cast(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, str) and arguments[0] is str:  # one name
            return [value]
    elif hint is bool and isinstance(value, str) and value.lower() in TRUTHS:
        return TRUTHS[value.lower()]
    elif isinstance(value, bool):  # which Python counts as an int
        if hint is bool:
            return value
    elif hint is int and isinstance(value, str) and DECIMAL.fullmatch(value):
        return int(value)
    elif hint is float and isinstance(value, (int, float, str)):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    elif hint is str and isinstance(value, (int, float)):
        with contextlib.suppress(ValueError):  # of integers with thousands of digits
            return str(value)
    elif isinstance(value, hint):
        return value
    raise UserError(f"{where} must be {_spoken(hint)}, not {short_repr(value)}")


def _spoken(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if typing.get_origin(hint) is list:
        return "a list of lists" if typing.get_origin(typing.get_args(hint)[0]) is list else "a list"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _checked(value: Any, limits: Mapping[str, Any], where: str) -> Any:
    choices = limits.get("choices")
    if choices and isinstance(value, str) and value not in choices:
        raise unknown(f"value for {where}:", value, choices)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where} must be a finite number, not {value}")
        for name, (holds, phrase) in LIMITS.items():
            if (limit := limits.get(name)) is not None and not holds(value, limit):
                raise UserError(f"{where} must be {phrase} {limit}, not {short_repr(value)}")
    return value


def merge(kind: Kind, base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the dataclass `kind`: `base` with those of each layer on top, key by key. A section of a family starts
    afresh where its `name` changes: the old member's keys are not the new one's."""
    merged = dict(base)
    for layer in layers:
        for name, value in layer.items():
            meta = _section(kind, name) if name in merged else None
            merged[name] = value if meta is None else _merge_section(meta, merged[name], value)
    return merged


def _merge_section(meta: Mapping[str, Any], old: Any, new: Any) -> Any:
    old, new = _named(meta, old), _named(meta, new)
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if meta["family"] is not None and "name" in old and "name" in new and old["name"] != new["name"]:
        return dict(new)
    return merge(_kind(meta, {**old, **new}), old, new)


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` -> {"a": {"b": 1}}. A member such as "package.module:Name" is one name."""
    section, dot, module = dotted.partition(":")[0].partition(".")
    names = dotted.split(".")
    if ":" in dotted and dot:
        member, *rest = dotted.removeprefix(f"{section}.{module}:").split(".")
        names = [section, f"{module}:{member}", *rest]
    for name in reversed(names):
        value = {name: value}
    return typing.cast("dict[str, Any]", value)


def parse(text: str) -> Any:
    """A command-line value as `load_yaml` reads it: numbers, true/false, null, [lists]; anything else is text."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def parse_overrides(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """`--training.epochs 2 --device=cpu` as a nested dict of values for the dataclass `kind`."""
    values: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            example = f"--recipe {word}" if word.count("/") == 2 else "--training.epochs 2"
            raise UserError(
                f"unexpected argument {short_repr(word)}: settings are given as --key value, such as {example}"
            )
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise UserError(f"{word} needs a value, such as {word} 2")
            text = remaining.pop(0)
        values = merge(kind, values, nested(name.replace("-", "_"), parse(text)))
    return values


def describe(kind: Kind, path: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, help) for every key below the dataclass, for `--help`. The help of a key that only some
    members of a family have begins with their names."""
    prefix = f"{path}." if path else ""
    if isinstance(kind, Registry):
        return [row for name, member in kind.items() for row in describe(member.Config, f"{prefix}{name}")]
    rows = []
    for name, (_, meta) in _fields(kind).items():
        if "section" in meta:
            shared = describe(meta["section"], f"{prefix}{name}")
            rows += shared + _describe_members(meta["family"], f"{prefix}{name}", {key for key, _, _ in shared})
            continue
        default, about = getattr(kind(), name), meta.get("about", "")
        about += f" [{', '.join(meta['choices'])}]" if meta.get("choices") else ""
        rows.append((f"{prefix}{name}", "" if default is None else str(default), about))
    return rows


def _describe_members(family: Registry[Any] | None, where: str, shared: set[str]) -> list[tuple[str, str, str]]:
    """The keys that are not `shared` by all. Members with the same key, default and help have one row."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for name, member in (family or {}).items():
        for row in describe(member.Config, where):
            if row[0] not in shared:
                owners.setdefault(row, []).append(name)
    return [(key, default, f"{', '.join(names)}: {about}") for (key, default, about), names in owners.items()]
