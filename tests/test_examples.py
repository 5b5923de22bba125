"""Every program in examples/ runs as it is, with few epochs."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NEEDS = {"huggingface_digits": "accelerate", "lightning_digits": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if program.stem in NEEDS:
        pytest.importorskip(NEEDS[program.stem])
    source = program.read_text()
    words = [str(program)] + [str(tmp_path / "out")] * ('add_argument("out"' in source)
    words += ["--epochs", "1"] * ("--epochs" in source)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(str(program.parent))
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()
