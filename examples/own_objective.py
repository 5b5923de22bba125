"""An objective and a method of your own, in a run that tests, reports and resumes like any other.

    python examples/own_objective.py runs/own

An objective is a loss of the views' features; a method says how forgetting is fought. CONTRIBUTING.md has the
contracts.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits

import ptlf
from ptlf.core.settings import key
from ptlf.methods import Method, MethodConfig
from ptlf.objectives import Objective, ObjectiveConfig


@dataclass
class AlignConfig(ObjectiveConfig):
    name: str = "own_objective:Align"
    spread: float = key(1.0, "weight of the term that keeps features apart", ge=0)


class Align(Objective[AlignConfig]):
    """The views of an image close together, features apart."""

    Config = AlignConfig

    def loss(self, features, batch):
        first, second = features
        return (first - second).square().mean() - self.config.spread * first.std(0).clamp(max=1).mean()


@dataclass
class ShortConfig(MethodConfig):
    name: str = "own_objective:Short"
    weight: float = key(0.01, "weight of the features' squared length", ge=0)


class Short(Method[ShortConfig]):
    """The objective, and short features."""

    Config = ShortConfig

    def losses(self, model, batch):
        features = model.encode(batch.mixed)
        length = torch.stack([feature.square().mean() for feature in features]).mean()
        return {"ssl": model.loss(features, batch), "length": self.config.weight * length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    data = load_digits()
    images = np.repeat((data.images * 15.9).astype(np.uint8)[..., None], 3, -1)
    settings = {"views.name": "digits", "training.epochs": options.epochs, "objective.spread": 2.0}
    learner = ptlf.Learner("resnet18-mini", AlignConfig.name, ShortConfig.name, options.out, size=8, **settings)
    for day in range(2):
        losses = learner.learn(images[day::2])["cost"]["per_epoch"]["loss"]
    print({name: [round(value, 3) for value in values if value is not None] for name, values in losses.items()})


if __name__ == "__main__":
    main()
