"""Text, JSON and YAML that others wrote: read as data alone, of the shape that is needed, or refused by a UserError."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from ptlf.core.errors import UserError, printable, short_repr
from ptlf.core.files import open_regular

MAX_NUMBER = 1e30  # of a number in a record
NUMBER = (int, float)
TYPE_NAMES = {int: "a number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
TYPE_NAMES |= {dict: "a dictionary", list: "a list"}
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # what using a damaged record raises


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. A missing one raises FileNotFoundError."""
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_json(path: Path, hint: str = "") -> Any:
    """The value in a JSON file, with hidden characters escaped. A missing file raises FileNotFoundError."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise damaged(path, error, hint) from None


def parse_json(text: str) -> Any:
    """The value of a JSON text, with hidden characters escaped. Raises a ValueError."""
    try:
        return clean(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    return {printable(key): clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`flatten({"a": {"b": 1}})` -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def damaged(path: Path | str, error: Exception, hint: str = "") -> UserError:
    """For a file whose content is not what it should be, as `error` found."""
    return UserError(f"{path} is damaged: {explain(error)}{f'; {hint}' if hint else ''}")


def explain(error: Exception) -> str:
    """What an exception says, as a part of a sentence."""
    words = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(words.split())[:200] or type(error).__name__


def check_shape(value: Any, shape: Any, where: str = "") -> None:
    """Raise a ValueError that names the place where `value` is not of the shape.

    shape: a type or several; a dictionary with these keys, where "*" stands for any and "key?" may be missing or null;
    a list of like values; (low, high) with numbers for a whole number between them; a function that raises.
    """
    place = where or "the whole"
    if isinstance(shape, dict):
        check_type(value, (dict,), place)
        for key, inner in shape.items():
            for name in value if key == "*" else [key.removesuffix("?")]:
                below = f"{where}.{name}" if where else str(name)
                if not key.endswith("?") and name not in value:
                    raise ValueError(f"{below} is missing")
                if not key.endswith("?") or value.get(name) is not None:
                    check_shape(value[name], inner, below)
    elif isinstance(shape, list):
        check_type(value, (list,), place)
        for index, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{index}]")
    elif callable(shape) and not isinstance(shape, type):
        shape(value, place)
    elif isinstance(shape, type) or isinstance(shape[0], type):
        check_type(value, shape if isinstance(shape, tuple) else (shape,), place)
    elif type(value) is not int or not shape[0] <= value <= shape[1]:
        raise ValueError(f"{place} is {short_repr(value)}, not a whole number from {shape[0]} to {shape[1]}")


def check_type(value: Any, kinds: tuple[type, ...], place: str) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(dict.fromkeys(TYPE_NAMES.get(kind, kind.__name__) for kind in kinds))
        raise ValueError(f"{place} is {short_repr(value)}, not {wanted}")
    if isinstance(value, NUMBER) and not recordable(value):
        raise ValueError(f"{place} is {short_repr(value)}, not a finite number of at most {MAX_NUMBER:.0e}")


def recordable(value: float) -> bool:
    """Whether a record may hold the number: finite, and not larger than what readers take."""
    return abs(value) <= MAX_NUMBER


class Loader(yaml.SafeLoader):
    """YAML's plain values, but what Python and JSON write otherwise, such as 010, 12:30, 1e-3 or yes, is text."""

    def construct_plain(self, node: yaml.ScalarNode) -> Any:
        for make in (int, float, {"true": True, "false": False}.__getitem__):
            with suppress(ValueError, KeyError):
                value = make(node.value)
                if str(value) in (node.value, node.value.capitalize()):
                    return value
        return node.value

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # aliases let few lines grow without bound
            raise yaml.YAMLError(f"write out what *{self.peek_event().anchor} stands for")
        return super().compose_node(parent, index)


for tag in ("int", "float", "bool", "timestamp"):
    Loader.add_constructor(f"tag:yaml.org,2002:{tag}", Loader.construct_plain)


def load_yaml(text: str) -> Any:
    """The value of a YAML text. Raises a YAMLError."""
    try:
        return yaml.load(text, Loader)
    except (ValueError, TypeError, RecursionError) as error:  # such as a list as a key, or characters that are no YAML
        raise yaml.YAMLError(str(error)) from None
