"""How far apart an encoder's features lie: the figure that shows a collapse, when every image gets the same vector."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ptlf.evaluation.prober import testing

COLLAPSED = 1e-3  # encoders that learn have 0.1 to 0.5; norms whose running statistics lag behind can make that 0.01


def feature_spread(encoder: nn.Module, images: Tensor) -> float:
    """Std over the images of their features (N, D) of length one, averaged over D, times sqrt(D).

    1 where directions are spread evenly, 0 where all images have one direction. `images` are inputs of the encoder.
    """
    with testing(encoder):
        features = F.normalize(encoder(images).float().flatten(1), dim=1)
        return float(features.std(0, correction=0).mean() * features.shape[1] ** 0.5)
