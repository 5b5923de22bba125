"""Tiny runs in one process and in two: `python worker.py MODE FOLDER` saves their results.

double: as one of two processes, in float64. There the order of summation changes only about the ninth digit, so that a
distributed run can be compared with that of a single process up to its end.
fast: as one of two processes. The first takes steps alone, eagerly and with the whole batch. Then both take their
shares of them with the kernels of `ptlf.kernels.norm`, in Triton's interpreter, and train with steps that are replayed.
one: without a process group, or in a group of its own under torchrun, there also with synchronised norms. On a GPU the
steps are captured and the group speaks NCCL.
"""

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if sys.argv[1] == "fast" else {})
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from conftest import tiny_config, tiny_encoder
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.core.phases import Watcher
from ptlf.kernels import FastParts, can_fuse, parts
from ptlf.model import Model, gradient
from ptlf.objectives import OBJECTIVES
from ptlf.objectives.objective import Teacher
from ptlf.run import build
from ptlf.run.build import Components
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.training import engine, trainer

COMMON: dict[str, Any] = {
    "stream__per_class": 48, "training__epochs": 2, "training__batch": 32, "training__lr": 0.01,
    "training__last_batch": "drop", "freezing__policy": "correlation", "freezing__initial": 0.34,
    "freezing__final": 0.67, "freezing__batches": 1, "probes__linear__enabled": False,
}  # fmt: skip
prepare, measure_savings = Components.prepare, build.measure_savings
ONE_EPOCH = {"training__epochs": 1}
# Every objective with its distillation, and every method; the last run with batch norms that are not synchronised.
RUNS: dict[str, dict[str, Any]] = {
    **{
        f"{name} cassle": {"method__name": "cassle", "method__hidden": 32, **ONE_EPOCH}
        for name, objective in OBJECTIVES.items()
        if objective.can_distill()
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

FROZEN = [(), ("stem.conv", "stages.0.0.conv2", "stages.1.0.shortcut.0")]
RESIDUAL: dict[str, Any] = {
    "encoder__name": "conftest:tiny_resnet", "stream__per_class": 8, "views__size": 8, "training__batch": 8,
    "training__lr": 0.01, "memory__size": 24, "evaluation__enabled": False, "freezing__policy": "ascending",
}  # fmt: skip
FAST_RUNS: dict[str, dict[str, Any]] = {
    "simsiam lump": {},
    "barlow_twins der": {"objective__projection": 16},
    "mocov2plus cassle": {"objective__queue": 48, "method__hidden": 16},
}

GPU = torch.cuda.is_available()
ALONE: dict[str, Any] = {
    **RESIDUAL, "encoder__name": "resnet18" if GPU else "conftest:tiny_resnet", "stream__groups": [[0, 1], [2, 3]],
    "stream__per_class": None if GPU else 48, "training__epochs": 3, "training__batch": 32,
    "training__last_batch": "drop", "freezing__initial": 0.2, "freezing__final": 0.4,
    "device": "cuda" if GPU else "cpu",
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
            self.gradients[self.place] = gradients_of(self.run)
            self.sent[self.place] = SENT.pop() if SENT else 0
        self.fresh = False


def gradients_of(run: Run) -> dict[str, Tensor]:
    parameters = [*run.model.named_parameters("model"), *run.method.named_parameters("method")]
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


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
        "gradients": notes.gradients, "sent": notes.sent, "freezing": results["freezing"],
        "probes": {probe: found["matrix"] for probe, found in results["probes"].items()},
        "per_epoch": epoch_lines(results), "model": run.model.state_dict(), "method": run.method.state_dict(),
        "unit_bytes": {unit.name: sum(p.nbytes for p in unit.parameters()) for unit in run.freezing.freezer.units},
        "random": run.components.random.state_dict(),
    }  # fmt: skip


def steps(name: str, *, fast: bool) -> list[dict[str, Any]]:
    """Two steps with each frozen set: losses, gradients, state."""
    objective, method = name.split()
    run = Run(tiny_config(f"digits/{objective}/finetune", method__name=method, **RESIDUAL | FAST_RUNS[name]))
    if fast:  # as on a GPU, but with a light compiler
        accelerator = FastParts(processes.share(run.config.training.batch), run.device)
        accelerator.has_kernels, run.model.accelerator, run.trainer.engine_kind = True, accelerator, "compiled"
        assert can_fuse(run.model.encoder)
    run.method.begin_task(0, run.model, 10)
    found = []
    for frozen in FROZEN:
        run.freezing.freezer.thaw()
        run.freezing.freezer.freeze(frozen)
        run.trainer.rebuild()
        state = run.trainer.new_epoch_state()
        for _ in run.trainer.epoch(run.stream.tasks[0].train, 0, state):
            pass
        held = {"model": run.model, "method": run.method}
        states = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in held.items()}
        step = {"losses": dict(state.losses), "gradients": gradients_of(run), "sent": run.trainer.sent_bytes()}
        found.append(step | states)
    return found


def check_replays() -> None:
    """Steps that are recorded and replayed, collectives included, leave the bits of steps as they are."""
    from test_engine import assert_same_run, small_config, trained_both_ways

    for name in ("graph_pool_handle", "Stream"):
        setattr(torch.cuda, name, lambda *device: None)
    engine.is_scarce = lambda device: False
    with pytest.MonkeyPatch.context() as patch:
        for objective, method in (("barlow_twins", "der"), ("mocov2plus", "cassle")):
            plain, taped = trained_both_ways(small_config(tiny_config, objective, method), patch)
            assert_same_run(plain, taped)
            assert "capture" in {done for _, done in taped.trainer.engine.did}
            assert taped.trainer.sent_bytes() == plain.trainer.sent_bytes() > 0
            assert not taped.trainer.engine.graphs()  # NCCL would wait for them


def train_one(synchronised: bool) -> dict[str, Any]:
    run = Run(tiny_config("digits/simsiam/lump", **ALONE, distributed__sync_batch_norm=synchronised))
    assert run.trainer.engine_kind == ("captured" if GPU else "eager")
    results = run.train()
    state = {**run.model.state_dict(), **{f"method {key}": value for key, value in run.method.state_dict().items()}}
    rows = {key: value[:-1] if "memory." in key and value.ndim else value for key, value in state.items()}
    losses = [loss for line in epoch_lines(results) for loss in line["loss"].values()]
    return {"losses": losses, "state": {key: value.cpu() for key, value in rows.items()}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, folder = sys.argv[1:]
    rank = int(os.environ.get("RANK", "0"))
    if mode == "double":
        Model.encode = encode_double  # type: ignore[method-assign]
        Components.prepare = prepare_double  # type: ignore[method-assign]
        build.measure_savings = different_savings
        count_sent_bytes()
        torch.save({name: train(name) for name in list(RUNS)[rank::2]}, f"{folder}/alone{rank}.pt")
        with processes.process_group():
            torch.save({name: train(name) for name in RUNS}, f"{folder}/pair{rank}.pt")
    elif mode == "fast":
        parts.BACKEND = os.environ.get("COMPILER", "aot_eager")
        if rank == 0:
            torch.save({name: steps(name, fast=False) for name in FAST_RUNS}, f"{folder}/alone.pt")
        with processes.process_group():
            torch.save({name: steps(name, fast=True) for name in FAST_RUNS}, f"{folder}/pair{rank}.pt")
            check_replays()
    else:
        torch._inductor.config.deterministic = True  # no choice of kernels by their timing
        # In place of the fastest that cuDNN finds: those are other ones in every process.
        engine.CapturedEngine.arithmetic = lambda self, batch=None: engine.Engine.arithmetic(self)
        with processes.process_group():
            kinds = {"group local": False, "group": True} if processes.joined() else {"alone": False}
            for kind, synchronised in kinds.items():
                torch.save(train_one(synchronised), f"{folder}/{kind}.pt")
