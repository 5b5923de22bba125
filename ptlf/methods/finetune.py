"""Finetune: the objective alone, task after task. Multitask: the objective alone, on all tasks at once."""

from ptlf.methods.method import Method, MethodConfig


class Finetune(Method[MethodConfig]):
    """The objective alone, task after task."""

    step_kinds = 1


class Multitask(Finetune):
    """The objective alone, on all tasks at once: what could be had without forgetting."""

    joint = True
