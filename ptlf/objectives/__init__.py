"""Objectives by name. To add one: a file with a subclass of `Objective`, and a line here."""

from __future__ import annotations

from ptlf.objectives.barlow_twins import BarlowTwins
from ptlf.objectives.objective import Objective, ObjectiveConfig
from ptlf.objectives.simsiam import SimSiam
from ptlf.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    "simsiam": SimSiam,
    "barlow_twins": BarlowTwins,
    "supervised": Supervised,
}

__all__ = ["OBJECTIVES", "Objective", "ObjectiveConfig"]
