"""Text, JSON and YAML from strangers: bounded, escaped, of the shape that is needed."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptlf.core.errors import UserError, printable, short_repr
from ptlf.core.reading import check_shape, load_yaml, parse_json, read_json


def test_yaml_reads_decimal_numbers_leaves_other_text_as_it_was_typed_and_refuses_code() -> None:
    for text in ("a: 1", "[1, -2.5, x, null, true]", "a: {b: [c, 'd e', '7']}", "1e-3", "~", ""):
        assert load_yaml(text) == yaml.safe_load(text), text
    words = ["010", "12:30", "190:20:30.15", "0x1F", "0b1", "12_000", "+5", "1.50", "yes", "2020-99-99", "2020-01-02"]
    assert load_yaml(f"[{', '.join(words)}]") == words
    for text in ("[" * 100_000, "a: &a [*a]", "a: &a [1]\nb: *a", "!!python/object/apply:os.abort []"):
        with pytest.raises(yaml.YAMLError):
            load_yaml(text)


def test_hidden_characters_are_escaped_and_a_value_is_shown_in_few_words() -> None:
    assert printable("caf\u00e9 \x1b[31m \udcff \u202e\n") == "caf\u00e9 \\x1b[31m \\udcff \\u202e\\n"
    assert printable("\U0001f469\u200d\U0001f52c") == "\U0001f469\u200d\U0001f52c"  # one picture of three characters
    assert parse_json('{"a\\u001b": ["\\ud800", 1]}') == {"a\\x1b": ["\\ud800", 1]}
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep, deep]
    assert all(len(short_repr(value)) < 200 for value in (deep, "x" * 10**6, 10**4000, [[1] * 9] * 9, {1: 2}))
    assert short_repr("a\x1b") == "'a\\x1b'"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match=f"{path} cannot be read"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


SHAPE = {"a": int, "b?": [str], "c": {"*": (int, float)}, "d": (1, 9)}


def test_shapes() -> None:
    right = {"a": 1, "c": {"x": 1.5}, "d": 3}
    for value in (right, right | {"b": None, "more": object()}):
        check_shape(value, SHAPE)
    for change, message in (
        ({"a": "x"}, "a is 'x', not a number"),
        ({"a": True}, "a is True, not a number"),
        ({"b": [1]}, "b[0] is 1, not text"),
        ({"b": {}}, "b is {}, not a list"),
        ({"c": {"x": None}}, "c.x is None, not a number"),
        ({"c": {"x": float("inf")}}, "c.x is inf, not a finite number"),
        ({"c": {"x": 10**40}}, "c.x is 1000"),
        ({"c": []}, "c is [], not a dictionary"),
        ({"d": 2.0}, "d is 2.0, not a whole number from 1 to 9"),
    ):
        with pytest.raises(ValueError) as caught:
            check_shape(right | change, SHAPE)
        assert str(caught.value).startswith(message), change
    with pytest.raises(ValueError, match="a is missing"):
        check_shape({}, SHAPE)
