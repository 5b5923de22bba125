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
Row = Callable[[Path], list[str]]


def train(*words: str) -> Row:
    return lambda at: ["train", "--out", str(at / "out"), *QUICK, *words]


def plain(*words: str) -> Row:
    """AT in the words is the folder."""
    return lambda at: [word.replace("AT", str(at)) for word in words]


def config(content: str | bytes | None) -> Row:
    """A YAML file given with -c; None: a FIFO."""

    def words(at: Path) -> list[str]:
        if content is None:
            os.mkfifo(at / "c.yaml")
        else:
            (at / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["train", "--out", str(at / "out"), "-c", str(at / "c.yaml")]

    return words


def damaged(file: str, content: str | bytes, *words: str, run: str = "done") -> Row:
    """A file of a run with another content; RUN in the words is the run."""

    def made(at: Path) -> list[str]:
        (at / run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [word.replace("RUN", str(at / run)) for word in words]

    return made


def pack(at: Path, *words: str, classes: tuple[bytes, ...] = (b"a", b"b")) -> list[str]:
    rng = np.random.default_rng(0)
    for name in classes:
        folder = at / "images" / os.fsdecode(name)
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    return ["data", "pack", str(at / "images"), "--name", "x", "--data-root", str(at / "data"), *words]


def foreign_file(at: Path) -> list[str]:
    words = pack(at, "--size", "8", "--on-error", "skip")
    (at / "images" / "a" / os.fsdecode(b"broken\xff.png")).write_bytes(b"no image")
    return words


def manifest(content: str) -> Row:
    def words(at: Path) -> list[str]:
        assert main(pack(at, "--size", "8")) == 0
        (at / "data" / "x" / "pack.json").write_text(content)
        stream = ["--stream.pack", "x", "--data-root", str(at / "data")]
        return ["train", "--recipe", "folder/simsiam/lump", "--out", str(at / "out"), *stream]

    return words


def address(url: str) -> Row:
    return plain("data", "get", "cifar10", "--url", url, "--data-root", "AT/data")


def encoder_file(change: Callable[[bytes], bytes], *, known: bool = False) -> Row:
    """known: the record still has the file's checksum."""

    def words(at: Path) -> list[str]:
        path, record = at / "done" / "encoder.safetensors", at / "done" / "results.json"
        path.write_bytes(change(path.read_bytes()))
        if not known:
            record.write_text(json.dumps(json.loads(record.read_text()) | {"encoder_sha256": None}))
        return ["evaluate", str(at / "done")]

    return words


def sweep_of(content: str) -> Row:
    """A sweep whose folder holds a run with another results.json."""

    def words(at: Path) -> list[str]:
        folder = at / "sweep" / "digits-simsiam-ptlf-seed0"
        shutil.copytree(at / "done", folder)
        (folder / "results.json").write_text(content)
        return ["sweep", "digits/simsiam/ptlf", "--out", str(at / "sweep"), *QUICK[2:]]

    return words


HUGE, DIGITS, DEEP, E20 = "1" + "0" * 400, "9" * 5000, "[" * 100_000, "1" + "0" * 20
READERS = {
    "report": ("report", "RUN", "--out", "RUN/page.html"), "resume": ("train", "--resume", "RUN"),
    "watch": ("watch", "RUN", "--once"),
}  # fmt: skip
RECORDS = {
    "[]": "[]", "{}": "{}", "string": '"x"', "null": "null", "empty": "", "deep": DEEP, "non-utf8": b"\xff\xfe",
    "schema only": '{"schema": 2}', "status only": '{"status": "finished"}', "truncated": '{"schema": 2, "sta',
    "huge int": '{"schema": ' + DIGITS + "}", "NaN": '{"schema": 2, "status": NaN}',
}  # fmt: skip
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
    "null byte": "seed: \0", "too long": "# " + "x" * 300_000, "holds itself": "a: &a [*a]", "fifo": None,
    "bomb in epochs": f"{BOMB}\ntraining: {{epochs: *a11}}", "bomb in groups": f"{BOMB}\nstream: {{groups: *a11}}",
}  # fmt: skip
WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:100],
    "empty": lambda data: b"",
    "random": lambda data: bytes(range(256)) * 9,
    "pickle": lambda data: b"cos\nsystem\n(S'true'\ntR.",
    "huge header": lambda data: b"\xff" * 8 + b"{}",
    "with NaN": lambda data: data[:-8] + np.full(2, np.nan, np.float32).tobytes(),
}
ROWS: dict[str, Row] = {
    **{f"train: {key} {value[:20]}": train(key, value) for key, value in SETTINGS},
    **{f"train: cfg {name}": config(content) for name, content in CONFIGS.items()},
    **{f"train: cfg {path}": plain("train", "--out", "AT/out", "-c", path) for path in ("/dev/zero", "AT")},
    **{
        f"train: encoder {name}": plain("train", "--out", "AT/out", "--encoder.name", name)
        for name in ("os:abort", "sys:exit", "plugin_members:leaves")
    },
    "train: out nothing": lambda at: ["train", "--out", "", *QUICK],
    **{
        f"{command}: results.json = {name}": damaged("results.json", content, *words)
        for number, (name, content) in enumerate(RECORDS.items())
        for command, words in [*READERS.items()][: 1 + number % 3]  # the reader is one function
    },
    **{f"evaluate: encoder {name}": encoder_file(change) for name, change in WEIGHTS.items()},
    "evaluate: a flipped bit": encoder_file(lambda data: data[:-2] + bytes([data[-2] ^ 64, data[-1]]), known=True),
    "evaluate: config.yaml is junk": damaged("config.yaml", "[", "evaluate", "RUN"),
    "data pack: size 1e20": lambda at: pack(at, "--size", E20),
    "data pack: workers 1e9": lambda at: pack(at, "--size", "8", "--workers", "1000000000"),
    **{f"data get: {url}": address(url) for url in ("http://[::1", "file:///dev/zero", "http://127.0.0.1:1/a\nb")},
    **{f"pack.json = {name}": manifest(text) for name, text in RECORDS.items() if isinstance(text, str)},
    "sweep: seeds huge": plain("sweep", "digits/simsiam/lump", "--out", "AT/s", "--seeds", HUGE),
    "sweep: results {}": sweep_of("{}"),
    "sweep: results status only": sweep_of('{"schema": 2, "status": "finished"}'),
}
FINE: dict[str, Row] = {  # odd, and rightly accepted
    "train: out rich closing tag": lambda at: ["train", "--out", str(at / "[/a]"), *QUICK],
    "train: out nonutf8": lambda at: ["train", "--out", str(at / os.fsdecode(b"caf\xff")), *QUICK],
    "data pack: non-utf8 class": lambda at: pack(at, "--size", "8", classes=(b"caf\xff", b"\x1b[31mred")),
    "data pack: non-utf8 broken file skip": foreign_file,
    "report: gallery.json = []": damaged("gallery.json", "[]", *READERS["report"]),
    "report: gallery.json deep": damaged("gallery.json", DEEP, *READERS["report"]),
    "watch: metrics.jsonl junk": damaged("metrics.jsonl", f"\n[]\n{{}}\nnull\n{DEEP}\n", *READERS["watch"], run="half"),
}


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


def sentences(text: str) -> list[str]:
    """The lines on stderr but progress bars and notes."""
    return [line for line in text.splitlines() if line.startswith("ptlf: ") and "warning: " not in line]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_refused_in_one_sentence(row: str, place: Path) -> None:
    words = ROWS[row](place)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    (sentence,) = sentences(run_cli(*words, code=2).err)
    assert len(sentence) < 700
    assert sentence.isprintable()
    left = sorted(path.relative_to(place) for path in place.rglob("*") if not path.name.endswith(".damaged"))
    assert set(left) - set(before) <= {Path("data"), Path("half/.lock"), Path("data/.downloads")}


@pytest.mark.parametrize("row", FINE, ids=str)
def test_rightly_accepted(row: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = FINE[row](place)
    assert main(words) == 0
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
    server: str, path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptlf.stream.fetch.MAX_BYTES", 1_000_000)
    (sentence,) = sentences(run_cli(*address(server + path)(tmp_path), code=2).err)
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
    words = [sys.executable, "-c", LIMITED, *pack(tmp_path, "--size", "8", "--workers", "1")]
    Image.new("1", (13_300, 13_300)).save(tmp_path / "images" / "a" / "bomb.png")
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "[2, 0]" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("bomb.png") == done.stderr.count("too many pixels for the memory of this machine") == 2
