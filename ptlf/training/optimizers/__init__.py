"""Optimizers by name. To add one: a file with a subclass of `UpdateRule`, and a line here."""

from typing import Any

from ptlf.core.registry import Registry
from ptlf.training.optimizers.adamw import AdamW
from ptlf.training.optimizers.lars import LARS, Lars
from ptlf.training.optimizers.optimizer import OptimizerConfig, UpdateRule, prepare_state
from ptlf.training.optimizers.sgd import SGD

MEMBERS: dict[str, type[UpdateRule[Any]]] = {
    "sgd": SGD,
    "lars": Lars,
    "adamw": AdamW,
}
OPTIMIZERS: Registry[type[UpdateRule[Any]]] = Registry("optimizer", "ptlf.optimizers", UpdateRule, MEMBERS)

__all__ = ["LARS", "OPTIMIZERS", "OptimizerConfig", "UpdateRule", "prepare_state"]
