"""Whatever is typed, written or damaged: a command ends with 0, or with 2, one sentence and all files as they were.

Hypothesis makes the inputs: words of the command line, and damage to the files of a run: the same ones every
time, or with HYPOTHESIS_PROFILE=long ten times as many, and others each time.
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import StopsAt, run_cli
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from ptlf.core.settings import describe
from ptlf.run.config import Config
from ptlf.run.loop import Run

pytestmark = pytest.mark.slow
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
ways = {"phases": [Phase.generate]} if LONG else {"derandomize": True}
settings.register_profile("ours", deadline=None, database=None, suppress_health_check=CHECKS, **ways)
settings.load_profile("ours")


def examples(number: int) -> settings:
    return settings(max_examples=10 * number if LONG else number)


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


def changed(tree: Any, draw: st.DrawFn, other: st.SearchStrategy[Any]) -> Any:
    """The tree with one value removed or replaced, mostly a shallow one."""
    if not isinstance(tree, dict | list) or not tree:
        return draw(other)
    tree = copy.copy(tree)
    place = draw(st.sampled_from(list(tree) if isinstance(tree, dict) else range(min(3, len(tree)))))
    how = draw(st.sampled_from(["deeper"] * 9 + ["replace"] * 2 + ["remove"]))
    if how == "deeper" and isinstance(tree[place], dict | list):
        tree[place] = changed(tree[place], draw, other)
    elif how == "remove":
        del tree[place]
    else:
        tree[place] = draw(other)
    return tree


def damage_bytes(content: bytes, draw: st.DrawFn) -> bytes:
    place = draw(st.integers(0, max(0, len(content) - 1)))
    before, rest = content[:place], content[place:]
    inserted = draw(st.binary(min_size=1, max_size=8))
    flipped = bytes([rest[0] ^ 1 << draw(st.integers(0, 7))]) + rest[1:] if rest else b"\0"
    whole = [b"", b"[]", b"{}", b"null", b'"x"', b"0", b"\xff\xfe", b"[" * 5000, b"{" * 50, b"NaN", b"- a\n- b\n"]
    ways = [before, before + flipped, before + inserted + rest, draw(st.sampled_from(whole))]
    return draw(st.sampled_from(ways))


def damaged(file: Path, draw: st.DrawFn) -> bytes:
    """Another content; of text mostly one that can still be parsed."""
    content = file.read_bytes()
    if file.suffix not in (".json", ".jsonl", ".yaml") or draw(st.integers(0, 3)) == 0:
        return damage_bytes(content, draw)
    if file.suffix == ".json":
        return json.dumps(changed(json.loads(content), draw, ODD)).encode()
    if file.suffix == ".yaml":
        return yaml.safe_dump(changed(yaml.safe_load(content), draw, st.one_of(ODD, SCALARS))).encode()
    lines = [json.loads(line) for line in content.splitlines()]
    return "".join(json.dumps(line) + "\n" for line in changed(lines, draw, ODD) or []).encode()


# What is run, and asserted.


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files, but for locks and for what was set aside as damaged."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".damaged")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check(words: list[str], folder: Path) -> int:
    """Run the command: 0, or 2 with one sentence and the files in `folder` as they were."""
    before = contents(folder)
    code, _, err = run_cli(*words, code=None)
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err
    if code == 2:
        sentences = [line for line in err.splitlines() if line.startswith("ptlf: ") and "warning: " not in line]
        assert len(sentences) == 1, err
        assert not {unicodedata.category(character) for character in sentences[0]} & {"Cc", "Cs", "Zl", "Zp"}
        after = contents(folder)
        assert after.items() <= before.items(), "files changed or were left"
        lost = before.keys() - after.keys()
        assert all("checkpoints/" in name for name in lost), "files were removed"  # a damaged checkpoint is renamed
    return code


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


COMMANDS = [  # the folder whose files are damaged, and the words, among folders
    ("half", "train --resume half"),
    ("done", "train --resume done"),
    ("done", "evaluate done"),
    ("done", "report done --out page.html"),
    ("half", "watch half --once"),
    ("done", "watch done --once"),
    (SWEPT, f"sweep digits/simsiam/ptlf --out sweep {shlex.join(SMALL)}"),
    ("done", "embed done photos --out f.npz"),
    ("grows", "embed grows photos --out f.npz"),
    ("grows", "learn grows photos/b"),
    ("data/set", "data verify --data-root data"),
    ("data/set", "data list --data-root data"),
    ("data/set", "train --recipe folder/simsiam/lump --stream.pack set --data-root data --out out "
                 + shlex.join(SMALL[4:])),
]  # fmt: skip


@examples(150)
@given(data=st.data())
def test_damaged_files(made: Path, data: st.DataObject) -> None:
    place, words = data.draw(st.sampled_from(COMMANDS), label="command")
    with tempfile.TemporaryDirectory() as name:
        at = shutil.copytree(made, Path(name) / "at")
        inside = sorted(path for path in (at / place).rglob("*") if path.is_file() and path.suffix not in ("", ".html"))
        suffix = data.draw(st.sampled_from(sorted({path.suffix for path in inside})), label="kind")
        file = data.draw(st.sampled_from([path for path in inside if path.suffix == suffix]), label="file")
        file.write_bytes(damaged(file, data.draw))
        with contextlib.chdir(at):
            check(shlex.split(words), Path())
