"""Input that somebody else wrote, or nobody would: every command ends with exit code 2 and one sentence, or rightly 0.

A row's command runs in a folder of its own, with a finished run in `done` and a stopped one in `half`.
"""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StopsAt, run_cli
from PIL import Image

from ptlf.cli import main

QUICK = [
    "--recipe", "digits/simsiam/ptlf", "--stream.groups", "[[0, 1], [2, 3]]", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--stream.per_class", "70", "--encoder.width", "4",
    "--objective.projection", "16", "--objective.bottleneck", "8",
]  # fmt: skip
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12))]
)
Content = str | bytes | Callable[[bytes], bytes] | None  # a function changes what is there; None: a FIFO


@dataclass
class Row:
    """A command, and files that are written before it. AT in the words is the folder."""

    words: str | list[str]
    files: dict[str, Content] = field(default_factory=dict)

    def prepare(self, at: Path) -> list[str]:
        for name, content in self.files.items():
            path = at / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                os.mkfifo(path)
            elif callable(content):
                path.write_bytes(content(path.read_bytes()))
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        words = self.words.split(" ") if isinstance(self.words, str) else self.words
        return [word.replace("AT", str(at)) for word in words]


def train(*words: str, out: str = "AT/out") -> Row:
    return Row(["train", "--out", out, *QUICK, *words])


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, "png")
    return file.getvalue()


def without_checksum(record: bytes) -> bytes:
    return json.dumps(json.loads(record) | {"encoder_sha256": None}).encode()


HUGE, DIGITS, DEEP, E20 = "1" + "0" * 400, "9" * 5000, "[" * 100_000, "1" + "0" * 20
REPORT = "report AT/done --out AT/done/page.html"
IMAGES = [f"images/{name}/{number}.png" for name in "ab" for number in "012"]
SETTINGS = [
    ("--seed", HUGE), ("--training.lr", HUGE), ("--training.epochs", "2020-99-99"), ("--training.epochs", "0x_"),
    ("--seed", DIGITS), ("--stream.groups", DEEP), ("--objective.projection", E20),
    ("--objective.projection", "1000000"), ("--memory.size", "1000000000000"), ("--memory.size", "10000000"),
    ("--views.size", E20), ("--views.size", "8000"), ("--evaluation.batch", E20), ("--freezing.batches", E20),
    ("--probes.linear.epochs", E20), ("--training.optimizer.momentum", "1"),
    ("--probes.knn_class.temperature", "1e-300"), ("--device", "cpu:7"), ("--stream.groups", BOMB),
]  # fmt: skip
CONFIGS = {
    "bad date": "training: {epochs: 2020-99-99}", "huge int": f"seed: {DIGITS}", "int 10**400": f"seed: {HUGE}",
    "deep": DEEP, "recipe is a list": "recipe: [a]", "list as a key": "? [a]\n: b", "non-utf8": b"\xff\xfe\xff",
    "null byte": "seed: \0", "holds itself": "a: &a [*a]", "fifo": None,
    "bomb in epochs": f"{BOMB}\ntraining: {{epochs: *a11}}", "bomb in groups": f"{BOMB}\nstream: {{groups: *a11}}",
}  # fmt: skip
WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "pickle": lambda data: b"cos\nsystem\n(S'true'\ntR.",
    "huge header": lambda data: b"\xff" * 8 + b"{}",
    "with NaN": lambda data: data[:-8] + np.full(2, np.nan, np.float32).tobytes(),
}
PACK = "data pack AT/images --data-root AT/data --size 8 --name"
WEIGHTS_FILE = "done/encoder.safetensors"
ODD_NAMES = [f"images/{os.fsdecode(name)}/{number}.png" for name in (b"caf\xff", b"\x1b[31mred") for number in "012"]
ROWS: dict[str, Row] = {
    **{f"train: {key} {value[:20]}": train(key, value) for key, value in SETTINGS},
    **{
        f"train: cfg {name}": Row("train --out AT/out -c AT/c.yaml", {"c.yaml": content})
        for name, content in CONFIGS.items()
    },
    **{f"train: cfg {path}": Row(f"train --out AT/out -c {path}") for path in ("/dev/zero", "AT")},
    **{
        f"train: encoder {name}": Row(f"train --out AT/out --encoder.name {name}")
        for name in ("os:abort", "sys:exit", "plugin_members:leaves")
    },
    "train: out nothing": train(out=""),
    **{
        f"evaluate: encoder {name}": Row(
            "evaluate AT/done", {WEIGHTS_FILE: change, "done/results.json": without_checksum}
        )
        for name, change in WEIGHTS.items()
    },
    "evaluate: a flipped bit": Row(
        "evaluate AT/done", {WEIGHTS_FILE: lambda data: data[:-2] + bytes([data[-2] ^ 64, data[-1]])}
    ),
    "evaluate: config.yaml is junk": Row("evaluate AT/done", {"done/config.yaml": "["}),
    "data pack: size 1e20": Row(f"{PACK} y --size {E20}"),
    "data pack: workers 1e9": Row(f"{PACK} y --workers 1000000000"),
    **{
        f"data get: {url}": Row(["data", "get", "cifar10", "--url", url, "--data-root", "AT/data"])
        for url in ("http://[::1", "file:///dev/zero", "http://127.0.0.1:1/a\nb")
    },
    "sweep: seeds huge": Row(f"sweep digits/simsiam/lump --out AT/s --seeds {HUGE}"),
}
FINE: dict[str, Row] = {  # odd, and rightly accepted
    "train: out rich closing tag": train(out="AT/[/a]"),
    "train: out nonutf8": train(out=os.fsdecode(b"AT/caf\xff")),
    "data pack: non-utf8 class": Row(f"{PACK} y", dict.fromkeys(ODD_NAMES, png())),
    "data pack: non-utf8 broken file skip": Row(
        f"{PACK} y --on-error skip", {os.fsdecode(b"images/a/broken\xff.png"): "no image"}
    ),
    "report: gallery.json = []": Row(REPORT, {"done/gallery.json": "[]"}),
    "report: gallery.json deep": Row(REPORT, {"done/gallery.json": DEEP}),
    "watch: metrics.jsonl junk": Row("watch AT/half --once", {"half/metrics.jsonl": f"\n[]\n{{}}\nnull\n{DEEP}\n"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in `done`, one stopped in its second task in `half`, and a packed set of images."""
    folder = tmp_path_factory.mktemp("runs")
    for row in (train(out="AT/done"), Row(f"{PACK} x", dict.fromkeys(IMAGES, png()))):
        assert main(row.prepare(folder)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.commands.train.Live", lambda name: StopsAt(3))
        assert main(train("--checkpoint.every_steps", "1", out="AT/half").prepare(folder)) == 128 + signal.SIGTERM
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs, tmp_path, dirs_exist_ok=True)


def sentences(text: str) -> list[str]:
    """The lines on stderr but progress bars and notes."""
    return [line for line in text.splitlines() if line.startswith("ptlf: ") and "warning: " not in line]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_refused_in_one_sentence(row: str, place: Path) -> None:
    words = ROWS[row].prepare(place)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    (sentence,) = sentences(run_cli(*words, code=2).err)
    assert len(sentence) < 700
    assert sentence.isprintable()
    left = {path.relative_to(place) for path in place.rglob("*") if not path.name.endswith(".damaged")}
    empty = {Path("data"), Path("data/.downloads"), Path("data/.downloads/cifar10")}
    assert left - set(before) <= {*empty, Path("half/.lock")}


@pytest.mark.parametrize("row", FINE, ids=str)
def test_rightly_accepted(row: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(FINE[row].prepare(place)) == 0
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert all(line.isprintable() for line in shown.out.split("\n"))


def test_an_image_too_large_for_the_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("ptlf.stream.decode.from_picture", fail)
    (sentence,) = sentences(run_cli(*Row(f"{PACK} y").prepare(place), code=2).err)
    assert "too many pixels for the memory of this machine" in sentence
