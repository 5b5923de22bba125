"""Finetune: the objective alone, task after task. Multitask: the objective alone, on all tasks at once."""

from dataclasses import dataclass

from ptlf.methods.method import Method, MethodConfig


class Finetune(Method):
    """The objective alone, task after task."""

    def branch(self) -> str:
        return "every task"


@dataclass
class MultitaskConfig(MethodConfig):
    name: str = "multitask"


class Multitask(Finetune):
    """The objective alone, on all tasks at once: what could be had without forgetting."""

    Config = MultitaskConfig
    joint = True
