"""The files of a record: their form, what is refused, and where a record came from."""

import json
import subprocess
from pathlib import Path

import pytest

from ptlf.core.errors import UserError
from ptlf.run import record
from ptlf.run.results import compiling_seconds, epoch_lines, read_results, to_columns, to_json


def test_a_changed_tree_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptlf").mkdir()
    module = tmp_path / "ptlf" / "__init__.py"
    module.write_text("")
    monkeypatch.setattr(record.ptlf, "__file__", str(module))
    assert record.source_commit() is None
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    clean = record.source_commit()
    assert clean is not None
    assert len(clean) == 40
    module.write_text("changed = True")
    assert record.source_commit() == f"{clean}-dirty"


def test_a_record_becomes_text_and_columns_and_comes_back() -> None:
    value = {"a": [1, None, "x, [y]"], "b": [[1.5, True], []], "c": {"d": {}, 3: {"e": "ü"}}, "f": []}
    text = to_json(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    first, second = '{\n "a": [1, null, "x, [y]"],\n "b": [\n  [1.5, true],\n  []\n ],\n', ' "c": {\n  "d": {},\n'
    assert text == f'{first}{second}  "3": {{\n   "e": "\\u00fc"\n  }}\n }},\n "f": []\n}}'
    with pytest.raises(ValueError, match="JSON compliant"):
        to_json({"a": [float("nan")]})
    lines = [
        {"task": 1, "peak": None, "loss": {"ssl": 0.5}},
        {"task": 2, "peak": 7, "loss": {"ssl": "nan", "distill": 0.25}},
        {"task": 2, "peak": 8, "loss": {}},
    ]
    columns = to_columns(lines)
    losses = {"ssl": [0.5, "nan", None], "distill": [None, 0.25, None]}
    assert columns == {"task": [1, 2, 2], "peak": [None, 7, 8], "loss": losses}
    for some in (lines, [], [{"task": 1, "loss": {}}]):
        assert epoch_lines({"cost": {"per_epoch": to_columns(some)}}) == some
    with pytest.raises(ValueError, match="shorter"):
        epoch_lines({"cost": {"per_epoch": {"task": [1, 2], "epoch": [1]}}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 1}', "has schema 1, this version reads schema 2; use an older ptlf"),
        ('{"schema": 3}', "has schema 3, this version reads schema 2; use a newer ptlf"),
        ("[]", "is damaged: it names no schema"),
        ('{"schema": 2', "is damaged: Expecting"),
        ('{"schema": 2}', "is damaged: status is missing"),
        ("[" * 100_000, "is damaged: it is nested too deeply"),
    ],
)
def test_a_file_of_another_schema_is_refused_with_the_way_out(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_results(tmp_path)
    assert str(caught.value).startswith(f"{path} {reason.format(path)}")


@pytest.mark.parametrize(("tasks", "seconds", "wait"), [
    ([1, 1, 2], [9.0, 2.0, 1.0], 7.0),
    ([1, 1], [2.0, 2.5], 0.0),  # the first epoch is the faster one
    ([1, 2], [9.0, 2.0], 0.0),  # of another task, which may have fewer images
    ([1], [9.0], 0.0),
    ([], [], 0.0),
])  # fmt: skip
def test_the_wait_for_the_compiler(tasks: list[int], seconds: list[float], wait: float) -> None:
    lines = [{"task": task, "seconds": took} for task, took in zip(tasks, seconds, strict=True)]
    assert compiling_seconds({"cost": {"per_epoch": to_columns(lines)}}) == wait
