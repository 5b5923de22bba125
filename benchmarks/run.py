"""Whole runs side by side in one process: the step by freeze stage, the overheads, the accuracies.

    python benchmarks/run.py --recipes split-cifar10/simsiam/lump split-cifar10/simsiam/ptlf

Ratios are to the first run. Before it, a short run of every recipe is made and thrown away (one epoch of up to 9
batches of two tasks): imports, CUDA contexts and the compiler are not charged to whoever comes first.
"""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.options import add_json, pixels, run_script, script
from benchmarks.printing import ratio_or_none, show_comparison
from benchmarks.timing import Row, noise_for, save_rows, time_steps
from ptlf.commands.parser import bounded
from ptlf.commands.train import check_alone
from ptlf.core.errors import UserError
from ptlf.core.phases import Watcher
from ptlf.core.settings import as_dict
from ptlf.report.live import Live, console, tell
from ptlf.run.build import make_stream
from ptlf.run.compat import check_comparable
from ptlf.run.config import Config
from ptlf.run.loop import Run
from ptlf.run.recipes import name_of, resolve_config
from ptlf.run.results import compiling_seconds, epoch_lines, read_results
from ptlf.run.sweep import train_one_of_many
from ptlf.stream import Stream
from ptlf.training.engine import CapturedEngine

PROGRAM = "python benchmarks/run.py"
PAIR = ("split-cifar10/simsiam/lump", "split-cifar10/simsiam/ptlf")


def main(argv: Sequence[str] | None = None) -> int:
    parser, add = script(PROGRAM, __doc__)
    add("--recipes", "default: LUMP and PTLF with SimSiam on split-cifar10", nargs="+", metavar="RECIPE")
    add("--from", "train nothing: finished runs", Path, nargs="+", dest="folders", metavar="DIR")
    add("--noise", "train on N noise images in all; nothing is tested then", bounded(int, 1, 10**9), metavar="N")
    add("--size", "side of the noise images in pixels (default: 32)", pixels)
    add("--out", "keep each run in a folder below this", Path, metavar="DIR")
    add_json(add)
    return run_script(parser, print_runs, argv)


def print_runs(folders: Sequence[Path] | None, json: Path | None, overrides: Sequence[str], **timed: Any) -> None:
    check_alone(PROGRAM)
    if folders and (named := [*(f"--{name}" for name, value in timed.items() if value), *overrides[:1]]):
        raise UserError(f"--from trains nothing; leave out {named[0]}")
    results = [read_results(path) for path in folders] if folders else timed_runs(**timed, overrides=overrides)
    for path, result in zip(folders or (), results, strict=False):
        if result["status"] != "finished":
            raise UserError(f"the run in {path} has not finished; `ptlf train --resume {path}` continues it")
    comparison = compare(results)
    show_comparison(console, comparison)
    save_rows(json, **comparison)


def timed_runs(
    recipes: Sequence[str] | None, noise: int | None, size: int | None, out: Path | None, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    if out and any(out.glob("*/config.yaml")):
        raise UserError(f"{out} already holds runs; choose another --out")
    if size and not noise:
        raise UserError("--size is of --noise images; the size of a data set's is its own")
    say = cache(tell)  # what is chosen is the same for all runs
    configs = [resolve_config(recipe, None, overrides, tell=say) for recipe in recipes or PAIR]
    check_comparable([as_dict(config) for config in configs])
    streams = [noise_for(config, noise, size or 32) if noise else make_stream(config) for config in configs]
    check_tasks([len(stream.tasks) for stream in streams])
    pairs = list(zip(configs, streams, strict=True))
    tell("warming up")
    for config, stream in pairs:
        warm_up(config, stream)
    results = []
    for number, (config, stream) in enumerate(pairs, start=1):
        name = name_of(as_dict(config))
        folder = out / f"{number}-{name.replace('/', '-')}" if out else None
        results.append(timed_run(config, stream, folder, Live(name)))
    return results


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
    advice = f"resume it with `ptlf train --resume {out}`; `{PROGRAM} --from` compares runs that are finished"
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
        alike = [one for one in first if one["task"] in tasks]
        own, mine, base = (figures(some) for some in (lines, steady, alike))
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


if __name__ == "__main__":
    sys.exit(main())
