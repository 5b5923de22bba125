"""Tiny runs in float64, alone or as one of several processes: `python worker.py FILE` saves what they came to.

In float64 a run's course does not depend on the order of sums before the ninth digit or so: what the processes take
together can be compared with one process's work to the end of a run.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import tiny_config, tiny_encoder
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ptlf import model
from ptlf.core import processes
from ptlf.methods import cassle
from ptlf.objectives import OBJECTIVES, momentum
from ptlf.run import build
from ptlf.run.loop import Run
from ptlf.run.watcher import Watcher
from ptlf.training.distributed import Parallel

COMMON: dict[str, Any] = {
    "training__epochs": 2,
    "training__batch": 128,
    "training__lr": 0.01,
    "training__last_batch": "drop",
    "freezing__policy": "correlation",
    "freezing__initial": 0.34,
    "freezing__final": 0.67,
    "freezing__batches": 1,
    "probes__linear__enabled": False,
}
prepare, measure_savings = Run.prepare, build.measure_savings
# Every objective with its distillation, and every method; the last with norms that look at their share alone.
RUNS: dict[str, dict[str, Any]] = {
    **{f"{objective} cassle": {"method__name": "cassle", "method__hidden": 32} for objective in OBJECTIVES},
    "simsiam lump": {"method__name": "lump"},
    "simsiam cost": {"method__name": "lump", "freezing__policy": "cost_aware", "freezing__policy__savings": "seconds"},
    "barlow_twins der": {"method__name": "der"},
    "simsiam pfr": {"method__name": "pfr"},
    "simclr si": {"method__name": "si"},
    "simsiam pnn": {
        "method__name": "pnn", "freezing__policy": "none", "encoder__name": "conftest:tiny_resnet",
        "training__epochs": 1,
    },
    "simsiam local": {"method__name": "cassle", "distributed__sync_batch_norm": False},
}  # fmt: skip


def encode_double(encoder: nn.Module, views: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`ptlf.encoders.encode` hands on float32."""
    return [encoder(view.double()) for view in views]


def mortal_encoder() -> nn.Module:
    """Kills the second process in its 40th forward, the first time it is started."""
    network, forwards = tiny_encoder(), itertools.count(1)

    def die(*ignored: Any) -> None:
        first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if next(forwards) == 40 and first_time and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    network[0].register_forward_pre_hook(die)
    return network


def prepare_double(run: Run, images: Tensor) -> Tensor:
    return prepare(run, images).to(next(run.model.parameters()).dtype)


def different_savings(*arguments: Any, by: str) -> dict[str, Any]:
    """Stand in for timed ones: in the second process the last unit saves what the first does elsewhere."""
    savings = measure_savings(*arguments, by="flops")
    if os.environ.get("RANK") == "1":
        return dict(zip(savings, reversed(savings.values()), strict=True))
    return savings


class Notes(Watcher):
    """The gradients of the first step after a task began or a unit froze."""

    def __init__(self, run: Run) -> None:
        self.run, self.gradients, self.sent = run, {}, {}
        self.fresh = False

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None:
        if self.run.trainer.parallel:
            self.run.trainer.parallel.sent = 0
        self.fresh, self.place = True, (task + 1, epoch + 1)

    def step(self, views: int) -> None:
        if self.fresh:
            parts = {"model": self.run.model, "method": self.run.method}
            self.gradients[self.place] = {
                f"{part}.{name}": p.grad.clone()
                for part, module in parts.items()
                for name, p in module.named_parameters()
                if p.grad is not None
            }
            self.sent[self.place] = getattr(self.run.trainer.parallel, "sent", 0)
        self.fresh = False


def count_sent_bytes() -> None:
    """Have every `Parallel` add up the bytes that its first step really sends."""
    make = Parallel.__init__

    def made(self: Parallel, *arguments: Any) -> None:
        make(self, *arguments)
        self.sent = 0

        def counted(group, bucket):  # type: ignore[no-untyped-def]
            self.sent += bucket.buffer().nbytes
            return allreduce_hook(group, bucket)

        self.wrapped.register_comm_hook(None, counted)

    Parallel.__init__ = made  # type: ignore[method-assign]


def come_to(name: str) -> dict[str, Any]:
    objective = name.split()[0]
    width = {} if objective == "supervised" else {"objective__projection": 48}
    run = Run(tiny_config(f"digits/{objective}/finetune", **{**COMMON, **width, **RUNS[name]}))
    run.model.double()
    run.method.double()
    notes = Notes(run)
    results = run.train(notes if processes.is_first() else None)
    return {
        "gradients": notes.gradients,
        "sent": notes.sent,
        "freezing": results["freezing"],
        "probes": {probe: found["matrix"] for probe, found in results["probes"].items()},
        "per_epoch": results["cost"]["per_epoch"],
        "model": run.model.state_dict(),
        "method": run.method.state_dict(),
        "unit_bytes": {
            unit.name: sum(p.numel() * p.element_size() for p in unit.parameters())
            for unit in run.freezing.freezer.units
        },
        "random": run.random.state_dict(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    model.encode = momentum.encode = cassle.encode = encode_double  # type: ignore[attr-defined]
    Run.prepare = prepare_double  # type: ignore[method-assign]
    build.measure_savings = different_savings
    count_sent_bytes()
    with processes.process_group():
        found = {}
        for name in RUNS:
            began = time.monotonic()
            found[name] = come_to(name)
            print(name, f"{time.monotonic() - began:.1f} s", flush=True)
    file = sys.argv[1] + os.environ.get("RANK", "")
    torch.save(found, file)
