"""What a freezer needs of optimizers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def unwrapped_optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers, out of wrappers such as those of Accelerate."""
    found = []
    for optimizer in [] if given is None else [given] if hasattr(given, "param_groups") else list(given):
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a Freezer takes one torch.optim.Optimizer or several, not a {type(optimizer).__name__}")
        found.append(optimizer)
    return found


def start_momentum(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Zero momentum for thawed parameters: the fused SGD of torch 2.13 fails if only some of a group have one.

    With a rate on the device the training step does that itself, in the memory that it was captured with.
    """
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["fused"] and group["momentum"] and not isinstance(group["lr"], Tensor):
            thawed = set(parameters) & set(group["params"])
            if any(optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in group["params"]):
                for parameter in thawed:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
