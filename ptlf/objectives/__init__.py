"""Objectives by name. To add one: a file with a subclass of `Objective`, and a line here."""

from ptlf.core.registry import Registry
from ptlf.objectives.barlow_twins import BarlowTwins
from ptlf.objectives.byol import BYOL
from ptlf.objectives.mocov2plus import MoCoV2Plus
from ptlf.objectives.objective import Objective, ObjectiveConfig
from ptlf.objectives.simclr import SimCLR
from ptlf.objectives.simsiam import SimSiam
from ptlf.objectives.supervised import Supervised
from ptlf.objectives.vicreg import VICReg

MEMBERS = {
    "simsiam": SimSiam,
    "barlow_twins": BarlowTwins,
    "mocov2plus": MoCoV2Plus,
    "byol": BYOL,
    "simclr": SimCLR,
    "vicreg": VICReg,
    "supervised": Supervised,
}
OBJECTIVES: Registry[type[Objective]] = Registry("objective", "ptlf.objectives", Objective, MEMBERS)

__all__ = ["OBJECTIVES", "Objective", "ObjectiveConfig"]
