"""The optimizer's contract: settings, and the `torch.optim.Optimizer` made from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ptlf.core.settings import key

State = dict[str, Tensor]


@dataclass
class OptimizerConfig:
    name: str = key("sgd", "update rule, one for the whole stream; `ptlf list optimizers` names them")


C = TypeVar("C", bound=OptimizerConfig)


class UpdateRule(Generic[C]):
    """State carries over between tasks; that of what froze starts again."""

    Config: ClassVar[type[OptimizerConfig]] = OptimizerConfig
    lr: ClassVar[float] = 0.03  # usual rate for a batch of 256, taken where a recipe is for another optimizer

    @staticmethod
    def make(config: C, parameters: Sequence[nn.Parameter], lr: float | Tensor) -> Optimizer:
        """`lr` is a tensor on a GPU: the step may be captured there, and must read the rate from the device."""
        raise NotImplementedError

    @staticmethod
    def first_state(group: dict[str, Any], parameter: Tensor) -> State | None:
        """The state that the parameter's first step starts from, by the names in `Optimizer.state`.

        With it, a captured step can be replayed after the parameter froze and thawed. None = unknown: after every
        freeze the step is captured again.
        """
        return None


@torch.no_grad()
def prepare_state(rule: type[UpdateRule], optimizer: Optimizer, kept: dict[Tensor, State]) -> bool:
    """Give parameters that train and have no state their first one, before a step that may be captured. Returns
    whether all of them have one.

    A captured step writes to the addresses it saw. `kept` holds the state every parameter had, so that after a thaw it
    starts again in the same tensors. Where the rate is a number, steps are never captured, and nothing is done.
    """
    complete = True
    for group in optimizer.param_groups:
        for parameter in group["params"] if isinstance(group["lr"], Tensor) else ():
            if not parameter.requires_grad:
                continue
            state = optimizer.state.get(parameter)
            if not state:
                first = rule.first_state(group, parameter)
                if not first:
                    complete = complete and first is not None
                    continue
                old = kept.get(parameter, {})
                state = {name: old[name].copy_(value) if name in old else value for name, value in first.items()}
                optimizer.state[parameter] = state
            kept[parameter] = state
    return complete
