"""An upper bound of a wide unit's ratio, which costs less than the ratio."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ptlf.freezing.products import fan_in, parts
from ptlf.freezing.subspace import Inputs
from ptlf.freezing.units import Unit

WIDE = 4000  # m from which a bound of the ratio is looked at before the ratio


def is_wide(unit: Unit) -> bool:
    return max(map(fan_in, parts(unit.layer))) >= WIDE


def upper_bound(gradients: Sequence[Tensor], inputs: Sequence[Inputs], threshold: float) -> Tensor:
    """A number that the ratio does not exceed, by a Cholesky decomposition in place of eigenvectors; a tensor on the
    device.

    Eigenvectors of R R^T with an eigenvalue of at most e = (1 - threshold) * trace / m are not kept: together they
    have no more than 1 - threshold of the energy. f(x) = (s / (s + x))^4 with s = e / 9 is at most 1, and at most 1e-4
    on the kept ones, whose eigenvalues are larger than e. So the share q of G in f(R R^T), tr(G f G^T) / tr(G G^T), is
    at most o + 1e-4 (1 - o), where o is the share outside of the kept directions, and the ratio is sqrt(1 - o).
    """
    norm = torch.cat([gradient.flatten() for gradient in gradients]).square().sum()
    outside = torch.zeros_like(norm)
    for gradient, some in zip(gradients, inputs, strict=True):
        if some.gram is None:
            return torch.ones_like(norm)
        shift = (1 - threshold) * some.gram.diagonal(dim1=-2, dim2=-1).mean(-1) / 9  # (groups,)
        shifted = some.gram.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        factor, failed = torch.linalg.cholesky_ex(shifted)
        filtered = gradient.mT  # (groups, m, C_out)
        for _ in range(2):
            filtered = torch.cholesky_solve(filtered, factor) * shift[:, None, None]
        # Without a decomposition (all inputs zero, a threshold of 1) nothing is known to lie outside.
        outside += torch.where(failed == 0, filtered.square().sum((-2, -1)), 0).nan_to_num(0).sum()
    share = outside / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    least = ((share - 1e-4) / (1 - 1e-4) - 1e-6).clamp(0, 1)  # 1e-6: more than rounding makes of it
    return (1 - least).sqrt()
