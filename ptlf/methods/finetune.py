"""Finetune: the objective alone, task after task. Multitask: the objective alone, on all tasks at once."""

from __future__ import annotations

from dataclasses import dataclass

from ptlf.methods.method import Method, MethodConfig


class Finetune(Method):
    pass


@dataclass
class MultitaskConfig(MethodConfig):
    name: str = "multitask"


class Multitask(Method):
    Config = MultitaskConfig
    joint = True
