"""Progressive freezing over a task's epochs: how much (schedule), which (policy), made so (freezer), written down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ptlf.core.settings import key, section
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.policies import POLICIES
from ptlf.freezing.policy import Context, Policy, PolicyConfig, Ratios
from ptlf.freezing.savings import Saving
from ptlf.freezing.schedule import FreezeSchedule


@dataclass
class FreezingConfig:
    policy: PolicyConfig = section(PolicyConfig, family=POLICIES)
    initial: float = key(0.0, "share of the units frozen in a task's first epoch", least=0, most=1)
    final: float = key(0.4, "share of the units frozen in a task's last epoch", least=0, most=1)
    shape: str = key("cosine", "how the share rises", choices=("cosine", "linear", "constant", "printed"))
    update: str = key("one-shot", "when correlation is computed", choices=("one-shot", "per-epoch"))
    ratios: str = key("needed", "of wide units: all, or those that may be chosen", choices=("needed", "all"))
    threshold: float = key(0.99, "energy of the past's inputs that a unit's subspace keeps", above=0, most=1)
    batches: int = key(8, "batches of the new task whose gradients are averaged for the ratios", least=1, most=10_000)
    batch_statistics: bool = key(False, "frozen norms use batch statistics (true) or their running statistics (false)")
    save_memory: bool = key(True, "keep only what backward needs; false = plain requires_grad=False")


class ProgressiveFreezing:
    """Call `begin_task` and then `begin_epoch` before each epoch; it returns the units that froze just now."""

    def __init__(
        self,
        config: FreezingConfig,
        policy: Policy,
        freezer: Freezer,
        epochs: int,
        generator: torch.Generator,
        savings: dict[str, Saving] | None = None,
    ) -> None:
        self.config, self.policy, self.freezer = config, policy, freezer
        self.schedule = FreezeSchedule(config.initial, config.final, epochs, config.shape)
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

    def begin_task(self, index: int, past: bool | None = None) -> None:
        """Everything thaws. In a task without a past nothing freezes; by default that is the first one (index 0)."""
        self.settle()
        self.freezer.thaw()
        self.context.ratios = None
        self.active = (index > 0 if past is None else past) and self.policy.freezes
        if self.active:
            self._log.append({"task": index + 1, "ratios": {}, "order": [], "events": []})

    def begin_epoch(self, epoch: int, correlate: Callable[[], Ratios]) -> list[str]:
        """Freeze what the schedule allows by now. `correlate()` takes the new task's gradient; what it gives computes
        the ratios of units not yet frozen."""
        if not self.active:
            return []
        entry, units = self.entry, self.context.units
        frozen = list(self.freezer.frozen)
        candidates = [name for name in units if name not in frozen]
        wanted = self.schedule.count(epoch, len(units)) - len(frozen)
        self.context.remaining = self.schedule.most(len(units)) - len(frozen)
        if wanted > 0:
            self.settle()
        if self.policy.needs_ratios and (epoch == 0 or (self.config.update == "per-epoch" and wanted > 0)):
            self._pending = partial(self._look, epoch, candidates, frozen, ratios := correlate())
            if not (wanted <= 0 and self.policy.looks_at_all and ratios.start(candidates)):
                self.settle()
        if wanted <= 0:
            return []
        chosen = self.policy.choose(wanted, candidates, frozen, self.context)
        self.freezer.freeze(chosen)
        entry["order"] += chosen
        entry["events"].append({"epoch": epoch + 1, "frozen": chosen})
        return chosen

    def _look(self, epoch: int, candidates: list[str], frozen: list[str], ratios: Ratios) -> None:
        """What it finds does not depend on when it is called, before the next unit freezes."""
        found = self.context.ratios = self.policy.ratios_needed(candidates, frozen, self.context, ratios)
        if epoch == 0:
            self.entry["ratios"] = dict(found)
        else:
            self.entry.setdefault("ratios_by_epoch", {})[str(epoch + 1)] = dict(found)

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Waits for ratios under way. The policies' randomness is in the generator, which whoever made it
        stores."""
        self.settle()
        savings = {name: vars(saving) for name, saving in (self.context.savings or {}).items()}
        state = {"active": self.active, "ratios": self.context.ratios, "savings": savings, "log": self.log}
        return {**self.freezer.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load weights and optimizer first."""
        self.freezer.load_state_dict(state)
        self._pending = None
        self.active, self.context.ratios, self._log = state["active"], state["ratios"], list(state["log"])
        if state["savings"]:  # as they were, should they have been timed
            self.context.savings = {name: Saving(**saving) for name, saving in state["savings"].items()}
