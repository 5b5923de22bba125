"""Task-correlation ratios: the share of a new task's gradient that lies in the input subspace of past tasks.

For a unit's layer, the columns of R (m x n) are the layer's inputs on the replay images: flattened patches for a
convolution, vectors (of every token) for a linear layer. B (m x k) are the leading left singular vectors of R, G
(C_out x m) is the new task's weight gradient, and the ratio is ||G B||_F / ||G||_F in [0, 1]. The groups of a
convolution and the four projections of `nn.MultiheadAttention` each have their own R; their norms are added up.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ptlf.freezing.kernels import pad
from ptlf.freezing.units import Convolution, Layer, Unit, storage, trained_units, unchanged

TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
COLUMN_BYTES = 64 * 2**20  # of R in memory at once, unless a single image needs more
WIDE = 4000  # m from which a bound of the ratio is looked at before the ratio
WORKERS = 4  # threads that decompose Gram matrices on the host


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
    background: whether `start` may have ratios computed by threads of the host. Default: for a module on a GPU.

    Parameters, buffers (batch-norm statistics), `.grad`, modes, hooks and torch's global random state are restored,
    even if `loss_fn` raises. Generators that `loss_fn` owns do advance.

    Memory: without `at_once` the replay is forwarded several times, so that the Gram matrices R R^T (m x m, float64) in
    memory never exceed the largest one. Add the activations of one chunk, `COLUMN_BYTES` of R, the eigendecomposition
    of one Gram matrix (about three times its size), one float64 gradient per weight, and a copy of the parameters and
    buffers.

    `directions` holds the number of singular vectors kept, by unit name. A unit without a gradient, or whose inputs are
    all zero or never seen, has ratio 0: see `projection_ratio`. `background_seconds` are those of the threads together.
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
        background: bool | None = None,
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
        self.background = on_gpu(units) if background is None else background
        self.directions: dict[str, int] = {}
        self.seen: dict[str, list[Inputs]] = {}  # of units whose ratio nobody has asked for yet
        self.started: dict[str, Future[tuple[Tensor, int, float]]] = {}
        # What the threads read: held here, so that pinned memory is freed by the training thread.
        self.lent: dict[str, Any] = {}
        self.background_seconds = 0.0
        # Uncached, a parametrised weight is a new tensor at every access.
        with unchanged(module, *keep), parametrize.cached():
            self.gradients = mean_gradients(units, loss_fn, batches)
            combine([gradient for gradients in self.gradients.values() for gradient in gradients])

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        """Ratio by unit name."""
        ratios: dict[str, Tensor] = {}
        for name in [name for name in names if name in self.started]:
            ratios[name], self.directions[name], seconds = self.started.pop(name).result()
            self.background_seconds += seconds
            del self.lent[name]
            torch.set_num_threads(torch.get_num_threads())  # for threads to come: those that computed this changed it
        for name, inputs in self.inputs([name for name in names if name not in ratios]):
            ratios[name], self.directions[name] = ratio_of(self.gradients[name], inputs, self.threshold)
            del inputs  # before the next Gram matrices are made
        if not ratios:
            return {}
        device = self.gradients[names[0]][0].device  # one transfer for all
        found = torch.stack([ratios[name].to(device) for name in names]).tolist()
        return dict(zip(names, found, strict=True))

    def bounds(self, names: Sequence[str]) -> dict[str, float]:
        """Upper bounds of the ratios of wide units, by name: see `upper_bound`."""
        if self.fits([self.units[name] for name in names]):
            self.see([name for name in names if name not in self.seen and name not in self.started])
        wide = [name for name in names if name not in self.started and is_wide(self.units[name])]
        found: dict[str, Tensor] = {}
        for name, inputs in self.inputs(wide, keep=True):
            found[name] = upper_bound(self.gradients[name], inputs, self.threshold)
            del inputs
        values = torch.stack(list(found.values())).tolist() if found else []
        return dict(zip(found, values, strict=True))

    def start(self, names: Sequence[str]) -> bool:
        """Have threads of the host compute the ratios of units that are not wide; `__call__` waits for them. The Gram
        matrices are made here and now, so that the module may be trained meanwhile. Whether that can be: all Gram
        matrices are in memory at once."""
        units = [self.units[name] for name in names]
        if not self.background or not self.fits(units):
            return False
        self.see(names)
        narrow = sorted((unit for unit in units if not is_wide(unit)), key=gram_size, reverse=True)
        work = {unit.name: [inputs.on_host() for inputs in self.seen.pop(unit.name)] for unit in narrow}
        gradients = {name: [host_copy(gradient) for gradient in self.gradients[name]] for name in work}
        if on_gpu(units):
            torch.cuda.current_stream(units[0].weights[0].device).synchronize()  # the copies are done
        # From here on the threads use no GPU: meanwhile the training thread may be capturing a graph.
        pool = ThreadPoolExecutor(WORKERS, "correlation", torch.set_num_threads, (host_threads(),))
        for name, inputs in work.items():
            self.lent[name] = gradients[name], inputs
            self.started[name] = pool.submit(timed_ratio, gradients[name], inputs, self.threshold)
        pool.shutdown(wait=False)
        return True

    def fits(self, units: Sequence[Unit]) -> bool:
        """Whether all Gram matrices may be in memory together."""
        return bool(units) and (fit_at_once(units) if self.at_once is None else self.at_once)

    def see(self, names: Sequence[str]) -> None:
        """Forward the replay once, and keep what the units' layers are given."""
        if names:
            with unchanged(self.module), torch.no_grad():
                units = [self.units[name] for name in names]
                self.seen |= replay_inputs(self.module, units, self.replay, self.chunk)

    def inputs(self, names: Sequence[str], *, keep: bool = False) -> Iterator[tuple[str, list["Inputs"]]]:
        """What the units' layers are given, as kept, or from as many forwards as memory asks for. keep: those that were
        kept stay."""
        for name in [name for name in names if name in self.seen]:
            yield name, self.seen[name] if keep else self.seen.pop(name)
            names = [other for other in names if other != name]
        units = [self.units[name] for name in names]
        for group in [units] if self.fits(units) else passes(units):
            with unchanged(self.module), torch.no_grad():
                seen = replay_inputs(self.module, group, self.replay, self.chunk)
            for unit in group:
                yield unit.name, seen.pop(unit.name)


def ratio_of(gradients: Sequence[Tensor], inputs: Sequence["Inputs"], threshold: float) -> tuple[Tensor, int]:
    """The ratio, a tensor on the device, and the number of singular vectors kept."""
    bases = [some.basis(threshold) for some in inputs]
    return projection_ratio(gradients, bases), sum(basis.shape[-1] for basis in bases)


@torch.no_grad()
def timed_ratio(gradients: Sequence[Tensor], inputs: Sequence["Inputs"], threshold: float) -> tuple[Tensor, int, float]:
    """In a thread; and the seconds it took."""
    began = time.perf_counter()
    return *ratio_of(gradients, inputs, threshold), time.perf_counter() - began


def host_threads() -> int:
    """Of each worker: together with the training thread and a spare one they take all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - 2) // WORKERS)


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor on the host; a copy from a GPU has only begun."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def on_gpu(units: Sequence[Unit]) -> bool:
    return bool(units) and units[0].weights[0].is_cuda


def is_wide(unit: Unit) -> bool:
    return max(map(fan_in, parts(unit.layer))) >= WIDE


def upper_bound(gradients: Sequence[Tensor], inputs: Sequence["Inputs"], threshold: float) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class Projection:
    """Rows of a weight with an input of their own: one of the products of an attention."""

    weight: Tensor
    first: int
    rows: int


Part = Convolution | nn.Linear | Projection


def parts(layer: Layer) -> list[Part]:
    """The products of a layer: one, or those of query, key, value and output of an attention."""
    if not isinstance(layer, nn.MultiheadAttention):
        return [layer]
    width, inner = layer.embed_dim, layer.in_proj_weight
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    pairs = [(weight, 0) for weight in separate] if inner is None else [(inner, i * width) for i in range(3)]
    return [Projection(weight, first, width) for weight, first in [*pairs, (layer.out_proj.weight, 0)]]


def mean_gradients(units: Sequence[Unit], loss_fn: Callable[[], Tensor], batches: int) -> dict[str, list[Tensor]]:
    """By unit name, the weight gradient (groups, C_out / groups, m) of each product, float64, averaged over `batches`
    calls of `loss_fn`."""
    owners = [(unit.name, weight) for unit in units for weight in unit.weights]
    for name, weight in owners:
        if not weight.requires_grad:
            raise ValueError(f"unit {name!r} is frozen and has no gradient; leave it out of the units")
    weights = [weight for _, weight in owners]
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for _ in range(batches if units else 0):
        with torch.enable_grad():
            loss = loss_fn()
            if not isinstance(loss, Tensor):
                raise TypeError(f"loss_fn must return the loss, a tensor, and returned a {type(loss).__name__}")
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        for (name, weight), total, gradient in zip(owners, sums, gradients, strict=True):
            if gradient is not None:
                total += gradient
            elif not weight.is_leaf:
                raise ValueError(
                    f"the weight of unit {name!r} is computed anew in every forward, so it has no gradient; use "
                    "torch.nn.utils.parametrizations instead of hooks such as weight_norm or prune"
                )
    named = [(name, total) for (name, _), total in zip(owners, sums, strict=True)]
    check_finite(named, "the new task's gradient for unit {!r} is not finite")
    means = {weight: total / batches for weight, total in zip(weights, sums, strict=True)}
    return {unit.name: [as_matrix(part, means[part.weight]) for part in parts(unit.layer)] for unit in units}


def as_matrix(part: Part, gradient: Tensor) -> Tensor:
    """The weight's gradient as (groups, C_out / groups, m)."""
    if isinstance(part, TRANSPOSED):
        return gradient.reshape(groups(part), fan_in(part), -1).mT
    if isinstance(part, Projection):
        gradient = gradient[part.first : part.first + part.rows]
    return gradient.reshape(groups(part), -1, fan_in(part))


class Inputs:
    """The inputs of one product: the columns of R while they are at most m / 2, then R R^T."""

    def __init__(self, part: Part) -> None:
        self.part, self.device = part, part.weight.device
        self.blocks: list[Tensor] = []  # (groups, m, n) each
        self.gram: Tensor | None = None

    def on_host(self) -> "Inputs":
        """The same on the host; copies from a GPU have only begun."""
        there = copy.copy(self)
        there.device = torch.device("cpu")
        there.blocks = [host_copy(block) for block in self.blocks]
        there.gram = None if self.gram is None else host_copy(self.gram)
        return there

    def add(self, given: Tensor) -> None:
        if self.gram is not None:
            add_gram(self.gram, self.part, given)
            return
        for block in columns(self.part, given.detach()):
            self.blocks.append(block)
            if self.gram is None and 2 * sum(kept.shape[-1] for kept in self.blocks) > fan_in(self.part):
                self.gram = empty_gram(self.part)
            while self.gram is not None and self.blocks:
                first = self.blocks.pop(0)
                self.gram.baddbmm_(first, first.mT)

    def basis(self, threshold: float) -> Tensor:
        """B (groups, m, k)."""
        if self.gram is not None:
            return leading_eigenvectors(self.gram, threshold)
        if not self.blocks:
            return torch.zeros(groups(self.part), fan_in(self.part), 0, dtype=torch.float64, device=self.device)
        few = torch.cat(self.blocks, dim=-1)
        # R V has orthogonal columns for the eigenvectors V of R^T R, but for rounding, which the QR takes away.
        right = leading_eigenvectors(few.mT @ few, threshold)
        return torch.linalg.qr(few @ right)[0] * (right.square().sum(-2, keepdim=True) > 0)

    def total(self) -> Tensor:
        """A number that is not finite if an input is not."""
        kept = self.blocks if self.gram is None else [self.gram]
        return torch.stack([tensor.sum() for tensor in kept] or [torch.zeros(())]).sum()


def replay_inputs(
    module: nn.Module, units: Sequence[Unit], replay: Iterable[Tensor], chunk: int
) -> dict[str, list[Inputs]]:
    """By unit name, the inputs of each product, over the replay and over all calls of the layer in a forward."""
    seen = {unit.name: [Inputs(part) for part in parts(unit.layer)] for unit in units}
    device = units[0].weights[0].device
    count = 0

    def see(unit: Unit, given: list[Tensor], output: Tensor) -> None:
        for inputs, tensor in zip(seen[unit.name], given, strict=True):
            inputs.add(tensor)

    with watched(module, units, see):
        for images in inputs_of(replay):
            for piece in images.split(chunk) if len(images) else ():
                module(piece.to(device))
                count += len(piece)
    if count == 0:
        raise ValueError("the replay is empty; it must hold at least one input")
    totals = [(name, inputs.total()) for name, some in seen.items() for inputs in some]
    check_finite(totals, "the replay's inputs to unit {!r} are not finite")
    return seen


@contextmanager
def watched(
    module: nn.Module, units: Sequence[Unit], see: Callable[[Unit, list[Tensor], Tensor], object]
) -> Iterator[None]:
    """Puts the module in eval mode. Inside, `see(unit, inputs, output)` is called after every call of a unit's layer,
    with the input of each of its products."""
    attention = [unit.layer for unit in units if isinstance(unit.layer, nn.MultiheadAttention)]
    products = OutputProjections(attention)

    def hook(unit: Unit, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
            see(unit, [*given, products.inputs.pop(layer)], output[0])
        else:
            see(unit, [args[0] if args else kwargs["input"]], output)

    with ExitStack() as stack:
        for part in module.modules():
            part.training = False
        for unit in units:
            stack.callback(unit.layer.register_forward_hook(partial(hook, unit), with_kwargs=True).remove)
        # A compiled module may have been traced without the hooks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if attention:
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)  # it runs in one kernel, without the hooks' layers
            torch.clear_autocast_cache()  # the mode must see the casts; those made here have no gradient
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(products)
        yield


aten = torch.ops.aten
# Position of the input among the arguments; the weight follows it.
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.linear.default: 0}


class OutputProjections(TorchDispatchMode):
    """Notes the latest input of every attention's output projection, which no hook sees: it is not called as a
    module."""

    def __init__(self, layers: Iterable[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.owners = {storage(layer.out_proj.weight): layer for layer in layers}
        self.copies: list[Tensor] = []  # of a weight in autocast's type, held so that storages are not reused
        self.inputs: dict[nn.Module, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function in PRODUCTS:
            given, weight = args[PRODUCTS[function] :][:2]
            if (layer := self.owners.get(storage(weight))) is not None:
                self.inputs[layer] = given
        elif function is aten._to_copy.default and storage(args[0]) in self.owners:
            self.owners[storage(output)] = self.owners[storage(args[0])]
            self.copies.append(output)
        return output


def inputs_of(replay: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    for inputs in [replay] if isinstance(replay, Tensor) else replay:
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"the replay must hold tensors of inputs, and holds a {type(inputs).__name__}; if a loader yields "
                "labels too, pass only the inputs: [x for x, _ in loader]"
            )
        yield inputs


def check_finite(tensors: Sequence[tuple[str, Tensor]], message: str) -> None:
    """Raise for the first tensor with a NaN or infinity. Waits for the device once."""
    finite = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist() if tensors else []
    for (name, _), fine in zip(tensors, finite, strict=True):
        if not fine:
            raise ValueError(message.format(name))


def empty_gram(part: Part) -> Tensor:
    m = fan_in(part)
    return torch.zeros(groups(part), m, m, dtype=torch.float64, device=part.weight.device)


def add_gram(total: Tensor, part: Part, inputs: Tensor) -> Tensor:
    """Add R R^T (groups, m, m) of one call of the layer. Each group of a convolution has its own inputs."""
    # In float64: an error of 1e-7 of the energy, as in float32, can change the number of directions kept.
    for block in columns(part, inputs.detach()):
        total.baddbmm_(block, block.mT)
    return total


def columns(part: Part, inputs: Tensor) -> Iterator[Tensor]:
    """R in blocks (groups, m, n) of float64, a few images at a time."""
    if not isinstance(part, Convolution):
        vectors = inputs.reshape(-1, fan_in(part))  # (n, m)
        for rows in vectors.split(max(1, COLUMN_BYTES // (8 * fan_in(part)))):
            yield rows.double().T[None]
        return
    dims = len(part.kernel_size)
    images = inputs if inputs.ndim == dims + 2 else inputs[None]
    if isinstance(part, TRANSPOSED):
        step = max(1, COLUMN_BYTES // (8 * images[0].numel()))
        for some in images.split(step):
            yield some.double().flatten(2).transpose(0, 1).reshape(groups(part), fan_in(part), -1)
        return
    spans = [d * (k - 1) + 1 for d, k in zip(part.dilation, part.kernel_size, strict=True)]
    # Of one image, at most.
    positions = math.prod(-(-n // s) for n, s in zip(pad(part, images[:1]).shape[2:], part.stride, strict=True))
    step = max(1, COLUMN_BYTES // (8 * groups(part) * fan_in(part) * positions))
    for some in images.split(step):
        # The input patches as a strided view (b, C_in, rows, columns, kh, kw). Copying it is one GPU kernel; `F.unfold`
        # launches one per image.
        patches = pad(part, some.double()).contiguous()
        for dim in range(dims):
            patches = patches.unfold(2 + dim, spans[dim], part.stride[dim])
        kept: tuple[Any, ...] = (..., *(slice(None, None, dilation) for dilation in part.dilation))
        # Rows are ordered as in weight.reshape(C_out, -1).
        order = (1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims))
        yield patches[kept].permute(order).reshape(groups(part), fan_in(part), -1)


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
    device = parts(units[0].layer)[0].weight.device if units else torch.device("cpu")
    return device.type == "cuda" and 8 * 8 * sum(map(gram_size, units)) < torch.cuda.mem_get_info(device)[0]


def projection_ratio(gradients: Sequence[Tensor], bases: Sequence[Tensor]) -> Tensor:
    """||G B||_F / ||G||_F for G (..., C_out, m) and B (..., m, k), over all groups and products together; a tensor on
    the device.

    A zero gradient gives 0, not 1: it mostly belongs to a unit that the loss does not reach, and freezing that unit
    would save nothing.
    """
    gradients = [gradient.to(basis.dtype) for gradient, basis in zip(gradients, bases, strict=True)]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    kept = torch.cat([(gradient @ basis).flatten() for gradient, basis in zip(gradients, bases, strict=True)]).norm()
    return (kept / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)


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
    """Elements of the Gram matrices."""
    return sum(groups(part) * fan_in(part) ** 2 for part in parts(unit.layer))


def groups(part: Part) -> int:
    return part.groups if isinstance(part, Convolution) else 1


def fan_in(part: Part) -> int:
    """m, the length of a column of R."""
    return part.in_channels // part.groups if isinstance(part, TRANSPOSED) else part.weight.shape[1:].numel()
