"""Progressive freezing over a task's epochs: how much (schedule), which (policy), made so (freezer), written down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        self.log: list[dict[str, Any]] = []
        self.active = False

    def begin_task(self, index: int, past: bool | None = None) -> None:
        """Everything thaws. In a task without a past nothing freezes; by default that is the first one (index 0)."""
        self.freezer.thaw()
        self.context.ratios = None
        self.active = (index > 0 if past is None else past) and self.policy.freezes
        if self.active:
            self.log.append({"task": index + 1, "ratios": {}, "order": [], "events": []})

    def begin_epoch(self, epoch: int, correlate: Callable[[], Ratios]) -> list[str]:
        """Freeze what the schedule allows by now. `correlate()` takes the new task's gradient; what it gives computes
        the ratios of units not yet frozen."""
        if not self.active:
            return []
        entry, units = self.log[-1], self.context.units
        frozen = list(self.freezer.frozen)
        candidates = [name for name in units if name not in frozen]
        wanted = self.schedule.count(epoch, len(units)) - len(frozen)
        self.context.remaining = self.schedule.most(len(units)) - len(frozen)
        if self.policy.needs_ratios and (epoch == 0 or (self.config.update == "per-epoch" and wanted > 0)):
            self.context.ratios = self.policy.ratios_needed(candidates, frozen, self.context, correlate())
            if epoch == 0:
                entry["ratios"] = dict(self.context.ratios)
            else:
                entry.setdefault("ratios_by_epoch", {})[str(epoch + 1)] = dict(self.context.ratios)
        if wanted <= 0:
            return []
        chosen = self.policy.choose(wanted, candidates, frozen, self.context)
        self.freezer.freeze(chosen)
        entry["order"] += chosen
        entry["events"].append({"epoch": epoch + 1, "frozen": chosen})
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Plain values. The policies' randomness is in the generator, which whoever made it stores."""
        savings = {name: vars(saving) for name, saving in (self.context.savings or {}).items()}
        state = {"active": self.active, "ratios": self.context.ratios, "savings": savings, "log": self.log}
        return {**self.freezer.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load weights and optimizer first."""
        self.freezer.load_state_dict(state)
        self.active, self.context.ratios, self.log = state["active"], state["ratios"], list(state["log"])
        if state["savings"]:  # as they were, should they have been timed
            self.context.savings = {name: Saving(**saving) for name, saving in state["savings"].items()}
