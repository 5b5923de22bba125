"""One member of every family, each with a setting of its own, as a package of somebody else's would hold them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ptlf.core.settings import key
from ptlf.encoders import EncoderConfig, EncoderEntry
from ptlf.evaluation import SEEN, Probe, ProbeConfig
from ptlf.freezing import Policy, PolicyConfig
from ptlf.methods import Method, MethodConfig
from ptlf.objectives import Objective, ObjectiveConfig
from ptlf.stream import Dataset, Images, StreamConfig, StreamEntry
from ptlf.training.optimizers import OptimizerConfig, UpdateRule


@dataclass
class AlignConfig(ObjectiveConfig):
    spread: float = key(1.0, "weight of the term that keeps features apart", ge=0)


class Align(Objective):
    """Views of an image close together, features apart."""

    Config = AlignConfig

    def loss(self, features, batch):
        first, second = features
        return (first - second).square().mean() - self.config.spread * first.std(0).clamp(max=1).mean()


@dataclass
class ShrinkConfig(MethodConfig):
    shrink: float = key(0.01, "weight of the features' squared length", ge=0)


class Shrink(Method):
    """The objective, and short features."""

    Config = ShrinkConfig

    def losses(self, model, batch):
        features = model.encode(batch.mixed)
        length = torch.stack([f.square().mean() for f in features]).mean()
        return {"ssl": model.loss(features, batch), "length": self.config.shrink * length}


@dataclass
class TinyConfig(EncoderConfig):
    channels: int = key(6, "channels of every layer", ge=1)


def make_tiny(config):
    c = config.channels
    layers = [nn.Conv2d(3, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, 2, 1), nn.BatchNorm2d(c)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@dataclass
class DescendingConfig(PolicyConfig):
    skip: int = key(0, "units before the output that never freeze", ge=0)


class Descending(Policy):
    """From the output downwards."""

    Config = DescendingConfig

    def choose(self, count, candidates, frozen, context):
        last = context.units[len(context.units) - self.config.skip :]
        return [name for name in reversed(candidates) if name not in last][:count]


@dataclass
class CentroidConfig(ProbeConfig):
    power: float = key(2.0, "of the distance's norm", gt=0)


class Centroid(Probe):
    """The class whose mean is nearest."""

    Config = CentroidConfig
    rows = {"centroid": SEEN}  # noqa: RUF012

    def fit(self, features, labels, seen_tasks):
        classes = labels.unique()
        means = torch.stack([features[labels == label].mean(0) for label in classes])

        def score(queries, wanted):
            found = classes[torch.cdist(queries, means, p=self.config.power).argmin(1)]
            return 100 * float((found == wanted).double().mean())

        return score


@dataclass
class RMSpropConfig(OptimizerConfig):
    alpha: float = key(0.99, "decay of the squared gradient's running mean", ge=0, le=1)


class RMSprop(UpdateRule):
    """Steps divided by the gradient's root mean square."""

    Config = RMSpropConfig

    @staticmethod
    def make(config, parameters, lr):
        return torch.optim.RMSprop(parameters, lr, alpha=config.alpha, capturable=isinstance(lr, torch.Tensor))


@dataclass
class StripesConfig(StreamConfig):
    contrast: int = key(60, "between dark and bright stripes, of 255", ge=1, le=255)


def make_stripes(config):
    random = np.random.default_rng(0)

    def images(each):
        labels = np.arange(4).repeat(each)
        pixels = random.integers(0, 100, (len(labels), 8, 8, 3))
        for image, label in zip(pixels, labels, strict=True):
            image[label :: label + 2] += config.contrast
        return Images(pixels.clip(0, 255).astype(np.uint8), labels)

    return Dataset("stripes", tuple("abcd"), images(16), images(8))


TINY = EncoderEntry(make_tiny, TinyConfig, "two convolutions")
STRIPES = StreamEntry(
    "stripes, 2 tasks x 2 classes", tasks=2, embedded=make_stripes, Config=StripesConfig, protocol="digits"
)


def leaves() -> None:
    raise SystemExit(0)
