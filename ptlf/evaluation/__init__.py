"""Probes of frozen features, and what an accuracy matrix says."""

from ptlf.evaluation.gallery import Gallery
from ptlf.evaluation.metrics import accuracy, forward_transfer, summary
from ptlf.evaluation.prober import PROBES, EvaluationConfig, Prober
from ptlf.evaluation.probes import OWN, SEEN, Probe, ProbeConfig

__all__ = ["OWN", "PROBES", "SEEN", "EvaluationConfig", "Gallery", "Probe", "ProbeConfig", "Prober"]
__all__ += ["accuracy", "forward_transfer", "summary"]
