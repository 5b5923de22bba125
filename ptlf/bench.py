"""Benchmarks: what freezing saves, measured beside nothing frozen in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from ptlf.config import Config
from ptlf.freezing import Freezer, Unit, find_units
from ptlf.freezing.policies import measure_savings, synchronise
from ptlf.pipeline import Run
from ptlf.stream import Dataset, Images, Stream, Task
from ptlf.training.cost import backward_flops, kept_bytes, peak_memory_bytes, reset_peak_memory
from ptlf.training.engine import CapturedEngine

Loss = Callable[[], torch.Tensor]


def freezing(encoder: nn.Module, batch: int, size: int, device: torch.device, repeats: int = 5) -> list[dict[str, Any]]:
    """A row per way of freezing: bytes kept for backward, backward FLOPs, seconds of forward and backward.

    The input needs no gradient, as in training; every ratio is to nothing frozen, measured before and after the others.
    """
    encoder = encoder.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    units = find_units(encoder, images[:2])
    rows = []
    for name, chosen in frozen_sets(encoder, units, images[:2]).items():
        for way in ("plain", "ours") if chosen else ("plain",):
            freezer = Freezer(encoder, units=units, example=images[:2], save_memory=way == "ours")
            freezer.freeze(chosen)
            figures = measure(encoder, images, freezer, repeats)
            freezer.thaw()
            label = way if chosen else ""
            rows.append({"frozen": name, "way": label, "units": chosen, **figures})
    base = rows[0]
    for row in rows:
        row |= {f"{key}_ratio": row[key] / base[key] for key in ("kept_bytes", "backward_flops", "seconds")}
    return rows


def frozen_sets(encoder: nn.Module, units: Sequence[Unit], example: torch.Tensor) -> dict[str, list[str]]:
    """Nothing; the middle 40 % of the units; the 40 % whose weight gradients cost most, the first unit left trainable
    (so that every input gradient is still needed); the first 40 %."""
    names = [unit.name for unit in units]
    count = max(1, int(0.4 * len(names)))
    start = (len(names) - count) // 2
    savings = measure_savings(encoder, units, example)
    heaviest = sorted(names[1:], key=lambda name: (-savings[name].weight_cost, -savings[name].bytes))[:count]
    return {
        "nothing": [],
        f"middle {count}": names[start : start + count],
        f"heaviest {count}": [name for name in names if name in heaviest],
        f"prefix of {count}": names[:count],
    }


def measure(encoder: nn.Module, images: torch.Tensor, freezer: Freezer, repeats: int) -> dict[str, Any]:
    def loss() -> torch.Tensor:
        return encoder(images).square().mean()

    held = [*encoder.parameters(), *encoder.buffers(), *freezer.folded]
    kept = kept_bytes(loss, exclude=held)
    flops = backward_flops(loss())
    reset_peak_memory(images.device)
    seconds = [timed(loss, images.device) for _ in range(repeats + 1)][1:]  # the first one warms up
    encoder.zero_grad(set_to_none=True)
    return {
        "kept_bytes": kept,
        "backward_flops": flops,
        "seconds": statistics.median(seconds),
        "peak_memory_bytes": peak_memory_bytes(images.device),
    }


def timed(loss: Loss, device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    loss().backward()
    synchronise(device)
    return time.perf_counter() - started


def random_stream(size: int, images: int, file: Path | None = None) -> Stream:
    """Noise in place of images, in memory or in a file: the time of a step does not depend on what they show."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, size, size, 3), dtype=np.uint8)
    if file:
        np.save(file, pixels)
        pixels = np.load(file, mmap_mode="r")
    data = Dataset("noise", ("noise",), Images(pixels, np.zeros(images, np.int64)), None)
    return Stream("noise", data, (Task("noise", np.arange(images)),), (), None)


def step(
    config: Config,
    size: int,
    steps: int,
    stages: Sequence[int],
    *,
    save_memory: bool = True,
    streamed: bool = False,
    traces: Path | None = None,
) -> list[dict[str, Any]]:
    """A row per stage of freezing (that many units around the middle, frozen one after the other): milliseconds of a
    step with everything in it, and its memory. Timed after warming up, over `steps` steps, the device synchronised.

    streamed: the images are read ahead from a file, not held on the device.
    traces: a folder for a trace of each stage; the rows then also have the kernels that took the most time.
    """
    config.freezing.save_memory = save_memory
    config.stream.resident = False if streamed else config.stream.resident
    with TemporaryDirectory() as folder:  # the run holds the file open
        file = Path(folder) / "noise.npy" if streamed else None
        run = Run(config, stream=random_stream(size, 4 * config.training.batch, file))
    names = [unit.name for unit in run.freezing.freezer.units]
    middle = sorted(names, key=lambda name: abs(names.index(name) - (len(names) - 1) / 2))
    rows = []
    for frozen in stages:
        run.freezing.freezer.thaw()
        run.freezing.freezer.freeze(middle[:frozen])
        trace = traces / f"frozen-{frozen}.json.gz" if traces else None
        rows.append({"frozen": frozen, "units": middle[:frozen], **time_steps(run, steps, trace)})
    return rows


def time_steps(run: Run, steps: int, trace: Path | None = None) -> dict[str, Any]:
    trainer, device = run.trainer, run.device
    indices = run.stream.tasks[0].train
    order = torch.from_numpy(indices).split(trainer.config.batch)
    chosen = order[0]
    cost = trainer.cost_of_step(indices, run.freezing.freezer.folded)
    trainer.model.train()

    def one() -> None:
        draws = trainer.method.draw(len(chosen))
        trainer.engine(trainer.load(chosen, trainer.random["views"], draws, next(images)))

    started = time.perf_counter()
    trainer.rebuild()
    with trainer.source.batches(cycle(order)) as images:
        for _ in range(8):
            one()
        synchronise(device)
        rebuild = time.perf_counter() - started
        seconds = per_call(one, steps, device)
        kernels = {} if trace is None else {"kernels": profile(one, trace, device)}
    alone = None
    if isinstance(trainer.engine, CapturedEngine):
        graph = trainer.engine.captured[len(chosen)].graph
        assert graph is not None
        alone = per_call(graph.replay, steps, device)
    return {
        "step_ms": 1000 * seconds,
        "device_ms": None if alone is None else 1000 * alone,
        "host_share": None if alone is None else max(0.0, 1 - alone / seconds),
        "views_per_second": len(chosen) * len(trainer.recipe) / seconds,
        "rebuild_seconds": rebuild,
        "kept_bytes": cost.kept_bytes,
        "backward_flops": round(cost.backward_flops_per_view * len(chosen) * len(trainer.recipe)),
        "peak_memory_bytes": cost.peak_memory_bytes,
        **kernels,
    }


def profile(work: Callable[[], Any], trace: Path, device: torch.device, times: int = 10) -> list[dict[str, Any]]:
    """Leave a trace of `times` calls, for chrome://tracing or Perfetto; what took the device's time, the most first."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    synchronise(device)
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(times):
            work()
        synchronise(device)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    used = []
    for event in profiler.key_averages():
        on_device = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if on_device > 0:
            used.append({"name": event.key, "calls": event.count / times, "ms": on_device / times / 1000})
    return sorted(used, key=lambda row: -row["ms"])


def per_call(work: Callable[[], Any], times: int, device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronise(device)
    return (time.perf_counter() - started) / times
