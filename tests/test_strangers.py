"""Input that somebody else wrote, or nobody would: every command ends with exit code 2 and one sentence, or rightly 0.

A row makes the words of a command in a folder of its own, with a finished run in `done` and a stopped one in `half`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StopsAt
from PIL import Image
from safetensors.torch import save

from ptlf.cli import main
from ptlf.training.checkpoint import HostCopy, first_line, read_checkpoint, write_checkpoint

QUICK = [
    "--recipe", "digits/simsiam/ptlf", "--stream.groups", "[[0, 1], [2, 3]]", "--training.epochs", "1",
    "--training.batch", "128", "--device", "cpu", "--stream.per_class", "70", "--encoder.width", "4",
    "--objective.projection", "16", "--objective.bottleneck", "8",
]  # fmt: skip
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12))]
)
Row = Callable[[Path], list[str]]


def train(*words: str) -> Row:
    return lambda at: ["train", "--out", str(at / "out"), *QUICK, *words]


def config(content: str | bytes) -> Row:
    """A YAML file given with -c."""

    def words(at: Path) -> list[str]:
        (at / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["train", "--out", str(at / "out"), "-c", str(at / "c.yaml")]

    return words


def fifo(at: Path) -> list[str]:
    os.mkfifo(at / "c.yaml")
    return ["train", "--out", str(at / "out"), "-c", str(at / "c.yaml")]


def damaged(file: str, content: str | bytes, *words: str, run: str = "done") -> Row:
    """A file of a run with another content; RUN in the words is the run."""

    def made(at: Path) -> list[str]:
        (at / run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [word.replace("RUN", str(at / run)) for word in words]

    return made


def resealed(change: Callable[[dict[str, Any]], Any]) -> Row:
    """Resume from a checkpoint whose checksum is right and whose content is not."""

    def words(at: Path) -> list[str]:
        path = max((at / "half" / "checkpoints").iterdir(), key=lambda path: "task02" in path.name)
        state = read_checkpoint(path)
        change(state)
        write_checkpoint(path, HostCopy(state))
        return ["train", "--resume", str(at / "half")]

    return words


def deep_checkpoint(at: Path) -> list[str]:
    for path in (at / "half" / "checkpoints").iterdir():
        data = save({}, {"state": "[" * 100_000})
        path.write_bytes(first_line(data) + data)
    return ["train", "--resume", str(at / "half")]


def setting(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Put the last of the path into a state, below the keys before it."""
    *keys, last, value = path

    def change(state: Any) -> None:
        for key in keys:
            state = state[key]
        state[last] = value

    return change


def images(at: Path, *classes: str | bytes) -> Path:
    rng = np.random.default_rng(0)
    for name in classes or ("a", "b"):
        folder = at / "images" / os.fsdecode(name)
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    return at / "images"


def pack(at: Path, *words: str) -> list[str]:
    return ["data", "pack", str(at / "images"), "--name", "x", "--data-root", str(at / "data"), *words]


def sized(*words: str) -> Row:
    def made(at: Path) -> list[str]:
        images(at)
        return pack(at, *words)

    return made


def foreign_class(at: Path) -> list[str]:
    images(at, b"caf\xff", b"\x1b[31mred")
    return pack(at, "--size", "8")


def foreign_file(at: Path) -> list[str]:
    (images(at) / "a" / os.fsdecode(b"broken\xff.png")).write_bytes(b"no image")
    return pack(at, "--size", "8", "--on-error", "skip")


def manifest(content: str) -> Row:
    def words(at: Path) -> list[str]:
        images(at)
        assert main(pack(at, "--size", "8")) == 0
        (at / "data" / "x" / "pack.json").write_text(content)
        stream = ["--stream.pack", "x", "--data-root", str(at / "data")]
        return ["train", "--recipe", "folder/simsiam/lump", "--out", str(at / "out"), *stream]

    return words


def tiny_source(at: Path) -> list[str]:
    source = at / "tiny-imagenet-200"
    for split in ("train", "val"):
        (source / split / "n01").mkdir(parents=True)
        (source / split / "n01" / "x.JPEG").write_bytes(b"")
    (source / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe")
    return ["data", "get", "tinyimagenet", "--source", str(source), "--data-root", str(at / "data")]


def address(url: str) -> Row:
    return lambda at: ["data", "get", "cifar10", "--via", "archive", "--url", url, "--data-root", str(at / "data")]


def foreign_out(name: bytes) -> Row:
    return lambda at: ["train", "--out", str(at / os.fsdecode(name)), *QUICK]


def encoder_file(change: Callable[[Path], Any]) -> Row:
    def words(at: Path) -> list[str]:
        change(at / "done" / "encoder.safetensors")
        results = json.loads((at / "done" / "results.json").read_text())
        (at / "done" / "results.json").write_text(json.dumps(results | {"encoder_sha256": None}))
        return ["evaluate", str(at / "done")]

    return words


def flipped(at: Path) -> list[str]:
    path = at / "done" / "encoder.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 64
    path.write_bytes(data)
    return ["evaluate", str(at / "done")]


def sweep_of(content: str) -> Row:
    """A sweep whose folder holds a run with another results.json."""

    def words(at: Path) -> list[str]:
        folder = at / "sweep" / "digits-simsiam-ptlf-seed0"
        shutil.copytree(at / "done", folder)
        (folder / "results.json").write_text(content)
        return ["sweep", "digits/simsiam/ptlf", "--out", str(at / "sweep"), *QUICK[2:]]

    return words


HUGE, DIGITS, DEEP = "1" + "0" * 400, "9" * 5000, "[" * 100_000
RESUME, SWEEP = ("train", "--resume", "RUN"), ("report", "RUN", "--out", "RUN/page.html")
READERS = {"report": SWEEP, "resume": RESUME, "watch": ("watch", "RUN", "--once")}
RECORDS = {
    "[]": "[]", "{}": "{}", "string": '"x"', "null": "null", "empty": "", "deep": DEEP, "non-utf8": b"\xff\xfe",
    "schema only": '{"schema": 2}', "status only": '{"status": "finished"}', "truncated": '{"schema": 2, "sta',
    "huge int": '{"schema": ' + DIGITS + "}", "NaN": '{"schema": 2, "status": NaN}',
}  # fmt: skip

SETTINGS = [
    ("--seed", HUGE), ("--training.lr", HUGE), ("--training.epochs", "2020-99-99"), ("--training.epochs", "0x_"),
    ("--seed", DIGITS), ("--stream.groups", DEEP), ("--objective.projection", "100000000000000000000"),
    ("--objective.projection", "1000000"), ("--memory.size", "1000000000000"),
    ("--memory.size", "100000000000000000000"), ("--memory.size", "10000000"), ("--views.size", "100000"),
    ("--views.size", "100000000000000000000"), ("--views.size", "8000"),
    ("--evaluation.batch", "100000000000000000000"), ("--freezing.batches", "100000000000000000000"),
    ("--probes.linear.epochs", "100000000000000000000"), ("--training.optimizer.momentum", "1"),
    ("--probes.knn_class.temperature", "1e-300"), ("--device", "cpu:7"), ("--stream.groups", BOMB),
]  # fmt: skip

ROWS: dict[str, Row] = {
    **{f"train: {key} {value[:20]}": train(key, value) for key, value in SETTINGS},
    "train: encoder os:abort": lambda at: ["train", "--out", str(at / "out"), "--encoder.name", "os:abort"],
    "train: encoder that exits": lambda at: ["train", "--out", str(at), "--encoder.name", "plugin_members:leaves"],
    "train: encoder sys:exit": lambda at: ["train", "--out", str(at / "out"), "--encoder.name", "sys:exit"],
    "train: out nothing": lambda at: ["train", "--out", "", *QUICK],
    "train: cfg bad date": config("training: {epochs: 2020-99-99}"),
    "train: cfg bad int": config("training: {epochs: 0x_}"),
    "train: cfg huge int": config(f"seed: {DIGITS}"),
    "train: cfg int 10**400": config(f"seed: {HUGE}"),
    "train: cfg deep": config(DEEP),
    "train: cfg recipe is a list": config("recipe: [a]"),
    "train: cfg list as a key": config("? [a]\n: b"),
    "train: cfg non-utf8": config(b"\xff\xfe\xff"),
    "train: cfg null byte": config("seed: \0"),
    "train: cfg too long": config("# " + "x" * 300_000),
    "train: cfg holds itself": config("a: &a [*a]"),
    "train: cfg /dev/zero": lambda at: ["train", "--out", str(at / "out"), "-c", "/dev/zero"],
    "train: cfg is a folder": lambda at: ["train", "--out", str(at / "out"), "-c", str(at)],
    "train: cfg fifo": fifo,
    "train: cfg bomb in epochs": config(f"{BOMB}\ntraining: {{epochs: *a11}}"),
    "train: cfg bomb in groups": config(f"{BOMB}\nstream: {{groups: *a11}}"),
    **{
        f"{command}: results.json = {name}": damaged("results.json", content, *words)
        for number, (name, content) in enumerate(RECORDS.items())
        for command, words in [*READERS.items()][: 1 + number % 3]  # the reader is one function
    },
    "sealed: position.task=-1": resealed(setting("position", "task", -1)),
    "sealed: position.task=99": resealed(setting("position", "task", 99)),
    "sealed: position.task='x'": resealed(setting("position", "task", "x")),
    "sealed: optimizer list": resealed(setting("optimizer", [])),
    "sealed: optimizer key abc": resealed(setting("optimizer", {"abc": {}})),
    "sealed: record.per_epoch junk": resealed(setting("record", "per_epoch", [1])),
    "sealed: record.matrices junk": resealed(setting("record", "matrices", {"knn_task": [["x"]]})),
    "sealed: record.future str": resealed(setting("record", "future", {"knn_task": ["x"]})),
    "sealed: freezing.log str": resealed(setting("freezing", "log", "x")),
    "sealed: freezing frozen unknown": resealed(setting("freezing", "frozen", ["nope"])),
    "sealed: looks str": resealed(setting("looks", "x")),
    "sealed: looks junk": resealed(setting("looks", {"before": {"neighbours": [["x"]], "points": []}})),
    "sealed: looks out of range": resealed(setting("looks", "before", "neighbours", [[999_999]])),
    "sealed: random junk": resealed(setting("random", {"order": 3})),
    "sealed: model missing": resealed(lambda state: state.pop("model")),
    "sealed: clock str": resealed(setting("clock", "training", "x")),
    "evaluate: encoder truncated": encoder_file(lambda path: path.write_bytes(path.read_bytes()[:100])),
    "evaluate: encoder empty": encoder_file(lambda path: path.write_bytes(b"")),
    "evaluate: encoder random": encoder_file(lambda path: path.write_bytes(bytes(range(256)) * 9)),
    "evaluate: encoder pickle": encoder_file(lambda path: path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")),
    "evaluate: encoder huge header": encoder_file(lambda path: path.write_bytes(b"\xff" * 8 + b"{}")),
    "evaluate: encoder is a folder": encoder_file(lambda path: (path.unlink(), path.mkdir())),
    "evaluate: encoder with NaN": encoder_file(
        lambda path: path.write_bytes(path.read_bytes()[:-8] + np.full(2, np.nan, np.float32).tobytes())
    ),
    "evaluate: encoder with a flipped bit": flipped,
    "evaluate: config.yaml is junk": damaged("config.yaml", "[", "evaluate", "RUN"),
    "data pack: size 1e20": sized("--size", "100000000000000000000"),
    "data pack: workers 1e9": sized("--size", "8", "--workers", "1000000000"),
    "data get: tiny folder non-utf8 annotations": tiny_source,
    "data get: url 'http://[::1'": address("http://[::1"),
    "data get: url 'file:///dev/zero'": address("file:///dev/zero"),
    "data get: url with a new line": address("http://127.0.0.1:1/a\nb"),
    **{f"pack.json = {name}": manifest(text) for name, text in RECORDS.items() if isinstance(text, str)},
    "sweep: seeds huge": lambda at: ["sweep", "digits/simsiam/lump", "--out", str(at / "s"), "--seeds", HUGE],
    "sweep: results {}": sweep_of("{}"),
    "sweep: results status only": sweep_of('{"schema": 2, "status": "finished"}'),
}  # fmt: skip
FINE: dict[str, Row] = {  # odd, and rightly accepted
    "sealed: deep json": deep_checkpoint,  # damaged like any other; the run begins anew
    "train: out rich closing tag": lambda at: ["train", "--out", str(at / "[/a]"), *QUICK],
    "train: out nonutf8": foreign_out(b"caf\xff"),
    "data pack: non-utf8 class": foreign_class,
    "data pack: non-utf8 broken file skip": foreign_file,
    "report: gallery.json = []": damaged("gallery.json", "[]", *SWEEP),
    "report: gallery.json deep": damaged("gallery.json", DEEP, *SWEEP),
    "watch: metrics.jsonl junk": damaged("metrics.jsonl", f"\n[]\n{{}}\nnull\n{DEEP}\n", *READERS["watch"], run="half"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in `done` and one stopped in its second task in `half`."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "--out", str(folder / "done"), *QUICK]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.commands.train.Live", lambda name: StopsAt(3))
        code = main(["train", "--out", str(folder / "half"), *QUICK, "--checkpoint.every_steps", "1"])
    assert code == 128 + signal.SIGTERM
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path) -> Path:
    for run in ("done", "half"):
        shutil.copytree(runs / run, tmp_path / run)
    return tmp_path


def run_command(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        return exit_.code


def sentences(text: str) -> list[str]:
    """The lines on stderr but progress bars and notes."""
    return [line for line in text.splitlines() if line.startswith("ptlf: ") and "warning: " not in line]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_refused_in_one_sentence(row: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ROWS[row](place)
    capfd.readouterr()
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    assert run_command(words) == 2
    (sentence,) = sentences(capfd.readouterr().err)
    assert len(sentence) < 700
    assert sentence.isprintable()
    left = sorted(path.relative_to(place) for path in place.rglob("*") if not path.name.endswith(".damaged"))
    assert set(left) - set(before) <= {Path("data"), Path("half/.lock"), Path("data/.downloads")}


@pytest.mark.parametrize("row", FINE, ids=str)
def test_rightly_accepted(row: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = FINE[row](place)
    assert run_command(words) == 0
    told = capfd.readouterr()
    assert "Traceback" not in told.err
    assert all(line.isprintable() for line in told.out.split("\n"))


class Odd(BaseHTTPRequestHandler):
    """Answers with a length that is none, with more than it announces, or without an end."""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path.startswith("/badlen"):
            self.send_header("Content-Length", "abc")
        if self.path.startswith("/huge"):
            self.send_header("Content-Length", "9" * 17)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/badlen/a", "cannot be downloaded: invalid literal for int() with base 10: 'abc'"),
        ("/huge/a", "the server sends more than 1000000 bytes; no archive here has as many"),
        ("/endless/a", "the server sends more than 1000000 bytes; no archive here has as many"),
    ],
)
def test_a_download_that_does_not_end_well(
    server: str, path: str, why: str, tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ptlf.stream.fetch.MAX_BYTES", 1_000_000)
    assert run_command(address(server + path)(tmp_path)) == 2
    (sentence,) = sentences(capfd.readouterr().err)
    assert why in sentence
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 0] == []


LIMITED = """
import resource, sys
import ptlf.commands.data
from ptlf.cli import main
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (600 << 20),) * 2)
print([main([*sys.argv[1:], "--on-error", way]) for way in ("refuse", "skip")])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_an_image_too_large_for_the_memory(tmp_path: Path) -> None:
    """13,300 x 13,300 pixels, just below what Pillow refuses by itself, with 600 MB of memory left."""
    images(tmp_path)
    Image.new("1", (13_300, 13_300)).save(tmp_path / "images" / "a" / "bomb.png")
    words = [sys.executable, "-c", LIMITED, *pack(tmp_path, "--size", "8", "--workers", "1")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "[2, 0]" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("bomb.png") == done.stderr.count("too many pixels for the memory of this machine") == 2
