"""The probe's contract: fitted on features of training images, it scores features of test images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from ptlf.core.settings import as_dict, key

Score = Callable[[Tensor, Tensor], float]  # features (N, D) and labels (N,) -> accuracy in per cent

# The banks: the training images that a split is tested against.
OWN, SEEN = "training images of the split's own task", "training images of all classes seen"


@dataclass
class ProbeConfig:
    enabled: bool = key(False, "test the encoder with this probe after every task")


C = TypeVar("C", bound=ProbeConfig)


class Probe(Generic[C]):
    """Every row of `rows` becomes an accuracy matrix of the record."""

    Config: ClassVar[type[ProbeConfig]] = ProbeConfig
    rows: ClassVar[Mapping[str, str]]  # name of the row -> OWN or SEEN
    forward: ClassVar[bool] = False  # its OWN rows are also taken on the next task, for forward transfer

    def __init__(self, config: C) -> None:
        self.config = config

    def used(self, labels: Tensor, seen_tasks: int) -> dict[str, Any]:
        """Settings that depend on the bank, as `fit` uses them with these labels (N,); for the record."""
        return {}

    def fit(self, features: Tensor, labels: Tensor, seen_tasks: int) -> Score:
        """From a bank's features (N, D) and labels (N,). The same bank must give the same score every time."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the accuracies were measured with, for the record."""
        return as_dict(self.config)


def per_cent_equal(predicted: Tensor, labels: Tensor) -> float:
    return 100 * float((predicted == labels).double().mean())
