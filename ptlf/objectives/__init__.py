"""Objectives by name, and their losses and heads for any training loop.

To add an objective: a file with a subclass of `Objective`, and a line here.
"""

from typing import Any

from ptlf.core.registry import Registry
from ptlf.objectives.contrastive import MoCoV2Plus, SimCLR, moco_loss, simclr_loss
from ptlf.objectives.objective import MLP, MomentumTeacher, Objective, ObjectiveConfig, each_view, mlp, negative_cosine
from ptlf.objectives.predictive import BYOL, SimSiam, Supervised, byol_loss, simsiam_loss
from ptlf.objectives.redundancy import BarlowTwins, VICReg, barlow_twins_loss, vicreg_loss

MEMBERS = {
    "simsiam": SimSiam,
    "barlow_twins": BarlowTwins,
    "mocov2plus": MoCoV2Plus,
    "byol": BYOL,
    "simclr": SimCLR,
    "vicreg": VICReg,
    "supervised": Supervised,
}
OBJECTIVES: Registry[type[Objective[Any]]] = Registry("objective", "ptlf.objectives", Objective, MEMBERS)

__all__ = ["MLP", "OBJECTIVES", "MomentumTeacher", "Objective", "ObjectiveConfig", "barlow_twins_loss", "byol_loss"]
__all__ += ["each_view", "mlp", "moco_loss", "negative_cosine", "simclr_loss", "simsiam_loss", "vicreg_loss"]
