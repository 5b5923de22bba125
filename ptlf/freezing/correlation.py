"""Task-correlation ratios: the share of a new task's gradient that lies in the input subspace of past tasks.

The columns of R (m x n) are the inputs of a unit's layer on the replay images: patches of a convolution, vectors of a
linear layer. B (m x k) are the leading left singular vectors of R, G (C_out x m) is the new task's weight gradient, and
the ratio is ||G B||_F / ||G||_F in [0, 1]. Groups and the four projections of an attention each have their own R.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ptlf.freezing.recording import unchanged
from ptlf.freezing.subspace import as_matrix, check_finite, inputs_of, parts, passes, projection_ratio, replay_inputs
from ptlf.freezing.units import Unit, trained_units

GradientFn = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]  # of weights; None if one has no part in the loss


def correlation_ratios(
    module: nn.Module,
    replay: Tensor | Iterable[Tensor],
    loss_fn: Callable[[], Tensor],
    threshold: float = 0.99,
    **options: Any,
) -> dict[str, float]:
    """Ratio by unit name, at the module's current weights. Arguments and `options` are those of `TaskCorrelation`."""
    ratios = TaskCorrelation(module, replay, loss_fn, threshold, **options)
    return ratios(list(ratios.units))


class TaskCorrelation:
    """Call it with unit names to compute their ratios at the module's current weights; each is computed once.

    replay: inputs (N, ...) of past tasks, one tensor or several; forwarded in eval mode, `chunk` images at a time.
    loss_fn: returns the loss on a batch of the new task. The constructor calls it `batches` times, in the module's
        current mode, and averages the weight gradients.
    threshold: fraction of the inputs' energy that the kept singular vectors must reach.
    reach: False keeps one singular vector fewer: they stay below the threshold, as in the code of GPM and TRGP.
    units: trainable units; by default all of the module, found by a forward of `example`, or of the first inputs.
    gradient_fn: in place of loss_fn, returns the gradients of the given weights on a batch of the task.
    keep: further modules that `loss_fn` changes, such as heads with batch norm, a momentum encoder or a queue.
    combine: changes the averaged gradients in place, for example to average them over processes.

    All that a forward changes in the modules is restored, and torch's global random state, even if `loss_fn` raises.
    Generators that `loss_fn` owns do advance.

    Memory: the replay is forwarded several times if the Gram matrices R R^T (m x m, float64) exceed 512 MiB and, on a
    GPU, an eighth of what is free. An eigendecomposition takes about three times the largest.

    Rounding: on a CPU the products and eigendecompositions are float32, see `product_dtype`. Elsewhere, for a
    threshold above 0.999 and for a model in float64 all is float64.

    `directions` holds the number of singular vectors kept, by unit name. A unit without gradient or input has ratio 0.
    """

    def __init__(
        self,
        module: nn.Module,
        replay: Tensor | Iterable[Tensor],
        loss_fn: Callable[[], Tensor] | None,
        threshold: float = 0.99,
        *,
        reach: bool = True,
        units: Sequence[Unit] | None = None,
        example: Any = None,
        gradient_fn: GradientFn | None = None,
        batches: int = 8,
        chunk: int = 64,
        keep: Sequence[nn.Module] = (),
        combine: Callable[[list[Tensor]], None] = lambda gradients: None,
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], not {threshold}")
        if isinstance(replay, Tensor | Iterator):
            replay = [replay] if isinstance(replay, Tensor) else list(replay)  # forwarded more than once
        if units is None:
            device = next(module.parameters()).device
            first = (inputs[:2].to(device) for inputs in inputs_of(replay))
            units = trained_units(module, next(first, None) if example is None else example)
        if gradient_fn is None:
            assert loss_fn is not None
            gradient_fn = partial(gradients_of, loss_fn)
        self.module, self.replay, self.threshold, self.reach = module, replay, threshold, reach
        self.units, self.chunk = {unit.name: unit for unit in units}, chunk
        self.known: dict[str, float] = {}  # the ratios computed so far
        self.directions: dict[str, int] = {}
        # Uncached, a parametrised weight is a new tensor at every access.
        with unchanged(module, *keep), parametrize.cached():
            self.gradients = mean_gradients(units, gradient_fn, batches)
            combine([gradient for gradients in self.gradients.values() for gradient in gradients])

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        """Ratio by unit name."""
        ratios: dict[str, Tensor] = {}
        for group in passes([self.units[name] for name in names if name not in self.known]):
            with unchanged(self.module), torch.no_grad():
                inputs = replay_inputs(self.module, group, self.replay, self.chunk, self.threshold)
            for unit in group:
                # The Gram matrices are let go of one by one.
                bases = [some.basis(self.threshold, self.reach) for some in inputs.pop(unit.name)]
                ratios[unit.name] = projection_ratio(self.gradients[unit.name], bases)
                self.directions[unit.name] = sum(basis.shape[-1] for basis in bases)
        if ratios:  # one transfer for all
            self.known |= zip(ratios, torch.stack(list(ratios.values())).tolist(), strict=True)
        return {name: self.known[name] for name in names}


def gradients_of(loss_fn: Callable[[], Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """For one call of `loss_fn`."""
    with torch.enable_grad():
        loss = loss_fn()
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return the loss, a tensor, and returned a {type(loss).__name__}")
        return torch.autograd.grad(loss, weights, allow_unused=True)


def mean_gradients(units: Sequence[Unit], gradient_fn: GradientFn, batches: int) -> dict[str, list[Tensor]]:
    """By unit name, the weight gradient (groups, C_out / groups, m) of each product: the mean of `batches`, float64."""
    owners = [(unit.name, weight) for unit in units for weight in unit.weights]
    weights = [weight for _, weight in owners]
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for _ in range(batches if units else 0):
        for (name, weight), total, gradient in zip(owners, sums, gradient_fn(weights), strict=True):
            if gradient is not None:
                total += gradient
            elif not weight.is_leaf:
                hooked = f"the weight of unit {name!r} is computed by a hook, such as weight_norm's or prune's"
                raise ValueError(f"{hooked}, and has no gradient; use torch.nn.utils.parametrizations")
    named = [(name, total) for (name, _), total in zip(owners, sums, strict=True)]
    check_finite(named, "the new task's gradient for unit {!r} is not finite")
    means = {weight: total / batches for weight, total in zip(weights, sums, strict=True)}
    return {unit.name: [as_matrix(part, means[part.weight]) for part in parts(unit.layer)] for unit in units}
