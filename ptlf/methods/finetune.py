"""Finetune: only the objective, task after task. Multitask: only the objective, on all tasks at once."""

from ptlf.methods.method import Method, MethodConfig


class Finetune(Method[MethodConfig]):
    """Only the objective, task after task."""

    recapture = "never"


class Multitask(Finetune):
    """Only the objective, on all tasks at once: an upper bound without forgetting."""

    joint = True
