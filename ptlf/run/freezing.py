"""The settings of freezing, and the policies that they name. To add one: a subclass of `Policy` and a line in
`ptlf/freezing/policies.py`, or an entry point of the group `ptlf.policies`."""

from dataclasses import dataclass
from typing import Any

from ptlf import freezing
from ptlf.core.registry import Registry
from ptlf.core.settings import key, section
from ptlf.freezing import Policy, PolicyConfig

POLICIES: Registry[type[Policy[Any]]] = Registry("freezing policy", "ptlf.policies", Policy, freezing.POLICIES)


@dataclass
class FreezingConfig:
    policy: PolicyConfig = section(PolicyConfig, family=POLICIES)
    initial: float = key(0.0, "share of the units frozen in a task's first epoch", ge=0, le=1)
    final: float = key(0.4, "share of the units frozen in a task's last epoch", ge=0, le=1)
    shape: str = key("cosine", "how the share rises", choices=("cosine", "linear", "constant"))
    update: str = key("one-shot", "when ratios are computed", choices=("one-shot", "per-epoch"))
    threshold: float = key(0.99, "energy of the past's inputs that a unit's subspace keeps", gt=0, le=1)
    thaw: str = key("all", "at a task's start: all, or units that it would not freeze", choices=("all", "needed"))
    batches: int = key(8, "batches of the new task whose gradients are averaged for the ratios", ge=1, le=10_000)
    batch_statistics: bool = key(False, "frozen norms use batch statistics (true) or their running statistics (false)")
    save_memory: bool = key(True, "keep only what backward needs; false = plain requires_grad=False")
