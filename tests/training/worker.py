"""Tiny runs in float64, in one process and in two: `python worker.py FOLDER` saves their results.

In float64 the order of summation changes only about the ninth digit, so that a distributed run can be compared with
that of a single process up to its end.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from conftest import tiny_config, tiny_encoder
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.model import Model, gradient
from ptlf.objectives import OBJECTIVES
from ptlf.objectives.objective import Teacher
from ptlf.run import build
from ptlf.run.components import Components
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.run.watcher import Watcher
from ptlf.training import trainer

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
prepare, measure_savings = Components.prepare, build.measure_savings
ONE_EPOCH = {"training__epochs": 1}
# Every objective with its distillation, and every method; the last run with batch norms that are not synchronised.
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"{objective} cassle": {"method__name": "cassle", "method__hidden": 32, **ONE_EPOCH} for objective in OBJECTIVES
    },
    "simsiam lump": {"method__name": "lump"},
    "simsiam cost": {"method__name": "lump", "freezing__policy": "cost_aware"},
    "barlow_twins der": {"method__name": "der"},
    "simsiam pfr": {"method__name": "pfr"},
    "simclr si": {"method__name": "si"},
    "simsiam pnn": {
        "method__name": "pnn", "freezing__policy": "none", "encoder__name": "conftest:tiny_resnet", **ONE_EPOCH,
    },
    "simsiam local": {"method__name": "cassle", "distributed__sync_batch_norm": False},
}  # fmt: skip


def encode_double(model: Model, views: Sequence[Tensor], teacher: Teacher | None = None) -> list[Tensor]:
    """`Model.encode` gives float32."""
    encoder = model.encoder if teacher is None else teacher.encoder
    with gradient(teacher):
        return [encoder(view.double()) for view in views]


def mortal_encoder() -> nn.Module:
    """Kills rank 1 in its 24th forward in training mode, unless torchrun has restarted it."""
    network, forwards = tiny_encoder(), itertools.count(1)

    def die(*ignored: Any) -> None:
        first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if network.training and next(forwards) == 24 and first_time and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    network[0].register_forward_pre_hook(die)
    return network


def prepare_double(self: Components, images: Tensor) -> Tensor:
    return prepare(self, images).double()


def different_savings(*arguments: Any) -> dict[str, Any]:
    """As if they differed by process: rank 1 gets the savings in reverse order."""
    savings = measure_savings(*arguments)
    if os.environ.get("RANK") == "1":
        return dict(zip(savings, reversed(savings.values()), strict=True))
    return savings


class Notes(Watcher):
    """Records gradients and sent bytes at the first step of every epoch, by (task, epoch)."""

    def __init__(self, run: Run) -> None:
        self.run, self.gradients, self.sent = run, {}, {}
        self.fresh = False

    def begin_epoch(self, task: int, epoch: int, steps: int, frozen: int) -> None:
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
            self.sent[self.place] = SENT.pop() if SENT else 0
        self.fresh = False


SENT: list[int] = []  # the bytes of gradients that the last step really sent


def count_sent_bytes() -> None:
    average, send = trainer.average_gradients, torch.distributed.all_reduce

    def counted(parameters: Sequence[Tensor]) -> int:
        sizes: list[int] = []
        torch.distributed.all_reduce = lambda tensor: sizes.append(tensor.nbytes) or send(tensor)
        try:
            return average(parameters)
        finally:
            torch.distributed.all_reduce = send
            SENT[:] = [sum(sizes)]

    trainer.average_gradients = counted


def train(name: str) -> dict[str, Any]:
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
        "per_epoch": epoch_lines(results),
        "model": run.model.state_dict(),
        "method": run.method.state_dict(),
        "unit_bytes": {
            unit.name: sum(p.numel() * p.element_size() for p in unit.parameters())
            for unit in run.freezing.freezer.units
        },
        "random": run.components.random.state_dict(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    Model.encode = encode_double  # type: ignore[method-assign]
    Components.prepare = prepare_double  # type: ignore[method-assign]
    build.measure_savings = different_savings
    count_sent_bytes()
    rank = int(os.environ["RANK"])
    torch.save({name: train(name) for name in list(RUNS)[rank::2]}, f"{sys.argv[1]}/alone{rank}.pt")
    with processes.process_group():
        torch.save({name: train(name) for name in RUNS}, f"{sys.argv[1]}/pair{rank}.pt")
