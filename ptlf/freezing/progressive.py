"""Progressive freezing over a task's epochs: how much (schedule), which (policy), made so (freezer), written down."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ptlf.core.settings import key, section
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.policies import POLICIES
from ptlf.freezing.policy import Context, Policy, PolicyConfig, Ratios
from ptlf.freezing.savings import Saving
from ptlf.freezing.schedule import FreezeSchedule, progress


@dataclass
class FreezingConfig:
    policy: PolicyConfig = section(PolicyConfig, family=POLICIES)
    initial: float = key(0.0, "share of the units frozen in a task's first epoch", ge=0, le=1)
    final: float = key(0.4, "share of the units frozen in a task's last epoch", ge=0, le=1)
    stream_final: float | None = key(None, "the last task's final, which grows to it; null = the same", ge=0, le=1)
    shape: str = key("cosine", "how the share rises", choices=("cosine", "linear", "constant", "printed"))
    update: str = key("one-shot", "when correlation is computed", choices=("one-shot", "per-epoch"))
    ratios: str = key("needed", "of wide units: all, or those that may be chosen", choices=("needed", "all"))
    threshold: float = key(0.99, "energy of the past's inputs that a unit's subspace keeps", gt=0, le=1)
    thaw: str = key("all", "at a task's start: all, or units that it would not freeze", choices=("all", "needed"))
    batches: int = key(8, "batches of the new task whose gradients are averaged for the ratios", ge=1, le=10_000)
    batch_statistics: bool = key(False, "frozen norms use batch statistics (true) or their running statistics (false)")
    save_memory: bool = key(True, "keep only what backward needs; false = plain requires_grad=False")


class Remembered(Ratios):
    """Computes each ratio once."""

    def __init__(self, of: Ratios) -> None:
        super().__init__()
        self.of, self.known = of, dict[str, float]()

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        if missing := [name for name in names if name not in self.known]:
            self.known |= self.of(missing)
        return {name: self.known[name] for name in names}

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        return self.of.bounds(names)

    def start(self, names: Sequence[str]) -> bool:
        return self.of.start(names)


class ProgressiveFreezing:
    """Call `begin_task` and then `begin_epoch` before each epoch; it returns the units that froze just now.

    tasks: how many the stream has, for a final share that grows over it.
    """

    def __init__(
        self,
        config: FreezingConfig,
        policy: Policy,
        freezer: Freezer,
        epochs: int,
        generator: torch.Generator,
        savings: dict[str, Saving] | None = None,
        tasks: int | None = None,
    ) -> None:
        self.config, self.policy, self.freezer = config, policy, freezer
        self.epochs, self.tasks = epochs, tasks
        self.schedule = self.schedule_of(0)
        self.stays: list[str] = []  # was frozen when the task began, and may stay so
        self.context = Context([unit.name for unit in freezer.units], None, savings, generator)
        self.active = False
        self._log: list[dict[str, Any]] = []
        self._pending: Callable[[], None] | None = None  # looks at ratios that are computed in the background

    @property
    def log(self) -> list[dict[str, Any]]:
        """An entry per task with a past: ratios, order and events of freezing. Waits for ratios under way."""
        self.settle()
        return self._log

    @property
    def entry(self) -> dict[str, Any]:
        """The log's last, as it is now: ratios under way are not in it."""
        return self._log[-1]

    def settle(self) -> None:
        """Wait for the ratios that are computed in the background, if there are any."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()

    def schedule_of(self, index: int) -> FreezeSchedule:
        """Of this task, counted from 0. With `stream_final` the final share grows in equal steps from the second task
        to the last."""
        final, last = self.config.final, self.config.stream_final
        if last is not None:
            if self.tasks is None:
                raise ValueError("stream_final needs the number of tasks")
            weight = progress(max(0, index - 1), self.tasks - 1)
            final = (1 - weight) * final + weight * last
        return FreezeSchedule(self.config.initial, final, self.epochs, self.config.shape)

    def begin_task(self, index: int, past: bool | None = None) -> None:
        """Everything thaws; with `thaw: needed` some of it freezes again in the task's first epoch, before a step. In a
        task without a past nothing freezes; by default that is the first one (index 0)."""
        self.settle()
        self.stays = list(self.freezer.frozen) if self.config.thaw == "needed" else []
        self.freezer.thaw()
        self.context.ratios, self.schedule = None, self.schedule_of(index)
        self.active = (index > 0 if past is None else past) and self.policy.freezes
        if self.active:
            self._log.append({"task": index + 1, "ratios": {}, "order": [], "events": []})

    def begin_epoch(self, epoch: int, correlate: Callable[[], Ratios]) -> list[str]:
        """Freeze what the schedule allows by now. `correlate()` takes the new task's gradient; what it gives computes
        the ratios of units not yet frozen."""
        if not self.active:
            return []
        units, frozen = self.context.units, list(self.freezer.frozen)
        candidates = [name for name in units if name not in frozen]
        wanted = self.schedule.count(epoch, len(units)) - len(frozen)
        self.context.remaining = self.schedule.most(len(units)) - len(frozen)
        if wanted > 0:
            self.settle()
        if self.policy.needs_ratios and (epoch == 0 or (self.config.update == "per-epoch" and wanted > 0)):
            ratios = Remembered(correlate())
            self._pending = partial(self._look, epoch, candidates, frozen, ratios)
            later = wanted <= 0 and not self.stays and self.policy.looks_at_all
            if not (later and ratios.start(candidates)):
                self.settle()
        stay: list[str] = []
        if epoch == 0 and self.stays:
            plan = self.policy.choose(self.context.remaining, candidates, frozen, self.context)
            stay, self.stays = [name for name in plan if name in self.stays], []
            frozen += stay
            candidates = [name for name in candidates if name not in stay]
            wanted, self.context.remaining = wanted - len(stay), self.context.remaining - len(stay)
            if self.policy.needs_ratios:
                self._look(epoch, candidates, frozen, ratios, self.context.ratios)  # others may count now
        chosen = self.policy.choose(wanted, candidates, frozen, self.context) if wanted > 0 else []
        if new := stay + chosen:
            self.freezer.freeze(new)
            self.entry["order"] += new
            self.entry["events"].append({"epoch": epoch + 1, "frozen": new})
        return new

    def _look(
        self,
        epoch: int,
        candidates: list[str],
        frozen: list[str],
        ratios: Ratios,
        known: dict[str, float] | None = None,
    ) -> None:
        """What it finds does not depend on when it is called, before the next unit freezes. known: found before."""
        found = (known or {}) | self.policy.ratios_needed(candidates, frozen, self.context, ratios)
        self.context.ratios = found
        if epoch == 0:
            self.entry["ratios"] = dict(found)
        else:
            self.entry.setdefault("ratios_by_epoch", {})[str(epoch + 1)] = dict(found)

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Waits for ratios under way. The policies' randomness is in the generator, which whoever made it
        stores."""
        self.settle()
        savings = {name: vars(saving) for name, saving in (self.context.savings or {}).items()}
        state = {"active": self.active, "ratios": self.context.ratios, "savings": savings, "stays": list(self.stays)}
        return {**self.freezer.state_dict(), **state, "log": deepcopy(self.log)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load weights and optimizer first."""
        self.freezer.load_state_dict(state)
        self._pending = None
        self.active, self.context.ratios, self._log = state["active"], state["ratios"], deepcopy(list(state["log"]))
        self.stays = list(state.get("stays", []))  # older states have none
        if self.active and self._log:
            self.schedule = self.schedule_of(self.entry["task"] - 1)
        if state["savings"]:  # as they were, should they have been timed
            self.context.savings = {name: Saving(**saving) for name, saving in state["savings"].items()}
