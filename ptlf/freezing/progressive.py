"""Progressive freezing over a task's epochs: how many (schedule), which (policy), done (freezer), noted (log)."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from ptlf.freezing.cost import Saving
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.policies import Context, Policy, RatiosOf
from ptlf.freezing.schedule import FreezeSchedule

UPDATES = ("one-shot", "per-epoch")
THAWS = ("all", "needed")


class ProgressiveFreezing:
    """Call `begin_task` and then `begin_epoch` before each epoch.

    update: when ratios are computed: "one-shot" at a task's start, "per-epoch" also before units freeze later.
    thaw: at a task's start "all" units, or only those "needed": units that this task too would freeze stay frozen.

    `log` has an entry per task with a past: ratios, order and events of freezing.
    """

    def __init__(
        self,
        freezer: Freezer,
        policy: Policy[Any],
        schedule: FreezeSchedule,
        *,
        update: str = "one-shot",
        thaw: str = "all",
        generator: torch.Generator | None = None,
        savings: dict[str, Saving] | None = None,
    ) -> None:
        if update not in UPDATES or thaw not in THAWS:
            raise ValueError(f"update is one of {UPDATES} and thaw one of {THAWS}, not {update!r} and {thaw!r}")
        self.freezer, self.policy, self.schedule, self.update, self.thaw = freezer, policy, schedule, update, thaw
        self.keep_frozen: list[str] = []  # frozen when the task began; of these, what the policy takes again stays so
        sizes = {unit.name: sum(p.numel() for p in unit.parameters()) for unit in freezer.units}
        self.context = Context(list(sizes), None, savings, generator, sizes=sizes)
        self.active = False
        self.log: list[dict[str, Any]] = []

    def begin_task(self, index: int, past: bool | None = None) -> None:
        """Everything thaws, if only until the first epoch. Without a past (in the first task) nothing freezes."""
        self.keep_frozen = list(self.freezer.frozen) if self.thaw == "needed" else []
        self.freezer.thaw()
        self.context.ratios = None
        self.active = (index > 0 if past is None else past) and self.policy.freezes
        if self.active:
            self.log.append({"task": index + 1, "ratios": {}, "order": [], "events": []})

    def needs_ratios(self, epoch: int) -> bool:
        """Whether this epoch's choice depends on ratios at the module's current weights."""
        count = self.schedule.count(epoch, len(self.context.units))
        later = self.update == "per-epoch" and count > len(self.freezer.frozen)
        return self.active and self.policy.needs_ratios and (epoch == 0 or later)

    def begin_epoch(self, epoch: int, ratios: RatiosOf | None = None) -> list[str]:
        """Freeze what the schedule allows by now; the units that froze just now. ratios: if `needs_ratios`."""
        if not self.active:
            return []
        units, frozen = self.context.units, list(self.freezer.frozen)
        candidates = [name for name in units if name not in frozen]
        wanted = self.schedule.count(epoch, len(units)) - len(frozen)
        self.context.remaining = self.schedule.most(len(units)) - len(frozen)
        if ratios is not None:
            self.context.ratios = None
            self._compute_ratios(epoch, candidates, frozen, ratios)
        stay: list[str] = []
        if epoch == 0 and self.keep_frozen:
            plan = self.policy.choose(self.context.remaining, candidates, frozen, self.context)
            stay, self.keep_frozen = [name for name in plan if name in self.keep_frozen], []
            frozen += stay
            candidates = [name for name in candidates if name not in stay]
            wanted, self.context.remaining = wanted - len(stay), self.context.remaining - len(stay)
            if ratios is not None:
                self._compute_ratios(epoch, candidates, frozen, ratios)  # others may count now
        chosen = self.policy.choose(wanted, candidates, frozen, self.context) if wanted > 0 else []
        if new := stay + chosen:
            new += [name for name in self.freezer.freeze(new) if name not in new]  # tied to the chosen ones
            self.log[-1]["order"] += new
            self.log[-1]["events"].append({"epoch": epoch + 1, "frozen": new})
        return new

    def _compute_ratios(self, epoch: int, candidates: list[str], frozen: list[str], ratios: RatiosOf) -> None:
        found = self.policy.ratios_needed(candidates, frozen, self.context, ratios)
        self.context.ratios = (self.context.ratios or {}) | found
        if epoch == 0:
            self.log[-1]["ratios"] = dict(self.context.ratios)
        else:
            self.log[-1].setdefault("ratios_by_epoch", {})[str(epoch + 1)] = dict(self.context.ratios)

    def log_directions(self, directions: Mapping[str, int]) -> None:
        """How many singular vectors were kept, by unit. Those of the task's start stay."""
        self.log[-1]["directions"] = {**directions, **self.log[-1].get("directions", {})}

    def state_dict(self) -> dict[str, Any]:
        """Plain values. The policies' randomness is in the generator, which whoever made it stores."""
        savings = {name: vars(saving) for name, saving in (self.context.savings or {}).items()}
        state = {"active": self.active, "ratios": self.context.ratios, "savings": savings, "stays": self.keep_frozen}
        return {**self.freezer.state_dict(), **deepcopy(state), "log": deepcopy(self.log)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load weights and optimizer first."""
        self.freezer.load_state_dict(state)
        self.active, self.context.ratios, self.log = state["active"], state["ratios"], deepcopy(list(state["log"]))
        self.keep_frozen = list(state.get("stays", []))  # older states have none
        if state["savings"]:  # as they were: another machine may train in another precision
            self.context.savings = {name: Saving(**saving) for name, saving in state["savings"].items()}
