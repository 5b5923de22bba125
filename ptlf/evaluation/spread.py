"""What features are like without labels: their spread, which detects collapse, and their effective rank."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

COLLAPSED = 1e-3  # encoders that learn have 0.1 to 0.5, or 0.01 while running statistics of norms lag behind


def spaced(indices: np.ndarray, most: int) -> np.ndarray:
    """At most `most` indices, evenly spaced from the first: images sorted by class are all represented."""
    count = min(most, len(indices))
    return indices[np.arange(count) * len(indices) // max(1, count)]


def spread(features: Tensor) -> float:
    """Standard deviation over the images of their L2-normalised features (N, D), averaged over D, times sqrt(D).

    1: directions are spread evenly; 0: all features have the same direction.
    """
    normalised = F.normalize(features, dim=1)
    return float(normalised.std(0, correction=0).mean() * features.shape[1] ** 0.5)


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the singular values of features (N, D), divided by their sum: between 1 and min(N, D).

    How many directions the features use, as RankMe (Garrido et al., 2023) measures it.
    """
    values = torch.linalg.svdvals(features.double())
    shares = values / values.sum().clamp_min(1e-300)
    return float(torch.special.entr(shares).sum().exp())
