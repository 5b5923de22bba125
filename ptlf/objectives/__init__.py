"""Objectives by name, and their losses and heads for any training loop.

To add an objective: a file with a subclass of `Objective`, and a line here.
"""

from typing import Any

from ptlf.core.registry import Registry
from ptlf.objectives.barlow_twins import BarlowTwins, barlow_twins_loss
from ptlf.objectives.byol import BYOL, byol_loss
from ptlf.objectives.heads import MLP, each_view, mlp, negative_cosine
from ptlf.objectives.mocov2plus import MoCoV2Plus, moco_loss
from ptlf.objectives.objective import Objective, ObjectiveConfig
from ptlf.objectives.simclr import SimCLR, simclr_loss
from ptlf.objectives.simsiam import SimSiam, simsiam_loss
from ptlf.objectives.supervised import Supervised
from ptlf.objectives.teacher import MomentumTeacher
from ptlf.objectives.vicreg import VICReg, vicreg_loss

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

__all__ = [
    "MLP",
    "OBJECTIVES",
    "MomentumTeacher",
    "Objective",
    "ObjectiveConfig",
    "barlow_twins_loss",
    "byol_loss",
    "each_view",
    "mlp",
    "moco_loss",
    "negative_cosine",
    "simclr_loss",
    "simsiam_loss",
    "vicreg_loss",
]
