"""Training steps of tiny residual networks: `python fast_worker.py FOLDER`, as one of two processes.

The first process runs all steps alone, eagerly and with the whole batch. Then both run their shares of them with the
kernels of `ptlf.kernels.norm`, in Triton's interpreter. At last both train with steps that are recorded and replayed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from conftest import tiny_config
from test_engine import assert_same_run, small_config, trained_both_ways
from torch import Tensor, nn

from ptlf.core import processes
from ptlf.kernels import FastParts, parts, resnet
from ptlf.run.loop import Run
from ptlf.training import engine

STEM, MIDDLE, SHORTCUT = "stem.conv", "stages.0.0.conv2", "stages.1.0.shortcut.0"
FROZEN = [(), (STEM,), (MIDDLE, SHORTCUT)]
COMMON: dict[str, Any] = {
    "encoder__name": "conftest:tiny_resnet",
    "stream__per_class": 16,
    "training__batch": 16,
    "training__lr": 0.01,
    "memory__size": 24,
    "evaluation__enabled": False,
    "freezing__policy": "ascending",
}
RUNS: dict[str, dict[str, Any]] = {
    "simsiam lump": {},
    "barlow_twins der": {"objective__projection": 16},
    "mocov2plus cassle": {"objective__queue": 48, "method__hidden": 16},
}
TAPED = [("barlow_twins", "der"), ("mocov2plus", "cassle")]


class Fast(FastParts):
    """As on a GPU, but with a light compiler."""

    def encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        assert resnet.can_fuse(encoder)
        return resnet.fused_forward(encoder, images)


def steps(name: str, *, fast: bool) -> list[dict[str, Any]]:
    """Two steps with each frozen set: losses, gradients, state."""
    objective, method = name.split()
    run = Run(tiny_config(f"digits/{objective}/finetune", method__name=method, **{**COMMON, **RUNS[name]}))
    if fast:
        run.model.accelerator = Fast(processes.share(run.config.training.batch), run.device)
        run.trainer.engine_kind = "compiled"
    run.method.begin_task(0, run.model)
    found = []
    for frozen in FROZEN:
        run.freezing.freezer.thaw()
        run.freezing.freezer.freeze(frozen)
        run.trainer.rebuild()
        state = run.trainer.begin_epoch()
        for _ in run.trainer.epoch(run.stream.tasks[0].train, 0, state):
            pass
        parameters = [*run.model.named_parameters(), *run.method.named_parameters()]
        found.append(
            {
                "losses": dict(state.losses),
                "gradients": {key: p.grad.clone() for key, p in parameters if p.grad is not None},
                "model": {key: value.clone() for key, value in run.model.state_dict().items()},
                "method": {key: value.clone() for key, value in run.method.state_dict().items()},
                "sent": run.trainer.sent_bytes(),
            }
        )
    return found


def check_replays() -> None:
    """Steps that are recorded and replayed, collectives included, leave the bits of steps as they are."""
    for name in ("graph_pool_handle", "Stream"):
        setattr(torch.cuda, name, lambda *device: None)
    engine.is_scarce = lambda device: False
    with pytest.MonkeyPatch.context() as patch:
        for objective, method in TAPED:
            plain, taped = trained_both_ways(small_config(tiny_config, objective, method), patch)
            assert_same_run(plain, taped)
            assert "capture" in {done for _, done in taped.trainer.engine.did}
            assert taped.trainer.sent_bytes() == plain.trainer.sent_bytes() > 0
            assert not taped.trainer.engine.graphs()  # NCCL would wait for them


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts.BACKEND = os.environ.get("COMPILER", "aot_eager")
    rank = os.environ["RANK"]
    if rank == "0":
        torch.save({name: steps(name, fast=False) for name in RUNS}, f"{sys.argv[1]}/alone.pt")
    with processes.process_group():
        torch.save({name: steps(name, fast=True) for name in RUNS}, f"{sys.argv[1]}/pair{rank}.pt")
        check_replays()
