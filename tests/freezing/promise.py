"""The promise of a freezer, as a function that any training loop can be put through."""

from collections.abc import Callable

import torch
from test_freezer import images, small, snapshot
from torch import Tensor, nn

from ptlf.encoders.vit import ViT
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import Unit

NETWORKS = ["resnet", "vit"]
PREFIX = {"resnet": ["stem", "stages.0"], "vit": ["embedding", "blocks.0"]}
SCATTERED = {"resnet": ["stages.0.0.conv2", "stages.1.0.shortcut"], "vit": ["blocks.0.fc1", "blocks.1.qkv"]}


def network(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    if name == "resnet":
        return small(seed), images(6, 16)
    torch.manual_seed(seed)
    return ViT(16, 2, 16, heads=2), images(6, 16)


def keys_of(model: nn.Module, units: list[Unit]) -> set[str]:
    """The entries of the state_dict that belong to these units."""
    tensors = {parameter for unit in units for parameter in unit.parameters()}
    tensors |= {buffer for unit in units for norm in unit.norms for buffer in norm.buffers()}
    return {key for key, value in [*model.named_parameters(), *model.named_buffers()] if value in tensors}


def promise(model: nn.Module, freezer: Freezer, step: Callable[[], object], chosen: list[str]) -> None:
    """What is frozen does not move by a bit, all else does; after a thaw, of a part and of all, what thawed moves."""

    def check() -> None:
        before = snapshot(model)
        step()
        step()
        after = snapshot(model)
        held = keys_of(model, [unit for unit in freezer.units if unit.name in freezer.frozen])
        still = {key for key, value in after.items() if torch.equal(value, before[key])}
        assert still == held, (still ^ held, freezer.frozen)

    check()
    freezer.freeze(chosen)
    held = [parameter for unit in freezer.units if unit.name in freezer.frozen for parameter in unit.parameters()]
    assert held and all(parameter.grad is None for parameter in held)
    assert not any(parameter in optimizer.state for optimizer in freezer.optimizers for parameter in held)
    check()
    freezer.thaw(freezer.frozen[0])
    check()
    freezer.freeze(chosen)
    check()
    freezer.thaw()
    check()
