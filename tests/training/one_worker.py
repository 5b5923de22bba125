"""A run of one process: `python one_worker.py FOLDER KIND ...`, with `group` and `group_local` under torchrun.

alone: without a process group. group: in a group of its own. group_local: the same, with norms that are not
synchronised. stand_in: as group, but without a group; every collective is what it is for one process. On a GPU the
steps are captured and the group speaks NCCL. Without one they are eager, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch._inductor.config
from conftest import tiny_config

from ptlf.core import processes
from ptlf.encoders.norm import synchronise, views_in_one_pass
from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.kernels.resnet import fused_forward
from ptlf.run.loop import Run
from ptlf.run.results import epoch_lines
from ptlf.training import engine

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CONFIG: dict[str, Any] = {
    "encoder__name": "resnet18" if GPU else "conftest:tiny_resnet",
    "stream__groups": [[0, 1], [2, 3]],
    "stream__per_class": None if GPU else 48,
    "training__epochs": 3,
    "training__batch": 32,
    "training__lr": 0.01,
    "training__last_batch": "drop",
    "freezing__policy": "ascending",
    "freezing__initial": 0.2,
    "freezing__final": 0.4,
    "memory__size": 64,
    "evaluation__enabled": False,
    "device": DEVICE,
}


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Collectives of one process, without a group."""
    torch.distributed.all_reduce = lambda tensor, *operation: None
    torch.distributed.broadcast = lambda tensor, src: None
    processes._gather = lambda rows, mine: rows.copy_(mine)
    processes.broadcast_object = lambda value: value
    processes._joined = True
    yield
    processes._joined = False


def fixed_algorithms(self: engine.Engine, batch: object = None) -> Any:
    """In place of the fastest that cuDNN finds: those are other ones in every process."""
    return engine.Engine.arithmetic(self)


def train(kind: str) -> dict[str, Any]:
    synchronised = kind in ("group", "stand_in")
    run = Run(tiny_config("digits/simsiam/lump", **CONFIG, distributed__sync_batch_norm=synchronised))
    graphs = []
    if GPU:
        capture = run.trainer.engine.capture
        run.trainer.engine.capture = lambda *given: graphs.append(capture(*given))
    results = run.train()
    assert bool(graphs) is GPU
    state = {**run.model.state_dict(), **{f"method {key}": value for key, value in run.method.state_dict().items()}}
    rows = {key: value[:-1] if "memory." in key and value.ndim else value for key, value in state.items()}
    return {
        "losses": [loss for line in epoch_lines(results) for loss in line["loss"].values()],
        "state": {key: value.cpu() for key, value in rows.items()},
        "encoder": encoder_step(),
    }


def encoder_step() -> dict[str, torch.Tensor]:
    """Gradients and buffers after one forward and backward of an encoder in bf16."""
    torch.manual_seed(0)
    encoder = ResNet(BasicBlock, (1, 1), width=32 if GPU else 4).to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(24 if GPU else 4, 3, 16, 16).to(DEVICE)
    if processes.joined():
        synchronise(encoder)
    torch.backends.cudnn.deterministic = True
    with views_in_one_pass(encoder, 2), torch.autocast(DEVICE, torch.bfloat16):
        fused_forward(encoder, images).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    return {name: value.cpu() for name, value in {**gradients, **dict(encoder.named_buffers())}.items()}


if __name__ == "__main__":
    torch._inductor.config.deterministic = True  # no choice of kernels by their timing
    engine.CapturedEngine.arithmetic = fixed_algorithms
    folder, *kinds = sys.argv[1:]
    with contextlib.ExitStack() as group:
        group.enter_context(processes.process_group())  # torchrun's; else none
        for kind in kinds:
            if kind == "stand_in":
                group.enter_context(stand_in())
            assert processes.joined() is (kind != "alone")
            torch.save(train(kind), f"{folder}/{kind}.pt")
