"""Settings as plain dataclasses, built strictly from nested dicts: an unknown key, a wrong type or a value out of range
is one sentence that names it. Recipes, YAML files and the command line all come through `build`."""

from __future__ import annotations

import dataclasses
import datetime
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ptlf.core.errors import UserError, unknown


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


def section(kind: type, *, family: Mapping[str, Any] | None = None, noun: str = "") -> Any:
    """A nested dataclass; with `family`, the member called `name` there says which (its `Config`)."""
    default = kind if family is None else family[kind().name].Config
    return dataclasses.field(default_factory=default, metadata={"family": family, "noun": noun})


def build(kind: type, values: Mapping[str, Any], path: str = "") -> Any:
    """An instance of the dataclass `kind` from a nested dict. Keys left out keep their defaults."""
    if not isinstance(values, Mapping):
        named = f"; did you mean {path}.name?" if path and "name" in kind.__dataclass_fields__ else ""
        raise UserError(f"{path or 'the configuration'} must hold keys and values, not {values!r}{named}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    made = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in fields:
            raise unknown("key", where, [f"{path}.{known}" if path else known for known in fields])
        field = fields[name]
        if "family" in field.metadata:
            made[name] = build(_member(field, hints[name], value, where), value, where)
        else:
            made[name] = _checked(_cast(hints[name], value, where), field.metadata, where)
    return kind(**made)


def _member(field: dataclasses.Field[Any], default: type, value: Any, where: str) -> type:
    """The dataclass a section is built as: fixed, or the `Config` of the family member that `name` names."""
    family = field.metadata["family"]
    if family is None or not isinstance(value, Mapping):
        return default
    name = value.get("name", default().name)
    if not isinstance(name, str) or name not in family:
        raise unknown(field.metadata["noun"], name, family)
    return family[name].Config


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


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` on top, key by key. A section whose `name` changes starts afresh, but for views,
    whose size and memory are no particular one's."""
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            renamed = name != "views" and "name" in old and "name" in value and old["name"] != value["name"]
            value = dict(value) if renamed else merge(old, value)
        merged[name] = value
    return merged


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


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`--training.epochs 2 --device=cpu` as a nested dict."""
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
        values = merge(values, nested(name.replace("-", "_"), parse(text)))
    return values


def describe(kind: type, path: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, default, help) for every key below the dataclass, for `--help`."""
    rows = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        where = f"{path}.{field.name}" if path else field.name
        if "family" in field.metadata:
            family = field.metadata["family"]
            rows += describe(hints[field.name], where)
            shared = {row[0] for row in rows}
            for name, member in (family or {}).items():
                rows += [(k, d, f"{name}: {a}") for k, d, a in describe(member.Config, where) if k not in shared]
            continue
        default = getattr(kind(), field.name)
        about = field.metadata.get("about", "")
        if field.metadata.get("choices"):
            about += f" [{', '.join(field.metadata['choices'])}]"
        rows.append((where, "" if default is None else str(default), about))
    return rows
