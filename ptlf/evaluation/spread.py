"""Spread of an encoder's features, which detects collapse: all images mapped to the same vector."""

from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.evaluation.prober import testing

COLLAPSED = 1e-3  # encoders that learn have 0.1 to 0.5, or 0.01 while running statistics of norms lag behind


def feature_spread(encoder: nn.Module, images: Tensor) -> float:
    """Standard deviation over the images of their L2-normalised features (N, D), averaged over D, times sqrt(D).

    1: directions are spread evenly; 0: all features have the same direction. `images` are inputs of the encoder.
    """
    with testing(encoder):
        features = F.normalize(encoder(images).float().flatten(1), dim=1)
        return float(features.std(0, correction=0).mean() * features.shape[1] ** 0.5)
