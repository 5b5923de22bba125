"""What the callbacks share: a freezer made when training begins, a timetable, and a state that survives a resume."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ptlf.freezing import Freezer, FreezeSchedule, correlation_ratios
from ptlf.freezing.schedule import Timetable
from ptlf.freezing.select import Selector


class FreezingPlan:
    """Freezes units of a model, or of a part of it, during training.

    when: a `FreezeSchedule` or a mapping of moments to units, as in `Freezer.schedule`. Moments are epochs or steps.
    by: "epoch" or "step", what the moments count. The epochs of a `FreezeSchedule` are counted in this unit too.
    part: path of the module to freeze in, such as "encoder"; by default the whole model.
    replay: inputs of past tasks (one tensor, or several, as a loader gives). If given, a `FreezeSchedule` freezes the
        units with the largest correlation ratio first; else those nearest to the input.
    batches: how many batches of the new task the ratios take.
    options: of `Freezer`, such as example and batch_statistics.
    """

    def __init__(
        self,
        when: FreezeSchedule | Mapping[int | float, Selector],
        *,
        by: str = "epoch",
        part: str = "",
        replay: Tensor | Iterable[Any] | None = None,
        batches: int = 8,
        threshold: float = 0.99,
        **options: Any,
    ) -> None:
        if by not in ("epoch", "step"):
            raise ValueError(f"moments are counted by 'epoch' or by 'step', not by {by!r}")
        if replay is not None and not isinstance(when, FreezeSchedule):
            raise ValueError("replay ranks the units for a FreezeSchedule; a mapping names its units itself")
        self.when, self.by, self.part, self.replay = when, by, part, replay
        self.batches, self.threshold, self.options = batches, threshold, options
        self.freezer: Freezer | None = None
        self.timetable: Timetable | None = None
        self.order: list[str] | None = None
        self.loaded: Mapping[str, Any] | None = None  # a state that waits for `begin`

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        total: int | None,
        loss_fn: Callable[[Any], Tensor],
        new: Callable[[], Iterable[Any]],
        agree: Callable[[dict[str, float]], dict[str, float]] = lambda ratios: ratios,
    ) -> None:
        """Weights and optimizers are loaded by now. Units that an interrupted training left frozen thaw first.

        loss_fn: the loss on a batch of the new task; new: gives its batches. agree: the same ratios on all processes.
        """
        self.end()
        module = model.get_submodule(self.part)
        self.freezer = Freezer(module, optimizers, **self.options)
        state, self.loaded = self.loaded, None
        if state is not None:
            self.order, self.freezer.ratios = state["order"], state["ratios"]
            self.freezer.load_state_dict(state)
            if state.get("checksum", checksum(self.freezer)) != checksum(self.freezer):  # older states have none
                self.end()
                hint = "make the model with from_pretrained(CHECKPOINT), then resume from CHECKPOINT"
                raise ValueError(f"the weights to freeze are not those of the checkpoint, which was not loaded; {hint}")
        elif self.replay is not None:
            batches = chain.from_iterable(new() for _ in repeat(None))  # without end
            replay = [self.replay] if isinstance(self.replay, Tensor) else self.replay
            inputs = [batch if isinstance(batch, Tensor) else batch[0] for batch in replay]
            units = [unit for unit in self.freezer.units if all(w.requires_grad for w in unit.weights)]
            how: dict[str, Any] = {"units": units, "batches": self.batches, "keep": [model]}
            found = correlation_ratios(module, inputs, lambda: loss_fn(next(batches)), self.threshold, **how)
            ratios = self.freezer.ratios = agree(found)
            self.order = sorted(ratios, key=lambda name: -ratios[name])
        total = None if isinstance(self.when, FreezeSchedule) else total  # it has epochs of its own
        self.timetable = self.freezer.schedule(self.when, total, self.order)

    def at(self, by: str, now: int) -> list[str]:
        """Freeze what is due, if moments are counted so."""
        return self.timetable.at(now) if self.timetable is not None and by == self.by else []

    def end(self) -> None:
        if self.freezer is not None:
            self.freezer.thaw()

    def state(self) -> dict[str, Any]:
        if self.freezer is None:  # not begun yet: what was loaded
            return dict(self.loaded or {"frozen": [], "order": None, "ratios": {}})
        state = {**self.freezer.state_dict(), "order": self.order, "ratios": dict(self.freezer.ratios)}
        return {**state, "checksum": checksum(self.freezer)}


def checksum(freezer: Freezer) -> int:
    """Of the frozen weights and statistics, as far as this process holds them whole."""
    total = 0
    frozen = (unit.parameters() for unit in freezer.units if unit.name in freezer.frozen)
    for tensor in [*chain.from_iterable(frozen), *freezer.frozen_norm_buffers()]:
        if not hasattr(tensor, "full_tensor"):
            total = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, total)
    return total
