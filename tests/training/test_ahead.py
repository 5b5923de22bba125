"""Kernels compiled before the first step: which they are, who compiles them, and that the step finds them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

from ptlf.objectives import objective
from ptlf.run.loop import Run
from ptlf.training import ahead, fused_heads, fused_resnet, triton_views
from ptlf.training.fast_parts import FastParts
from ptlf.views import apply_view

CASES = [("simsiam", "lump", {}), ("barlow_twins", "finetune", {"objective__projection": 16}), ("byol", "finetune", {})]


class AsOnAGPU(FastParts):
    def encode(self, encoder, images):
        return fused_resnet.forward(encoder, images)

    def __call__(self, function, *arguments):
        if function is apply_view:
            return triton_views.apply_view(*arguments, channels_last=self.channels_last)
        with objective.through(fused_heads):
            return function(*arguments)


def small_run(tiny, name: str, method: str, settings: dict[str, Any]) -> Run:
    common = {"encoder__name": "conftest:tiny_resnet", "stream__per_class": 9, "training__batch": 8, "memory__size": 24}
    return Run(tiny(f"digits/{name}/finetune", method__name=method, evaluation__enabled=False, **common, **settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels of a step on a CPU, in Triton's interpreter")
@pytest.mark.parametrize(("name", "method", "settings"), CASES, ids=lambda case: str(case) if case else "")
def test_the_rehearsal_launches_what_a_step_launches(tiny, monkeypatch, name, method, settings) -> None:
    run = small_run(tiny, name, method, settings)
    trainer = run.trainer
    trainer.model.accelerator, trainer.engine_kind = AsOnAGPU(8), "captured"
    if trainer.method.memory is not None:
        trainer.method.memory.accelerator = trainer.model.accelerator
    launched: set[Any] = set()
    real = KernelInterface.__getitem__

    def launcher(kernel, grid, *, runs: bool = True):
        def call(*arguments, **named):
            launched.add((kernel.__name__, *map(ahead.specialised, arguments), *named.items()))
            return real(kernel, grid)(*arguments, **named) if runs else None

        return call

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    indices = run.stream.tasks[0].train  # 18 images: two batches of 8, and one of 2
    first = run.stream.tasks[1].train if len(run.stream.tasks) > 1 else indices
    trainer.method.begin_task(0, trainer.model)
    sizes = trainer.batch_sizes(len(indices))
    assert sizes == [8, 2]
    for size in sizes:
        for _ in range(2):  # the second replays images of the first
            chosen = torch.from_numpy(first[:size])
            drawn = trainer.method.draw(size)
            trainer.step(trainer.load(chosen, torch.Generator().manual_seed(0), drawn))
    in_steps = launched.copy()
    launched.clear()
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: launcher(kernel, grid, runs=False))
    ahead.rehearse(trainer, sizes)
    assert len({kernel for kernel, *_ in in_steps}) >= 8
    assert launched == in_steps


SHARES = """
import sys
import torch
from triton import knobs
from ptlf.training import ahead, triton_bn, triton_pool, triton_stem

def rehearsal():
    for channels in (8, 64):
        x = torch.empty(16, channels, 4, 4, device="meta")
        for _ in range(2):
            triton_bn.pack(x)
            triton_stem.patches(torch.empty(16, 3, 4, 4, device="meta"), torch.bfloat16)
        triton_pool.pool(x)

knobs.compilation.listener = lambda *, src, cache_hit, **rest: print(src.name, cache_hit)
ahead.compile_share(rehearsal, 90, *map(int, sys.argv[1:]))
"""


def test_shares_together_are_all_kernels(tmp_path) -> None:
    """Compiled for a GPU that need not be there, and found in the cache afterwards."""

    def compiled(mine: int, count: int) -> list[tuple[str, str]]:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-c", SHARES, str(mine), str(count)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [tuple(line.split()) for line in done.stdout.splitlines()]

    shares = [compiled(0, 2), compiled(1, 2)]
    assert [len(share) for share in shares] == [2, 2]
    assert {hit for share in shares for _, hit in share} == {"False"}
    assert sorted(name for share in shares for name, _ in share) == ["_pack", "_patches", "_pool", "_pool"]
    assert sorted(compiled(0, 1)) == [("_pack", "True"), ("_patches", "True"), ("_pool", "True"), ("_pool", "True")]


def test_only_a_captured_step_of_one_process_is_rehearsed(tiny, monkeypatch) -> None:
    started: list[int] = []

    class Started:
        def __init__(self, args, **rest) -> None:
            started.append(args[2])

        def start(self) -> None:
            pass

    monkeypatch.setattr(ahead.multiprocessing.get_context("fork"), "Process", Started)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(ahead.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ahead, "_begun", set())
    trainer = small_run(tiny, "simsiam", "finetune", {}).trainer
    started.clear()
    ahead._begun.clear()
    trainer.engine_kind = "eager"
    ahead.compile_ahead(trainer, 18)
    trainer.engine_kind = "captured"
    with monkeypatch.context() as patch:
        patch.setattr(ahead.processes, "joined", lambda: True)
        ahead.compile_ahead(trainer, 18)
    assert started == []
    ahead.compile_ahead(trainer, 18)
    assert started == [0, 1, 2]
    ahead.compile_ahead(trainer, 18)  # the same step again
    assert started == [0, 1, 2]
    ahead.compile_ahead(trainer, 16)  # without a smaller last batch: another step
    assert started == [0, 1, 2, 0, 1, 2]


def test_what_fails_in_a_child_is_not_told(capfd) -> None:
    """Nor does it touch its parent."""

    def fails() -> None:
        raise RuntimeError("no")

    child = multiprocessing.get_context("fork").Process(target=ahead._work, args=(fails, 90, 0, 1))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert capfd.readouterr() == ("", "")


def test_no_process_left_is_no_error(tiny, monkeypatch) -> None:
    def refuse() -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(ahead.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: range(4))
    trainer = small_run(tiny, "simsiam", "finetune", {}).trainer
    trainer.engine_kind = "captured"
    monkeypatch.setattr(ahead, "_begun", set())
    monkeypatch.setattr(ahead.os, "fork", refuse)
    ahead.compile_ahead(trainer, 18)
    assert len(ahead._begun) == 1


def test_a_child_ends_when_told_and_holds_no_file(tmp_path) -> None:
    """Whatever its parent does with the signal."""
    begun = tmp_path / "begun"

    def hangs() -> None:
        for file in (kept, log):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(file)
        begun.write_text("")
        time.sleep(60)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        kept, log = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("lock", "log"))
        child = multiprocessing.get_context("fork").Process(target=ahead._work, args=(hangs, 90, 0, 1), daemon=True)
        child.start()
        while not begun.exists() and child.is_alive():
            time.sleep(0.01)
        child.terminate()
        child.join(30)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(kept)
        os.close(log)
    assert begun.exists()
    assert child.exitcode == -signal.SIGTERM


FIRST_STEP = """
import multiprocessing
from triton import knobs
from ptlf.run import bench
from ptlf.run.loop import Run
from ptlf.run.recipes import resolve_config

config = resolve_config("split-cifar10/simsiam/lump", None, ["--training.batch", "64", "--encoder.width", "16"])
run = Run(config, stream=bench.noise_for(config, 4 * 64, 32, 1))
children = multiprocessing.active_children()
assert children
for child in children:
    child.join()
knobs.compilation.listener = lambda *, src, cache_hit, **rest: print(src.name, cache_hit)
bench.time_steps(run, 5)
"""


@pytest.mark.gpu
def test_the_first_step_compiles_nothing(tmp_path) -> None:
    """In a process of its own, with an empty cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_STEP]
    done = subprocess.run(command, env=environment, cwd=Path.cwd(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) > 20
    assert [name for name, hit in kernels if hit != "True"] == []
