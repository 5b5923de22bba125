"""Benchmarks: what freezing saves, measured beside nothing frozen in the same run."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from ptlf.core.errors import UserError
from ptlf.core.memory import check_fits
from ptlf.encoders import feature_dim
from ptlf.freezing import Freezer, Unit, find_units
from ptlf.freezing.savings import measure_savings, wait_for
from ptlf.methods import METHODS
from ptlf.run.compat import check_comparable
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.run.results import compiling_seconds, epoch_lines, ratio_or_none
from ptlf.run.sweep import train_one_of_many
from ptlf.run.watcher import Watcher
from ptlf.stream import STREAMS, Dataset, Images, Stream, Task
from ptlf.training.cost import backward_flops, kept_bytes, peak_memory_bytes, reset_peak_memory
from ptlf.training.engine import CapturedEngine

Row = dict[str, Any]  # of a table, or a whole record


def freezing(encoder: nn.Module, batch: int, size: int, device: torch.device, repeats: int = 5) -> list[Row]:
    """A row per way of freezing: bytes kept for backward, backward FLOPs, seconds of forward and backward.

    The input needs no gradient, as in training; every ratio is to nothing frozen, measured first.
    """
    check_fits(f"{batch} images of {size} px (--batch and --size)", 12 * batch * size**2, device)
    encoder = encoder.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device, generator=torch.Generator(device).manual_seed(0))
    try:
        if not any(True for _ in encoder.parameters()):
            raise ValueError("it has no parameters")
        feature_dim(encoder, size)
        units = find_units(encoder, images[:2])
        if not units:
            raise ValueError("it has no convolution or linear layer that could freeze")
    except (RuntimeError, ValueError, AssertionError, TypeError, StopIteration) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the encoder does not take images of {size} px, or cannot freeze: {reason}") from None
    rows = []
    for name, chosen in frozen_sets(encoder, units, images[:2]).items():
        for way in ("plain", "ours") if chosen else ("",):
            freezer = Freezer(encoder, units=units, example=images[:2], save_memory=way == "ours")
            freezer.freeze(chosen)
            rows.append({"frozen": name, "way": way, "units": chosen, **measure(encoder, images, freezer, repeats)})
            freezer.thaw()
    for row in rows:
        row |= {f"{key}_ratio": row[key] / rows[0][key] for key in ("kept_bytes", "backward_flops", "seconds")}
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


def measure(encoder: nn.Module, images: torch.Tensor, freezer: Freezer, repeats: int) -> Row:
    def loss() -> torch.Tensor:
        return encoder(images).square().mean()

    kept = kept_bytes(loss, exclude=[*encoder.parameters(), *encoder.buffers(), *freezer.folded])
    flops = backward_flops(loss())
    reset_peak_memory(images.device)
    timed = [per_call(lambda: loss().backward(), 1, images.device) for _ in range(repeats + 1)]
    encoder.zero_grad(set_to_none=True)
    seconds, peak = statistics.median(timed[1:]), peak_memory_bytes(images.device)  # the first call warms up
    return {"kept_bytes": kept, "backward_flops": flops, "seconds": seconds, "peak_memory_bytes": peak}


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


def step(
    config: Config, size: int, steps: int, stages: list[int], first: bool, streamed: bool, profile: Path | None
) -> list[Row]:
    """A row per stage of freezing (that many units around the middle, frozen one after the other): milliseconds of a
    step with everything in it, and its memory. Timed after warming up, over `steps` steps, the device synchronised;
    the spread is half of what lies between the fastest and the slowest fifth of them.

    first: the units nearest to the input instead, so that no gradient has to pass them.
    streamed: the images are read ahead from a file, not held on the device.
    profile: a folder for a trace of each stage; the rows then also have the kernels that took the most time.
    """
    config.stream.resident = False if streamed else config.stream.resident
    with TemporaryDirectory() as folder:
        file = Path(folder) / "noise.npy" if streamed else None
        run = Run(config, stream=noise_for(config, 4 * config.training.batch, size, 1, file))
        run.trainer.sources(run.trainer.images)  # opens the file, and holds it open
    names = [unit.name for unit in run.freezing.freezer.units]
    for frozen in stages:
        if not 0 <= frozen <= len(names):
            raise UserError(f"--stages names {frozen} frozen units, but {config.encoder.name} has {len(names)}")
    order = names if first else sorted(names, key=lambda name: abs(names.index(name) - (len(names) - 1) / 2))
    rows = []
    for frozen in stages:
        run.freezing.freezer.thaw()
        run.freezing.freezer.freeze(order[:frozen])
        trace = profile / f"frozen-{frozen}.json.gz" if profile else None
        rows.append({"frozen": frozen, "units": order[:frozen], **time_steps(run, steps, trace)})
    return rows


def methods(configs: Sequence[Config], size: int, steps: int, task: int) -> list[Row]:
    """A row per configuration: a whole step in task number `task` (from 1) with nothing frozen, timed as in `step`. A
    method that learns all tasks at once has only one."""
    rows = []
    for config in configs:
        gc.collect()  # the run before is in reference cycles
        run = Run(config, stream=noise_for(config, 4 * task * config.training.batch, size, task))
        for index in range(len(run.stream.tasks)):
            if index > 0:
                run.method.end_task(index - 1, run.model)
            run.method.begin_task(index, run.model)
        rows.append({"recipe": config.recipe, "task": task, **time_steps(run, steps)})
    return rows


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


def check_tasks(counts: Sequence[int]) -> None:
    if len(set(counts)) > 1:
        listed = ", ".join(map(str, counts))
        raise UserError(f"the runs have {listed} tasks; only runs with the same number of tasks can be compared")


def warm_up(config: Config, stream: Stream, batches: int = 8) -> None:
    """A short run, thrown away: one epoch of a few batches and an epoch's last one, of the first two tasks, with all
    frozen that will be, and tested too. Imports, the CUDA context and the compiler's work are then paid for."""
    gc.collect()  # the one before: a run refers to itself, and would hold its memory
    size = config.training.batch
    tasks = tuple(replace(t, train=t.train[: batches * size + len(t.train) % size]) for t in stream.tasks[:2])
    eval_splits = tuple(split for split in stream.eval_splits if split.since < 2)
    short = replace(config, training=replace(config.training, epochs=1, warmup=0))
    Run(short, stream=replace(stream, tasks=tasks, eval_splits=eval_splits)).train()


def timed_run(config: Config, stream: Stream, out: Path | None, watcher: Watcher) -> Row:
    """What `results.json` holds, with the seconds of it all and the share of a step that the GPU waits for the host,
    None where no step is captured."""
    gc.collect()  # the run before: its tensors would count in this one's peak memory
    started = time.perf_counter()
    run = Run(config, out, stream=stream)
    advice = f"resume it with `ptlf train --resume {out}`; `ptlf bench run --from` compares runs that are finished"
    results = train_one_of_many(run, watcher, advice)
    seconds, share = time.perf_counter() - started, None
    if isinstance(run.trainer.engine, CapturedEngine):
        if run.freezing.log:  # as it was at the end
            run.freezing.freezer.freeze(run.freezing.log[-1]["order"])
        share = time_steps(run, 100)["host_share"]
    return {**results, "wall_seconds": seconds, "host_share": share}


def compare(results: Sequence[Row]) -> Row:
    """What `results.json` of each run comes to beside the first one's: the step by freeze stage, and the overheads.

    A stage is the epochs with as many units frozen, in the first task or in those after it; its ratios are to the
    first run's epochs of the same tasks. Ratios of seconds leave the wait for the compiler out. What a record does not
    hold is None.
    """
    check_tasks([len(result["tasks"]) for result in results])
    check_comparable([result["config"] for result in results])
    lines, base = without_compiling(results[0]), compared_seconds(results[0])
    for result in results:
        if not {line["task"] for line in epoch_lines(result)} <= {line["task"] for line in lines}:
            raise UserError("the runs have not written down epochs of the same tasks and cannot be compared")
    runs = []
    for result in results:
        own = overheads(result)
        own |= {f"{key}_ratio": ratio_or_none(seconds, base[key]) for key, seconds in compared_seconds(result).items()}
        what = {key: result.get(key) for key in ("config", "environment", "commit")}
        name, by_stage = result["config"].get("recipe") or "run", stages(result, lines)
        runs.append({"run": name, **what, "stages": by_stage, "overheads": own})
    return {"runs": runs}


def without_compiling(result: Row) -> list[Row]:
    """The epochs with the seconds that are compared with another run's."""
    lines = epoch_lines(result)
    for line in lines[:1]:
        line["seconds"] -= compiling_seconds(result)
    return lines


def compared_seconds(result: Row) -> Row:
    """The overheads that are compared with another run's."""
    later, wall = (overheads(result)[key] for key in ("later_learning_seconds", "wall_seconds"))
    return {"later_learning_seconds": later, "wall_seconds": None if wall is None else wall - compiling_seconds(result)}


def stages(result: Row, first: list[Row]) -> list[Row]:
    """first: of the run that it is compared with, `without_compiling`."""

    def stage(pair: tuple[Row, Row]) -> tuple[bool, int]:
        return pair[0]["task"] > 1, pair[0]["frozen"]

    rows, pairs = [], zip(epoch_lines(result), without_compiling(result), strict=True)
    for (later, frozen), group in itertools.groupby(sorted(pairs, key=stage), stage):
        lines, steady = zip(*group, strict=True)
        tasks = {line["task"] for line in lines}
        own, mine, base = (figures(some) for some in (lines, steady, [one for one in first if one["task"] in tasks]))
        own |= {
            f"{key}_ratio": ratio_or_none(mine[key], base[key])
            for key in own
            if key not in ("steps", "views_per_second")
        }
        rows.append({"stage": f"{frozen} frozen" if later else "first task", "epochs": len(lines), **own})
    return rows


def figures(lines: Sequence[Row]) -> Row:
    """Of some epochs: the mean step and the median epoch's, the mean of the bytes kept, the highest peak."""
    seconds, steps = sum(line["seconds"] for line in lines), sum(line["steps"] for line in lines)
    peaks = [peak for line in lines if (peak := line.get("peak_memory_bytes")) is not None]
    return {
        "steps": steps,
        "step_ms": 1000 * seconds / steps,
        "median_step_ms": statistics.median(1000 * line["seconds"] / line["steps"] for line in lines),
        "views_per_second": sum(line["views_per_second"] * line["seconds"] for line in lines) / seconds,
        "kept_bytes": statistics.fmean(line["kept_bytes"] for line in lines),
        "peak_memory_bytes": max(peaks, default=None),
    }


def overheads(result: Row) -> Row:
    """`later` is of the tasks after the first, the ones that freezing changes."""
    cost, purposes = result["cost"], ("train", "correlation", "rebuild")
    later = [[task.get(f"{purpose}_seconds") for purpose in purposes] for task in cost["per_task"] if task["task"] > 1]
    known = bool(later) and None not in itertools.chain(*later)
    learning = sum(map(sum, later)) if known else None
    seconds = [f"{purpose}_seconds" for purpose in (*purposes, "checkpoint", "eval", "measuring")]
    accuracies = itertools.product(("knn_task", "knn_class"), ("accuracy", "forgetting"))
    return {
        **{key: cost.get(key) for key in seconds},
        "later_learning_seconds": learning,
        "later_correlation_share": ratio_or_none(sum(task[1] for task in later), learning) if known else None,
        **{key: result.get(key) for key in ("wall_seconds", "host_share")},
        **{f"{probe}_{key}": result["probes"].get(probe, {}).get(key) for probe, key in accuracies},
    }
