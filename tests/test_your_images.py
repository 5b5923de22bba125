"""The commands and programs of docs/your-images.md, in their order, on small pictures."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptlf.cli import main

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "your-images.md"
RNG = np.random.default_rng(0)
COLOURS = {"apple": (200, 40, 30), "leaf": (40, 160, 50), "sky": (60, 110, 220)}


def save_photograph(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = RNG.integers(33, 60, 2)
    noise = RNG.normal(0, 40, (height, width, 3)) + np.array(colour)
    Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(path)


def test_the_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    for index in range(16):
        for day, colour in zip(("monday", "tuesday", "wednesday"), COLOURS.values(), strict=False):
            save_photograph(tmp_path / "photos" / day / f"{index}.png", colour)
        for name, colour in COLOURS.items():
            save_photograph(tmp_path / "labelled" / name / f"{index}.png", colour)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PTLF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(PAGE.parent.parent))
    programs = []
    for language, code in re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if language == "bash":
            for line in code.strip().splitlines():
                command, *words = shlex.split(line)
                assert command == "ptlf" and main(words) == 0, line
        else:
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            programs.append(done.stdout)
    assert programs[0].endswith("\n(16, 64)\n")
    assert programs[1].endswith("('red', 'green', 'blue') {'train': 24, 'test': 6}\n")
    assert int(programs[2].split("%")[0]) > 80  # of three colours that a random encoder could tell apart
    assert programs[3] == "(48, 64) 32 [0.4914, 0.4822, 0.4465]\n"
    said = capsys.readouterr().out
    assert "encoder.weights runs/cam" in said and "what it knew before" in said
