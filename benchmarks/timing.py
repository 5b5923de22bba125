"""What the benchmarks share: noise to train on, the time and the memory of a step, the file of figures."""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptlf.core.memory import check_fits
from ptlf.methods import METHODS
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.run.results import write_json
from ptlf.stream import STREAMS, Dataset, Images, Stream, Task
from ptlf.training.cost import wait_for
from ptlf.training.engine import CapturedEngine

Row = dict[str, Any]  # of a table, or a whole record
RANGE = "±: half the range of fifths of the steps"


def noise_for(config: Config, images: int, size: int, tasks: int | None = None, file: Path | None = None) -> Stream:
    """Noise of `size` px, in memory or in a file, in as many tasks as the configuration has, with nothing to test on:
    the time of a step does not depend on what the images show."""
    check_fits(f"{images} noise images of {size} px", 3 * images * size**2, hint="choose fewer or smaller ones")
    pixels = np.random.default_rng(0).integers(0, 256, (images, size, size, 3), dtype=np.uint8)
    if file:
        np.save(file, pixels)
        pixels = np.load(file, mmap_mode="r")
    data = Dataset("noise", ("noise",), Images(pixels, np.zeros(images, np.int64)), None)
    wanted = config.stream
    tasks = tasks or len(wanted.groups or ()) or wanted.tasks or STREAMS.find(wanted.name).tasks or 1
    parts = np.array_split(np.arange(images), tasks)
    stream = Stream("noise", data, tuple(Task("noise", data.train, part) for part in parts), ())
    return stream.joint() if METHODS.find(config.method.name).joint else stream


def time_steps(run: Run, steps: int, trace: Path | None = None) -> Row:
    trainer, device = run.trainer, run.device
    indices = run.stream.tasks[0].train
    chosen, *others = torch.from_numpy(indices).split(trainer.config.batch)
    order = [chosen, *(other for other in others if len(other) == len(chosen))]
    started = time.perf_counter()
    trainer.rebuild()
    cost = trainer.cost_of_step(indices)
    trainer.model.train()

    def one() -> None:
        draws = trainer.method.draw(len(chosen))
        trainer.engine(trainer.load(chosen, trainer.random["views"], draws, next(images)))

    with trainer.source.batches(itertools.cycle(order)) as images:
        per_call(one, 8, device)
        rebuild = time.perf_counter() - started
        shares = [len(share) for share in np.array_split(np.arange(steps), min(5, steps))]
        parts = [per_call(one, share, device) for share in shares]
        kernels = {} if trace is None else {"kernels": kernels_of(one, trace, device)}
    seconds, views = float(np.average(parts, weights=shares)), len(chosen) * len(trainer.view_specs)
    device_ms = host_share = None
    if isinstance(trainer.engine, CapturedEngine):
        graph = trainer.engine.captured[len(chosen)].graph
        assert graph is not None
        alone = per_call(graph.replay, steps, device)
        device_ms, host_share = 1000 * alone, max(0.0, 1 - alone / seconds)
    return {
        "step_ms": 1000 * seconds,
        "step_ms_spread": 500 * (max(parts) - min(parts)),
        "device_ms": device_ms,
        "host_share": host_share,
        "views_per_second": views / seconds,
        "rebuild_seconds": rebuild,
        "kept_bytes": cost.kept_bytes,
        "backward_flops": round(cost.backward_flops_per_view * views),
        "peak_memory_bytes": cost.peak_memory_bytes,
        **kernels,
    }


def kernels_of(work: Callable[[], Any], trace: Path, device: torch.device, times: int = 10) -> list[Row]:
    """Leave a trace of `times` calls, for chrome://tracing or Perfetto; what took the device's time, the most first."""
    with torch.profiler.profile() as profiler:
        per_call(work, times, device)
    trace.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace))
    used = []
    for event in profiler.key_averages():
        cuda = event.device_type == torch.autograd.DeviceType.CUDA
        took = event.self_device_time_total if cuda else event.self_cpu_time_total
        if cuda is (device.type == "cuda") and took > 0:
            used.append({"name": event.key, "calls": event.count / times, "ms": took / times / 1000})
    return sorted(used, key=lambda row: -row["ms"])


def per_call(work: Callable[[], Any], times: int, device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - started) / times


def steps_in_task(configs: Sequence[Config], size: int, steps: int, task: int) -> list[Row]:
    """A row per configuration: a whole step in task number `task` (from 1) with nothing frozen, timed as in `step`. A
    method that learns all tasks at once has only one."""
    rows = []
    for config in configs:
        gc.collect()  # the run before is in reference cycles
        run = Run(config, stream=noise_for(config, 4 * task * config.training.batch, size, task))
        for index in range(len(run.stream.tasks)):
            if index > 0:
                run.method.end_task(index - 1, run.model)
            run.method.begin_task(index, run.model, steps)
        rows.append({"recipe": config.recipe, "task": task, **time_steps(run, steps)})
    return rows


def save_rows(json: Path | None, **values: Any) -> None:
    if json:
        write_json(json, values)
