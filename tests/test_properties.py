"""Whatever is typed, written or damaged: a command ends with 0, or with 2, one sentence and all files as they were.

Hypothesis makes the inputs: words of the command line, YAML, records of a run, and damage to files. The profile `ci`
makes the same ones every time; HYPOTHESIS_PROFILE=long makes more, and others each time.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import StopsAt, run_cli
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from PIL import Image

from ptlf.core.settings import describe
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.training.checkpoint import HostCopy, encode, first_line, read_checkpoint

pytestmark = pytest.mark.slow
SECONDS = 120  # an example that takes longer hangs
CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
settings.register_profile("long", deadline=None, database=None, suppress_health_check=CHECKS, phases=[Phase.generate])
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def examples(number: int) -> settings:
    """That many in the profile `ci`, ten times as many in `long`."""
    return settings(max_examples=number if PROFILE == "ci" else 10 * number)


SMALL = [
    "--stream.groups", "[[0, 1], [2, 3]]", "--stream.per_class", "6", "--training.epochs", "1", "--training.batch", "8",
    "--device", "cpu", "--encoder.width", "4", "--objective.projection", "8", "--objective.bottleneck", "4",
    "--probes.knn_class.k", "3", "--memory.size", "4", "--evaluation.gallery", "false",
]  # fmt: skip
SWEPT = "sweep/digits-simsiam-ptlf-seed0"
QUICK = ["--recipe", "digits/simsiam/ptlf", *SMALL]

# Inputs. Numbers are small or absurd: what is large, allowed and slow is not a fault.
ABOUT = {name: (default, about) for name, default, about in describe(Config) if name != "recipe"}
KEYS = list(ABOUT)
NAMES = [
    "digits", "folder", "arriving", "resnet18-mini", "simsiam", "vicreg", "byol", "supervised", "lump", "der", "pnn",
    "cassle", "multitask", "correlation", "cost_aware", "none", "sgd", "lars", "adamw", "constant", "cosine", "auto",
    "cpu", "cuda", "cuda:99", "natural", "seeded", "drop", "bf16", "last:2", "sample:1", "os:abort", "json:loads",
    "torch.nn:Identity", "eager", "compiled", "lump-barlow", "given", "hf:nowhere", "timm:nothing", "[/a]", "\x1b[31m",
]  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([10**7, 2**31, 2**63, 2**64, 10**20, 10**400, -(10**20)]),
    st.sampled_from([0.0, 0.5, 1.0, -0.1, 1e-300, 1e-9, 1e9, 1e300, float("inf"), float("-inf"), float("nan")]),
)
SCALARS = st.one_of(NUMBERS, st.booleans(), st.none(), st.sampled_from(NAMES), st.text(max_size=12))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=6)), inner)
    ),
    max_leaves=6,
)
ODD = st.sampled_from([None, True, -1, 0, 10**30, 1e300, "", "x", "[/a]", [], {}, [[]], {"a": 1}, [None], ["x", 1]])


def word(value: Any) -> str:
    """As it would be typed: flow YAML, or text as it is."""
    if isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):  # of integers with hundreds of digits
        return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    return "9" * 500


def plausible(key: str) -> st.SearchStrategy[Any]:
    """Values of the type of the key's default; of choices, one of them."""
    default, about = ABOUT[key]
    value = yaml.safe_load(default) if default else None
    if choices := re.search(r"\[([^]]+)\]$", about):
        return st.sampled_from(choices[1].split(", "))
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(1, 9)
    return st.floats(0, 1) if isinstance(value, float) else st.one_of(st.none(), st.sampled_from(NAMES), NUMBERS)


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """Up to three settings, mostly such as somebody might try."""
    words: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(KEYS))
        if draw(st.integers(0, 3)) > 0:
            text = word(draw(plausible(name)))
        else:
            name = draw(st.one_of(st.just(name), st.text(max_size=8)))
            text = word(draw(st.one_of(SCALARS, VALUES)))
        words += [f"--{name}={text}"] if draw(st.booleans()) else [f"--{name}", text]
    return words


@st.composite
def yaml_files(draw: st.DrawFn) -> bytes:
    """Settings with some of them odd, or anything."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(lambda text: text.encode())))
    values: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(KEYS), max_size=4)):
        inner = values
        *sections, last = name.split(".")
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner.get(section, {}), dict) else {}
        inner[last] = draw(VALUES)
    if draw(st.booleans()):
        values[draw(st.sampled_from(["recipe", "stream", "training", "probes", "encoder", "x"]))] = draw(VALUES)
    try:
        return yaml.safe_dump(values).encode()
    except (yaml.YAMLError, ValueError):
        return b"seed: " + b"9" * 500


def changed(tree: Any, draw: st.DrawFn, other: st.SearchStrategy[Any]) -> Any:
    """The tree with one value removed or replaced. A place is found level by level, so that shallow ones are likely."""
    path: tuple[Any, ...] = ()
    inner = tree
    while isinstance(inner, dict | list) and inner and (not path or draw(st.integers(0, 3)) > 0):
        keys = list(inner) if isinstance(inner, dict) else list(range(min(3, len(inner))))
        path = (*path, draw(st.sampled_from(keys)))
        inner = inner[path[-1]]
    if not path:
        return draw(other)
    tree = copy.deepcopy(tree)
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    if draw(st.integers(0, 3)) == 0:
        del holder[path[-1]]
    else:
        holder[path[-1]] = draw(other)
    event(f"changed {'.'.join(str(key) for key in path[:1])}")
    return tree


def damage_bytes(content: bytes, draw: st.DrawFn) -> bytes:
    how = draw(st.sampled_from(["truncate", "flip", "insert", "replace"]))
    place = draw(st.integers(0, max(0, len(content) - 1)))
    if how == "truncate":
        return content[:place]
    if how == "flip":
        bit = 1 << draw(st.integers(0, 7))
        return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :] if content else b"\0"
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]
    whole = [b"", b"[]", b"{}", b"null", b'"x"', b"0", b"\xff\xfe", b"[" * 5000, b"{" * 50, b"NaN", b"- a\n- b\n"]
    return draw(st.sampled_from(whole))


def damage_text(file: Path, draw: st.DrawFn) -> bytes:
    """Another content of a file of JSON, JSON lines or YAML, mostly one that can still be parsed."""
    content = file.read_bytes()
    if draw(st.integers(0, 3)) == 0:
        return damage_bytes(content, draw)
    if file.suffix == ".json":
        return json.dumps(changed(json.loads(content), draw, ODD)).encode()
    if file.suffix == ".yaml":
        return yaml.safe_dump(changed(yaml.safe_load(content), draw, st.one_of(ODD, SCALARS))).encode()
    lines = [json.loads(line) for line in content.splitlines()]
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = changed(lines[place], draw, ODD)
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def damage_checkpoint(file: Path, draw: st.DrawFn) -> bytes:
    """With a right checksum and another content, or damaged as any file."""
    if draw(st.integers(0, 3)) == 0:
        return damage_bytes(file.read_bytes(), draw)
    tensors = st.sampled_from([torch.zeros(0), torch.zeros(3), torch.full((2, 2), torch.nan), torch.zeros(1).long()])
    state = changed(read_checkpoint(file), draw, st.one_of(ODD, tensors))
    try:
        data = encode(HostCopy(state))
        return first_line(data) + data
    except (TypeError, ValueError, AttributeError):  # no state that could be stored
        assume(False)
        raise


# What is run, and asserted.


class Hangs(Exception):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hangs(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files, but for locks and for what was set aside as damaged."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.endswith((".lock", ".damaged")):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def check(words: list[str], folder: Path) -> int:
    """Run the command: 0, or 2 with one sentence and the files in `folder` as they were."""
    before = contents(folder)
    with limited(SECONDS):
        code, _, err = run_cli(*words, code=None)
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err
    if code == 2:
        sentences = [line for line in err.splitlines() if line.startswith("ptlf: ") and "warning: " not in line]
        assert len(sentences) == 1, err
        assert not {unicodedata.category(character) for character in sentences[0]} & {"Cc", "Cs", "Zl", "Zp"}
        after = contents(folder)
        kept = {name for name in before if "checkpoints/" not in name or name in after}  # a damaged one is renamed
        assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}, "files changed"
        assert set(after) <= set(before), "files were left"
    event(f"exit code {code}")
    return code


@contextlib.contextmanager
def copied(source: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "at"
        shutil.copytree(source, folder)
        yield folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in `done`, a stopped one in `half`, one that learnt a task in `grows`, images in `photos`, packed
    in `data/set`; a sweep with the finished run in `sweep`."""
    at = tmp_path_factory.mktemp("made")
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (at / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = random.integers(0, 256, (10, 14, 3), np.uint8)
            Image.fromarray(pixels).save(at / "photos" / name / f"{number}.png")
    run_cli("train", "--out", at / "done", *QUICK, "--evaluation.gallery", "true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.commands.train.Live", lambda name: StopsAt(3))
        steps = ["--checkpoint.every_steps", "1"]
        run_cli("train", "--out", at / "half", *QUICK, *steps, code=128 + signal.SIGTERM)
    pack = ["data", "pack", at / "photos", "--name", "set", "--size", "8", "--data-root", at / "data"]
    run_cli(*pack, "--test-fraction", "0.34")
    learn = ["--size", "8", "--recipe", "arriving/simsiam/ptlf", "--encoder", "resnet18-mini", *SMALL[4:]]
    run_cli("learn", at / "grows", at / "photos" / "a", *learn)
    shutil.copytree(at / "done", at / SWEPT)
    return at


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a run its page takes long; `report` is tried for itself."""
    monkeypatch.setattr("ptlf.commands.train.write_page", lambda *words: None)


@contextlib.contextmanager
def only_built() -> Iterator[None]:
    """Runs are made with all that is checked then, and not trained."""

    def build(folder: Path, config: Config, **how: Any) -> None:
        Run(config, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptlf.commands.train.train_in", build)
        yield


@examples(100)
@given(words=overrides())
def test_settings(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, only_built():
        check(["train", "--out", f"{name}/out", *QUICK, *words], Path(name))


@examples(20)
@given(words=overrides())
def test_settings_of_runs(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        if check(["train", "--out", f"{name}/out", *QUICK, *words], Path(name)) == 0:
            assert json.loads(Path(name, "out", "results.json").read_text())["status"] == "finished"


@examples(100)
@given(content=yaml_files())
def test_yaml(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name, only_built():
        file = Path(name) / "c.yaml"
        file.write_bytes(content)
        check(["train", "--out", f"{name}/out", "-c", str(file), *SMALL], Path(name))


Command = Callable[[Path], list[str]]
COMMANDS: dict[str, tuple[str, Command]] = {  # the folder whose files are damaged, and the words
    "resume": ("half", lambda at: ["train", "--resume", str(at / "half")]),
    "resume finished": ("done", lambda at: ["train", "--resume", str(at / "done")]),
    "evaluate": ("done", lambda at: ["evaluate", str(at / "done")]),
    "report": ("done", lambda at: ["report", str(at / "done"), "--out", str(at / "page.html")]),
    "watch": ("half", lambda at: ["watch", str(at / "half"), "--once"]),
    "watch finished": ("done", lambda at: ["watch", str(at / "done"), "--once"]),
    "sweep": (SWEPT, lambda at: ["sweep", "digits/simsiam/ptlf", "--out", str(at / "sweep"), *SMALL]),
    "embed": ("done", lambda at: ["embed", str(at / "done"), str(at / "photos"), "--out", str(at / "f.npz")]),
    "embed grown": ("grows", lambda at: ["embed", str(at / "grows"), str(at / "photos"), "--out", str(at / "f.npz")]),
    "learn": ("grows", lambda at: ["learn", str(at / "grows"), str(at / "photos" / "b")]),
    "data verify": ("data/set", lambda at: ["data", "verify", "--data-root", str(at / "data")]),
    "data list": ("data/set", lambda at: ["data", "list", "--data-root", str(at / "data")]),
    "train on a set": ("data/set", lambda at: [
        "train", "--recipe", "folder/simsiam/lump", "--stream.pack", "set", "--data-root", str(at / "data"),
        "--out", str(at / "out"), *SMALL[4:]]),
}  # fmt: skip


@examples(150)
@given(data=st.data())
def test_damaged_files(made: Path, data: st.DataObject) -> None:
    place, command = COMMANDS[data.draw(st.sampled_from(sorted(COMMANDS)), label="command")]
    with copied(made) as at:
        inside = sorted(path for path in (at / place).rglob("*") if path.is_file() and path.suffix not in ("", ".html"))
        groups = sorted({path.suffix for path in inside})
        suffix = data.draw(st.sampled_from(groups), label="kind")
        file = data.draw(st.sampled_from([path for path in inside if path.suffix == suffix]), label="file")
        if suffix in (".json", ".jsonl", ".yaml"):
            content = damage_text(file, data.draw)
        else:
            content = (damage_checkpoint if suffix == ".ckpt" else damage_bytes_of)(file, data.draw)
        event(f"{place} {suffix}")
        file.write_bytes(content)
        check(command(at), at)


def damage_bytes_of(file: Path, draw: st.DrawFn) -> bytes:
    return damage_bytes(file.read_bytes(), draw)
