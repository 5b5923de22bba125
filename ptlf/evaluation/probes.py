"""Probes by name. To add one: a file with a subclass of `Probe`, and a line here."""

from ptlf.core.registry import Registry
from ptlf.evaluation.knn import KnnClass, KnnTask
from ptlf.evaluation.linear import Linear
from ptlf.evaluation.probe import Probe

PROBES: Registry[type[Probe]] = Registry(
    "probe", "ptlf.probes", Probe, {"knn_task": KnnTask, "knn_class": KnnClass, "linear": Linear}
)
