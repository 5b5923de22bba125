"""Runs killed at random moments and resumed until done, against the same runs left alone: `python tests/faults.py`.

Every run is a process of its own, forked from this one so that torch is imported once, and ends by SIGKILL: after some
time, or in the middle of a checkpoint's bytes, some steps later while a thread is still writing them, just before or
after its rename, before the evaluation of a task, before results.json gets its name, in a step. Then everything that
the run left must be the same, bit for bit.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import sklearn.datasets
import sklearn.manifold  # noqa: F401  imported here so that no fork has to
import torch
from conftest import tiny_config

from ptlf.cli import main
from ptlf.run.config import Config, to_yaml
from ptlf.run.evaluator import Evaluator
from ptlf.training import checkpoint
from ptlf.training.trainer import Trainer

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("digits/simsiam/lump", {"freezing__policy": "correlation", "freezing__final": 0.67}),
    ("digits/simsiam/ptlf", {"freezing__final": 0.67, "freezing__update": "per-epoch"}),
    ("digits/mocov2plus/finetune", {"method__name": "cassle", "freezing__policy": "random"}),
    ("digits/barlow_twins/lump", {"freezing__policy": "cost_aware", "training__optimizer": "lars"}),
    ("digits/simsiam/finetune", {"method__name": "der", "freezing__policy": "correlation"}),
]


def settings(number: int, seed: int) -> Config:
    """Two tasks; with and without checkpoints inside epochs; every fifth with a gallery."""
    name, chosen = SETTINGS[number % len(SETTINGS)]
    steps, gallery = (2, 3, 0)[number % 3], number % 5 == 1
    more = {"training__epochs": 3, "training__batch": 64, "checkpoint__every_steps": steps}
    return tiny_config(name, seed=seed, evaluation__gallery=gallery, **more, **chosen)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def before_call(
    owner: Any, name: str, count: int, applies: Callable[..., bool] = lambda *a: True, late: bool = False
) -> None:
    """Die at the count-th call of owner.name to which `applies`, before it does its work or just after."""
    whole, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += applies(*args)
        last = calls[0] == count and applies(*args)
        if last and not late:
            die()
        result = whole(*args, **kwargs)
        if last:
            die()
        return result

    setattr(owner, name, wrapped)


def half_written(count: int, then: Callable[[], None]) -> None:
    """Call `then`, in the thread that writes, when half of the bytes of the count-th checkpoint are in the file."""
    whole, calls = checkpoint.write_whole, [0]

    def wrapped(path: Path, pieces: list[bytes]) -> None:
        calls[0] += 1
        whole(path, halves(b"".join(pieces)) if calls[0] == count else pieces)

    def halves(data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        then()

    checkpoint.write_whole = wrapped  # type: ignore[assignment]


def while_writing(count: int) -> None:
    """The thread that writes the count-th checkpoint waits half way. Training continues, and dies after two steps, or
    after a second where none are left."""
    half = threading.Event()

    def stop() -> None:
        half.set()
        time.sleep(1)
        die()

    half_written(count, stop)
    before_call(Trainer, "step", 2, lambda *a: half.is_set(), late=True)


def renames(count: int, end: str, late: bool = False) -> None:
    before_call(os, "replace", count, lambda source, target: str(target).endswith(end), late)


KINDS: dict[str, Callable[[int], None]] = {
    "half written": lambda count: half_written(count, die),
    "before evaluation": lambda count: before_call(Evaluator, "test_task", 1 + count % 2),
    "before rename": lambda count: renames(count, ".ckpt"),
    "in a step": lambda count: before_call(Trainer, "step", count + 3),
    "after rename": lambda count: renames(count, ".ckpt", late=True),
    "before results": lambda count: renames(1 + count % 4, "results.json"),
    "while writing": while_writing,
}
Kill = tuple[str, float]  # one of KINDS and a count, or seconds


def attempt(config: Path, folder: Path, kill: Kill | None) -> int | None:
    """One process from start to its end. Its exit code; None when it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            torch.set_num_threads(1)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            if kill and kill[0] in KINDS:
                KINDS[kill[0]](int(kill[1]))
            started = (folder / "config.yaml").exists()
            words = ["--resume", str(folder)] if started else ["-c", str(config), "--out", str(folder)]
            code = main(["train", "--trust-code", *words])
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if kill and kill[0] == "after seconds":
        time.sleep(kill[1])
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def lasting(value: Any) -> Any:
    """Without what another machine or moment would change."""
    if isinstance(value, dict):
        passing = ("seconds", "views_per_second", "peak_memory_bytes", "commit")
        return {name: lasting(part) for name, part in value.items() if not name.endswith(passing)}
    return [lasting(part) for part in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[name]) for name, part in one.items())
    return one == other


def differences(one: Path, other: Path) -> list[str]:
    """Names of what is not the same in two runs' folders."""
    found = []
    for name in ("results.json", "metrics.jsonl", "gallery.json"):
        texts = [(run / name).read_text() if (run / name).exists() else "" for run in (one, other)]
        lines = [text.splitlines() if name == "metrics.jsonl" else [text] for text in texts]
        values = [[lasting(json.loads(line)) for line in part if line] for part in lines]
        found += [name] * (values[0] != values[1])
    found += ["encoder"] * ((one / "encoder.safetensors").read_bytes() != (other / "encoder.safetensors").read_bytes())
    states = [checkpoint.read_checkpoint(run / "checkpoints" / "after-task02.ckpt") for run in (one, other)]
    for name in ("model", "method", "optimizer", "random", "freezing", "position"):
        found += [f"checkpoint {name}"] * (not same(states[0][name], states[1][name]))
    return found


def torture(number: int, seed: int, root: Path) -> bool:
    """One run left alone, one killed again and again: whether both end the same."""
    chance, file, alone, folder = random.Random(seed), root / "config.yaml", root / "alone", root / "killed"
    config = settings(number, seed)
    file.write_text(to_yaml(config))
    began = time.monotonic()
    assert attempt(file, alone, None) == 0
    seconds, kinds = time.monotonic() - began, list(KINDS)
    kills: list[Kill] = [(kind, chance.randint(1, 5)) for kind in (kinds[number % len(kinds)], chance.choice(kinds))]
    kills += [("after seconds", chance.uniform(0, seconds)) for _ in range(chance.randint(1, 2))]
    if number % 2:
        kills.insert(0, ("after seconds", chance.uniform(0, 0.8 * seconds)))
    died = [f"{kind} {count:.3g}" for kind, count in kills if attempt(file, folder, (kind, count)) is None]
    code = attempt(file, folder, None)
    wrong = differences(alone, folder) if code == 0 else [f"exit code {code}"]
    recipe = f"{config.recipe} {config.method.name}"
    print(f"run {number}, {recipe}, killed {died}: {wrong or 'the same'}", flush=True)
    return not wrong


def torture_all(runs: int, seed: int) -> bool:
    good = []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as root:
            good.append(torture(number, seed + number, Path(root)))
    return all(good)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(not torture_all(arguments.runs, arguments.seed))
