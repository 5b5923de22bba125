"""Training in two processes, for `torch.multiprocessing.spawn`; each saves what it holds at the end."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from promise import NETWORKS, PREFIX, SCATTERED, keys_of, network, promise, snapshot
from test_freezer import loss_of
from torch import Tensor, distributed, nn

from ptlf.freezing.freezer import Freezer

RANKS = 2
Course = list[tuple[set[str], set[str], dict[str, Tensor]]]  # of a step: frozen before and after it, and the state


def in_process(rank: int, folder: Path) -> None:
    """Saves the results of `ddp` and `fsdp` by name and network. Ends without taking torch and its process group apart:
    their threads abort there at times."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    results = {(work.__name__, name): work(rank, name) for work in (ddp, fsdp) for name in NETWORKS}
    torch.save(results, folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    while not all((folder / f"{other}.pt").exists() for other in range(RANKS)):  # the other may still be sent something
        time.sleep(0.01)
    os._exit(0)


def course(
    model: nn.Module, wrapped: nn.Module, freezer: Freezer, optimizer: torch.optim.Optimizer, x: Tensor, name: str
) -> Course:
    """Steps between which units freeze and thaw, one of them in the middle of an accumulated gradient."""
    states = []

    def held() -> set[str]:
        return keys_of(model, [unit for unit in freezer.units if unit.name in freezer.frozen])

    def step(*events: Callable[[], object]) -> None:
        before = held()
        optimizer.zero_grad()
        for event in events:
            with wrapped.no_sync() if hasattr(wrapped, "no_sync") else torch.enable_grad():
                loss_of(wrapped, x).backward()
            event()
        loss_of(wrapped, x).backward()
        optimizer.step()
        states.append((before, held(), snapshot(model)))

    step()
    freezer.freeze(SCATTERED[name])
    step()
    step(lambda: freezer.freeze(PREFIX[name]))
    freezer.thaw(SCATTERED[name])
    step()
    freezer.freeze(len(freezer.units))
    assert not wrapped(x).requires_grad
    freezer.thaw()
    step()
    return states


def prepared(name: str, seed: int) -> tuple[nn.Module, Freezer, torch.optim.Optimizer, Tensor]:
    model, x = network(name, seed)
    model, x = model.double().train(), x.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    freezer = Freezer(model, optimizer, example=x[:2])
    freezer.freeze(1)  # already when it is wrapped
    return model, freezer, optimizer, x


def ddp(rank: int, name: str) -> Course:
    model, freezer, optimizer, x = prepared(name, seed=rank)  # the wrap makes them alike
    wrapped = freezer.ddp()
    return course(model, wrapped, freezer, optimizer, x.chunk(RANKS)[rank], name)


def alone(name: str) -> Course:
    model, freezer, optimizer, x = prepared(name, seed=0)
    return course(model, model, freezer, optimizer, x, name)


def fsdp(rank: int, name: str) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = network(name)
    freezer = Freezer(model.train(), example=x[:2])
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.get_submodule("stages" if name == "resnet" else "blocks"):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    freezer.optimizers = [optimizer]

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x.chunk(RANKS)[rank]).backward()
        optimizer.step()

    promise(model, freezer, step, PREFIX[name])
    promise(model, freezer, step, SCATTERED[name])
    return snapshot(model)
