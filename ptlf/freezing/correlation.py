"""Task-correlation ratios: the share of a new task's gradient that lies in the input subspace of past tasks.

For a unit's layer, the columns of R (m x n) are the layer's inputs on the replay images: flattened patches for a
convolution, vectors for a linear layer. B (m x k) are the leading left singular vectors of R, G (C_out x m) is the
new task's weight gradient, and the ratio is ||G B||_F / ||G||_F in [0, 1].
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ptlf.freezing.kernels import pad
from ptlf.freezing.units import Layer, Unit, trained_units, unchanged

COLUMN_BYTES = 64 * 2**20  # of R in memory at once, unless a single image needs more


def correlation_ratios(
    module: nn.Module,
    replay: Tensor | Iterable[Tensor],
    loss_fn: Callable[[], Tensor],
    threshold: float = 0.99,
    *,
    units: Sequence[Unit] | None = None,
    example: Any = None,
    **options: Any,
) -> dict[str, float]:
    """Ratio by unit name, at the module's current weights.

    units: trainable units; by default all trainable units of the module, found by a forward of `example`, or of the
    first replay inputs. The other arguments are those of `TaskCorrelation`.
    """
    replay = list(replay) if isinstance(replay, Iterator) else replay
    if units is None:
        if example is None:
            device = next(module.parameters()).device
            example = next((inputs[:2].to(device) for inputs in inputs_of(replay)), None)
        units = trained_units(module, example)
    return TaskCorrelation(module, replay, loss_fn, threshold, units=units, **options)([unit.name for unit in units])


class TaskCorrelation:
    """Call it with unit names to compute their ratios at the module's current weights.

    replay: inputs (N, ...) of past tasks, one tensor or several; forwarded in eval mode, `chunk` images at a time.
    loss_fn: returns the loss on a batch of the new task. The constructor calls it `batches` times, in the module's
        current mode, and averages the weight gradients.
    threshold: fraction of the inputs' energy that the kept singular vectors must reach.
    keep: further modules that `loss_fn` changes, such as heads with batch norm, a momentum encoder or a queue.
    combine: changes the averaged gradients in place, for example to average them over processes.
    at_once: forward the replay once, with all Gram matrices in memory. Default: if all Gram matrices take less than an
        eighth of the GPU's free memory.

    Parameters, buffers (batch-norm statistics), `.grad`, modes, hooks and torch's global random state are restored,
    even if `loss_fn` raises. Generators that `loss_fn` owns do advance.

    Memory: without `at_once` the replay is forwarded several times, so that the Gram matrices R R^T (m x m, float64) in
    memory never exceed the largest one. Add the activations of one chunk, `COLUMN_BYTES` of R, the eigendecomposition
    of one Gram matrix (about three times its size), one float64 gradient per weight, and a copy of the parameters and
    buffers.

    `directions` holds the number of singular vectors kept, by unit name. A unit without a gradient, or whose inputs are
    all zero or never seen, has ratio 0: see `projection_ratio`.
    """

    def __init__(
        self,
        module: nn.Module,
        replay: Tensor | Iterable[Tensor],
        loss_fn: Callable[[], Tensor],
        threshold: float = 0.99,
        *,
        units: Sequence[Unit],
        batches: int = 8,
        chunk: int = 64,
        keep: Sequence[nn.Module] = (),
        combine: Callable[[list[Tensor]], None] = lambda gradients: None,
        at_once: bool | None = None,
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], not {threshold}")
        if batches < 1 or chunk < 1:
            raise ValueError(f"batches and chunk must be at least 1, not {batches} and {chunk}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function that returns the loss, not a {type(loss_fn).__name__}")
        if not isinstance(replay, Iterable):
            raise TypeError(f"replay must be a tensor of inputs, or several, not a {type(replay).__name__}")
        if isinstance(replay, Tensor | Iterator):
            replay = [replay] if isinstance(replay, Tensor) else list(replay)  # forwarded more than once
        self.module, self.replay, self.threshold = module, replay, threshold
        self.units, self.chunk, self.at_once = {unit.name: unit for unit in units}, chunk, at_once
        self.directions: dict[str, int] = {}
        # Uncached, a parametrised weight is a new tensor at every access.
        with unchanged(module, *keep), parametrize.cached():
            self.gradients = mean_gradients(units, loss_fn, batches)
            combine(list(self.gradients.values()))

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        """Ratio by unit name."""
        units = [self.units[name] for name in names]
        at_once = fit_at_once(units) if self.at_once is None else self.at_once
        ratios: dict[str, Tensor] = {}
        with unchanged(self.module), torch.no_grad():
            for group in [units] if units and at_once else passes(units):
                grams = replay_grams(self.module, group, self.replay, self.chunk)
                for unit in group:
                    basis = leading_eigenvectors(grams.pop(unit.name), self.threshold)
                    ratios[unit.name] = projection_ratio(self.gradients[unit.name], basis)
                    self.directions[unit.name] = basis.shape[-1]
        values = torch.stack(list(ratios.values())).tolist() if ratios else []
        return dict(zip(ratios, values, strict=True))


def mean_gradients(units: Sequence[Unit], loss_fn: Callable[[], Tensor], batches: int) -> dict[str, Tensor]:
    """Weight gradient (groups, C_out / groups, m) by unit name, float64, averaged over `batches` calls of `loss_fn`."""
    weights = {unit.name: unit.layer.weight for unit in units}
    for name, weight in weights.items():
        if not weight.requires_grad:
            raise ValueError(f"unit {name!r} is frozen and has no gradient; leave it out of the units")
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
    for _ in range(batches if units else 0):
        with torch.enable_grad():
            loss = loss_fn()
            if not isinstance(loss, Tensor):
                raise TypeError(f"loss_fn must return the loss, a tensor, and returned a {type(loss).__name__}")
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                sums[name] += gradient
            elif not weights[name].is_leaf:
                raise ValueError(
                    f"the weight of unit {name!r} is computed anew in every forward, so it has no gradient; use "
                    "torch.nn.utils.parametrizations instead of hooks such as weight_norm or prune"
                )
    check_finite(sums, "the new task's gradient for unit {!r} is not finite")
    return {u.name: (sums[u.name] / batches).reshape(groups(u.layer), -1, fan_in(u.layer)) for u in units}


def replay_grams(module: nn.Module, units: Sequence[Unit], replay: Iterable[Tensor], chunk: int) -> dict[str, Tensor]:
    """Gram matrix (groups, m, m) by unit name, summed over the replay and over all calls of the layer in a forward."""
    grams = {unit.name: empty_gram(unit.layer) for unit in units}
    device = units[0].layer.weight.device
    count = 0
    with watched(module, units, lambda unit, inputs, output: add_gram(grams[unit.name], unit.layer, inputs)):
        for images in inputs_of(replay):
            for piece in images.split(chunk) if len(images) else ():
                module(piece.to(device))
                count += len(piece)
    if count == 0:
        raise ValueError("the replay is empty; it must hold at least one input")
    check_finite(grams, "the replay's inputs to unit {!r} are not finite")
    return grams


@contextmanager
def watched(module: nn.Module, units: Sequence[Unit], see: Callable[[Unit, Tensor, Tensor], object]) -> Iterator[None]:
    """Puts the module in eval mode. Inside, `see(unit, input, output)` is called after every call of a unit's layer."""

    def hook(unit: Unit, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        see(unit, args[0] if args else kwargs["input"], output)

    with ExitStack() as stack:
        for part in module.modules():
            part.training = False
        for unit in units:
            stack.callback(unit.layer.register_forward_hook(partial(hook, unit), with_kwargs=True).remove)
        # A compiled module may have been traced without the hooks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def inputs_of(replay: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    for inputs in [replay] if isinstance(replay, Tensor) else replay:
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"the replay must hold tensors of inputs, and holds a {type(inputs).__name__}; if a loader yields "
                "labels too, pass only the inputs: [x for x, _ in loader]"
            )
        yield inputs


def check_finite(tensors: dict[str, Tensor], message: str) -> None:
    """Raise for the first tensor with a NaN or infinity. Waits for the device once."""
    finite = torch.stack([tensor.isfinite().all() for tensor in tensors.values()]).tolist() if tensors else []
    for name, fine in zip(tensors, finite, strict=True):
        if not fine:
            raise ValueError(message.format(name))


def empty_gram(layer: Layer) -> Tensor:
    m = fan_in(layer)
    return torch.zeros(groups(layer), m, m, dtype=torch.float64, device=layer.weight.device)


def add_gram(total: Tensor, layer: Layer, inputs: Tensor) -> Tensor:
    """Add R R^T (groups, m, m) of one call of the layer. Each group of a convolution has its own inputs."""
    # In float64: an error of 1e-7 of the energy, as in float32, can change the number of directions kept.
    for block in columns(layer, inputs.detach()):
        total.baddbmm_(block, block.mT)
    return total


def columns(layer: Layer, inputs: Tensor) -> Iterator[Tensor]:
    """R in blocks (groups, m, n) of float64, a few images at a time."""
    if isinstance(layer, nn.Linear):
        vectors = inputs.reshape(-1, layer.in_features)  # (n, m)
        for rows in vectors.split(max(1, COLUMN_BYTES // (8 * layer.in_features))):
            yield rows.double().T[None]
        return
    images = inputs if inputs.ndim == 4 else inputs[None]
    height, width = pad(layer, images[:1]).shape[2:]
    positions = -(-height // layer.stride[0]) * -(-width // layer.stride[1])  # of one image, at most
    step = max(1, COLUMN_BYTES // (8 * groups(layer) * fan_in(layer) * positions))
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    for part in images.split(step):
        # The input patches as a strided view (b, C_in, rows, columns, kh, kw). Copying it is one GPU kernel; `F.unfold`
        # launches one per image.
        padded = pad(layer, part.double()).contiguous()
        patches = padded.unfold(2, spans[0], layer.stride[0]).unfold(3, spans[1], layer.stride[1])
        patches = patches[..., :: layer.dilation[0], :: layer.dilation[1]]
        # Rows are ordered as in weight.reshape(C_out, -1).
        yield patches.permute(1, 4, 5, 0, 2, 3).reshape(groups(layer), fan_in(layer), -1)


def leading_eigenvectors(gram: Tensor, threshold: float) -> Tensor:
    """Orthonormal columns (..., m, k): the fewest eigenvectors whose eigenvalues sum to `threshold` of the trace.

    All Gram matrices (..., m, m) of a batch share k, the largest number needed; columns that one does not need are 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(-1), vectors.flip(-1)  # now descending
    sums = values.cumsum(-1)
    before = F.pad(sums[..., :-1], (1, 0))  # energy of the eigenvectors before this one
    # The slack exceeds the rounding error of summing a few thousand eigenvalues. It lets an energy equal to the
    # threshold count as reached, and keeps a threshold of 1 from including the null space.
    wanted = before < threshold * (1 - 1e-11) * sums[..., -1:]
    k = int(wanted.sum(-1).max())
    return vectors[..., :k] * wanted[..., None, :k]


def fit_at_once(units: Sequence[Unit]) -> bool:
    device = units[0].layer.weight.device if units else torch.device("cpu")
    return device.type == "cuda" and 8 * 8 * sum(map(gram_size, units)) < torch.cuda.mem_get_info(device)[0]


def projection_ratio(gradient: Tensor, basis: Tensor) -> Tensor:
    """||G B||_F / ||G||_F for G (..., C_out, m) and B (..., m, k), over all groups together; a tensor on the device.

    A zero gradient gives 0, not 1: it mostly belongs to a unit that the loss does not reach, and freezing that unit
    would save nothing.
    """
    gradient = gradient.to(basis.dtype)
    norm = gradient.norm().clamp(min=torch.finfo(gradient.dtype).tiny)
    return ((gradient @ basis).norm() / norm).clamp(max=1.0)


def passes(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Groups of consecutive units whose Gram matrices together are no larger than the largest single one."""
    largest = max(map(gram_size, units), default=0)
    group: list[Unit] = []
    for unit in units:
        if group and sum(map(gram_size, [*group, unit])) > largest:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def gram_size(unit: Unit) -> int:
    """Elements of the Gram matrix."""
    return groups(unit.layer) * fan_in(unit.layer) ** 2


def groups(layer: Layer) -> int:
    return layer.groups if isinstance(layer, nn.Conv2d) else 1


def fan_in(layer: Layer) -> int:
    """m, the length of a column of R."""
    return layer.weight.shape[1:].numel()
