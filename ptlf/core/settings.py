"""Settings as plain dataclasses, built strictly from nested dicts: an unknown key, a wrong type or a value out of range
is one sentence that names it. Recipes, YAML files and the command line all come through `build`."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ptlf.core.errors import UserError, unknown
from ptlf.core.registry import Registry

Presets = Mapping[str, Mapping[str, Any]]  # nested settings that a member's recipes need, by protocol or stream


def key(
    default: Any,
    about: str,
    *,
    choices: tuple[str, ...] | None = None,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A dataclass field with its help text and the values it accepts."""
    meta = {"about": about, "choices": choices, "above": above, "least": least, "most": most}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def section(kind: type, *, family: Registry[Any] | None = None, each: bool = False) -> Any:
    """A nested dataclass. With `family`, its `name` says which member's `Config` it is: a subclass of `kind`, whose
    own `name` is the default. Plain text for such a section means its name.

    each: a dict with the `Config` of every member of the family instead, by name.
    """
    default = functools.partial(_default, kind, family, each)
    return dataclasses.field(default_factory=default, metadata={"section": True, "family": family, "each": each})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _default(kind: type, family: Registry[Any] | None, each: bool) -> Any:
    if family is None:
        return kind()
    return {name: member.Config() for name, member in family.items()} if each else family.find(kind().name).Config()


def build(kind: type, values: Mapping[str, Any], path: str = "") -> Any:
    """An instance of the dataclass `kind` from a nested dict. Keys left out keep their defaults."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'the configuration'} must hold keys and values, not {values!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = _hints(kind)
    made = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in fields:
            raise unknown("key", where, [f"{path}.{known}" if path else known for known in fields])
        field = fields[name]
        if "section" not in field.metadata:
            made[name] = _checked(_cast(hints[name], value, where), field.metadata, where)
        elif field.metadata["each"]:
            made[name] = _build_each(field.metadata["family"], value, where)
        else:
            value = _named(field, value)
            made[name] = build(_kind(field, hints[name], value), value, where)
    return kind(**made)


def _build_each(family: Registry[Any], values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise UserError(f"{where} must hold keys and values, not {values!r}")
    given = {name: build(family.find(name).Config, value, f"{where}.{name}") for name, value in values.items()}
    return {**{name: member.Config() for name, member in family.items()}, **given}


def _named(field: dataclasses.Field[Any], value: Any) -> Any:
    """Text for a section of a family as {"name": text}."""
    return {"name": value} if field.metadata["family"] is not None and isinstance(value, str) else value


def _kind(field: dataclasses.Field[Any], default: type, value: Any) -> type:
    """The dataclass a section is built as: fixed, or the `Config` of the family member that `name` names."""
    family = field.metadata["family"]
    if family is None or not isinstance(value, Mapping):
        return default
    return family.find(value.get("name", default().name)).Config


def _cast(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type. Text for a number is read as one (YAML takes 1e-3 for text)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(arguments, key=lambda option: option is not type(value)):  # the value's own type first
            try:
                return _cast(option, value, where)
            except UserError:
                continue
        wanted = " or ".join(_spoken(option) for option in arguments)
        raise UserError(f"{where} must be {wanted}, not {value!r}")
    if hint is type(None):
        if value is None:
            return None
    elif origin is list:
        if isinstance(value, (list, tuple)):
            return [_cast(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where} must be {_spoken(hint)}, not {value!r}")


def _spoken(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if typing.get_origin(hint) is list:
        return "a list of lists" if typing.get_origin(typing.get_args(hint)[0]) is list else "a list"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _checked(value: Any, meta: Mapping[str, Any], where: str) -> Any:
    choices = meta.get("choices")
    if choices and isinstance(value, str) and value not in choices:
        raise unknown(f"value for {where}:", value, choices)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise UserError(f"{where} must be a finite number, not {value}")
        for name, wrong in (("above", "<="), ("least", "<"), ("most", ">")):
            limit = meta.get(name)
            if limit is None:
                continue
            if not (value > limit if wrong == "<=" else value >= limit if wrong == "<" else value <= limit):
                phrase = {"above": "more than", "least": "at least", "most": "at most"}[name]
                raise UserError(f"{where} must be {phrase} {limit}, not {value}")
    return value


def as_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def merge(kind: type, base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the dataclass `kind`: `base` with those of each layer on top, key by key. A section of a family starts
    afresh where its `name` changes: the old member's keys are not the new one's."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = _hints(kind)
    merged = dict(base)
    for layer in layers:
        for name, value in layer.items():
            if name in merged and name in fields and "section" in fields[name].metadata:
                value = _merge_section(fields[name], hints[name], merged[name], value)
            merged[name] = value
    return merged


def _merge_section(field: dataclasses.Field[Any], default: type, old: Any, new: Any) -> Any:
    family, each = field.metadata["family"], field.metadata["each"]
    if not each:
        old, new = _named(field, old), _named(field, new)
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if each:
        pairs = {name: (old[name], new[name]) for name in new if name in old}
        both = {
            name: merge(family.find(name).Config, *pair)
            for name, pair in pairs.items()
            if all(isinstance(value, Mapping) for value in pair)
        }
        return {**old, **new, **both}
    if family is not None and "name" in old and "name" in new and old["name"] != new["name"]:
        return dict(new)
    return merge(_kind(field, default, {**old, **new}), old, new)


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` -> {"a": {"b": 1}}."""
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return typing.cast("dict[str, Any]", value)


def parse(text: str) -> Any:
    """A command-line value as YAML reads it: numbers, true/false, null, [lists]; anything else is text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, datetime.date) else value  # a name may look like a date


def parse_overrides(kind: type, words: Sequence[str]) -> dict[str, Any]:
    """`--training.epochs 2 --device=cpu` as a nested dict of values for the dataclass `kind`."""
    values: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            example = f"--recipe {word}" if word.count("/") == 2 else "--training.epochs 2"
            raise UserError(f"cannot place {word!r}: settings are given as --key value, such as {example}")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise UserError(f"{word} needs a value, such as {word} 2")
            text = remaining.pop(0)
        values = merge(kind, values, nested(name.replace("-", "_"), parse(text)))
    return values


def describe(kind: type, path: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, help) for every key below the dataclass, for `--help`. The help of a key that only some
    members of a family have begins with their names."""
    rows = []
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        if "section" in field.metadata:
            family = field.metadata["family"]
            if field.metadata["each"]:
                rows += [row for name, member in family.items() for row in describe(member.Config, f"{where}.{name}")]
                continue
            shared = describe(hints[field.name], where)
            rows += shared
            rows += _describe_members(family, where, {key for key, _, _ in shared}) if family is not None else []
            continue
        default = getattr(kind(), field.name)
        about = field.metadata.get("about", "")
        if field.metadata.get("choices"):
            about += f" [{', '.join(field.metadata['choices'])}]"
        rows.append((where, "" if default is None else str(default), about))
    return rows


def _describe_members(family: Registry[Any], where: str, shared: set[str]) -> list[tuple[str, str, str]]:
    """The keys that are not `shared` by all. Members with the same key, default and help have one row."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for name, member in family.items():
        for row in describe(member.Config, where):
            if row[0] not in shared:
                owners.setdefault(row, []).append(name)
    return [(key, default, f"{', '.join(names)}: {about}") for (key, default, about), names in owners.items()]
