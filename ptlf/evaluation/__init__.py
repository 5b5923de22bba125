"""Probes of frozen features, and what an accuracy matrix says."""

from __future__ import annotations

from ptlf.evaluation.accuracy_matrix import (
    accuracy,
    backward_transfer,
    forgetting,
    forgetting_just_learned,
    forward_transfer,
    summary,
)
from ptlf.evaluation.gallery import Gallery
from ptlf.evaluation.knn import knn_accuracy, knn_predict
from ptlf.evaluation.probe import OWN, SEEN, Probe, ProbeConfig
from ptlf.evaluation.prober import EvaluationConfig, Prober
from ptlf.evaluation.probes import PROBES

__all__ = [
    "OWN",
    "PROBES",
    "SEEN",
    "EvaluationConfig",
    "Gallery",
    "Probe",
    "ProbeConfig",
    "Prober",
    "accuracy",
    "backward_transfer",
    "forgetting",
    "forgetting_just_learned",
    "forward_transfer",
    "knn_accuracy",
    "knn_predict",
    "summary",
]
