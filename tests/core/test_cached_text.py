"""Texts that take a torch import to make are made once."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ptlf.core import files


def test_a_text_is_made_anew_where_it_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []
    module = SimpleNamespace(text=lambda word: calls.append(word) or f"{len(calls)} of {word}\né")
    monkeypatch.setitem(sys.modules, "made_up_module", module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "ptlf" / "core" / "files.py"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(files, "__file__", str(source))

    def texts(*words: str | None) -> list[str]:
        return [files.cached_text("made_up_module:text", word).removesuffix("\né") for word in words]

    assert texts("a", "a") == ["1 of a", "2 of a"]  # torch is imported, and with it what the program may have added
    assert not (tmp_path / "cache").exists()
    monkeypatch.delitem(sys.modules, "torch")
    assert texts("a", "a", None, None, "a") == ["3 of a", "3 of a", "4 of None", "4 of None", "3 of a"]
    (tmp_path / "ptlf" / "more.py").write_text("changed = 1")
    assert texts("a", "a") == ["5 of a", "5 of a"]
    (kept,) = (tmp_path / "cache").rglob("text-a")
    kept.write_bytes(b"\xff")  # damaged
    assert texts("a", "a") == ["6 of a", "6 of a"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # cannot be written to
    assert texts("a", "a") == ["7 of a", "8 of a"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "entry_points", lambda: SimpleNamespace(groups={"ptlf.probes"}))
    assert texts("a", "a") == ["9 of a", "10 of a"]


def test_the_second_list_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    before = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    poisoned = before | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    first, second = (
        subprocess.run([sys.executable, "-m", "ptlf", "list"], capture_output=True, text=True, env=env)
        for env in (before, poisoned)
    )
    assert "simsiam" in first.stdout and second.stdout == first.stdout, second.stderr
    for module, help_of in (("ptlf", ""), ("ptlf", "learn"), ("ptlf", "data pack"), ("ptlf.cli", "")):
        words = [sys.executable, "-m", module, *help_of.split(), "--help"]
        assert "usage: ptlf" in subprocess.run(words, capture_output=True, text=True, env=poisoned).stdout
