"""What a record says of where it came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ptlf.run import environment


def test_a_changed_tree_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ptlf").mkdir()
    module = tmp_path / "ptlf" / "__init__.py"
    module.write_text("")
    monkeypatch.setattr(environment.ptlf, "__file__", str(module))
    assert environment.commit() is None
    for words in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    clean = environment.commit()
    assert clean is not None
    assert len(clean) == 40
    module.write_text("changed = True")
    assert environment.commit() == f"{clean}-dirty"
