"""The products of a unit's layer, and the past's input subspace: the columns of R, their leading directions B, and a
gradient's share in them. The symbols are those of `ptlf.freezing.correlation`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptlf.freezing.kernels import pad
from ptlf.freezing.recording import Convolution, Layer
from ptlf.freezing.units import Unit

COLUMN_BYTES = 64 * 2**20  # of R in memory at once, unless a single image needs more
GRAM_BYTES = 512 * 2**20  # of Gram matrices in memory at once, unless a single one needs more
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


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


def groups(part: Part) -> int:
    return part.groups if isinstance(part, Convolution) else 1


def fan_in(part: Part) -> int:
    """m, the length of a column of R."""
    return part.in_channels // part.groups if isinstance(part, TRANSPOSED) else part.weight.shape[1:].numel()


def as_matrix(part: Part, gradient: Tensor) -> Tensor:
    """The weight's gradient as (groups, C_out / groups, m)."""
    if isinstance(part, TRANSPOSED):
        return gradient.reshape(groups(part), fan_in(part), -1).mT
    if isinstance(part, Projection):
        gradient = gradient[part.first : part.first + part.rows]
    return gradient.reshape(groups(part), -1, fan_in(part))


@contextmanager
def watched(
    module: nn.Module, units: Sequence[Unit], see: Callable[[Unit, list[Tensor], Tensor], object]
) -> Iterator[None]:
    """Puts the module in eval mode. Inside, `see(unit, inputs of its products, output)` follows every layer's call."""
    attention = [unit.layer for unit in units if isinstance(unit.layer, nn.MultiheadAttention)]
    projected: dict[Tensor, Tensor] = {}  # by weight, the latest input of each attention's output projection
    linear = F.linear

    def watched_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """No hook sees an output projection: it is not called as a module."""
        if any(weight is layer.out_proj.weight for layer in attention):
            projected[weight] = input
        return linear(input, weight, bias)

    def hook(unit: Unit, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
            see(unit, [*given, projected.pop(layer.out_proj.weight)], output[0])
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
            stack.enter_context(patch.object(F, "linear", watched_linear))
        yield


class NotFinite(ValueError):
    """A gradient or an input has a NaN or infinity; which, and of which unit."""


class Inputs:
    """The inputs of one product while they make at most m / 2 columns, then R R^T.

    dtype: of products of inputs and of the eigendecomposition; sums over images are float64.
    """

    def __init__(self, part: Part, dtype: torch.dtype = torch.float64) -> None:
        self.part, self.dtype, self.count = part, dtype, 0
        self.batches: list[Tensor] = []
        self.largest = 0.0  # magnitude of an input in the Gram matrix
        self.gram: Tensor | None = None

    def add(self, given: Tensor) -> None:
        batch, positions = as_batch(self.part, given.detach())
        self.batches.append(batch.to(self.dtype, copy=True))  # what follows may write to it
        self.count += len(batch) * positions
        if self.gram is None and 2 * self.count > fan_in(self.part):
            self.gram = empty_gram(self.part)
        step = max(1, COLUMN_BYTES // (8 * groups(self.part) * fan_in(self.part) * positions))
        with torch.autocast(given.device.type, enabled=False):
            while self.gram is not None and self.batches:
                batch = self.batches.pop(0)
                before, self.largest = self.largest, max(self.largest, largest(batch))
                power, now = exponent(before, self.dtype), exponent(self.largest, self.dtype)
                if before and power != now:
                    self.gram *= 2.0 ** (2 * (power - now))
                for some in (batch * 2.0**-now if now else batch).split(step):
                    add_products(self.gram, self.part, some)

    def basis(self, threshold: float, reach: bool = True) -> Tensor:
        """B (groups, m, k)."""
        if self.gram is not None:
            return leading_eigenvectors(self.gram.to(self.dtype), threshold, reach).double()
        none = self.part.weight.new_zeros(groups(self.part), fan_in(self.part), 0)
        few = torch.cat([none, *(columns(self.part, batch).flatten(2) for batch in self.batches)], dim=-1).double()
        few = few * 2.0 ** -exponent(largest(few), few.dtype)
        # R V has orthogonal columns for the eigenvectors V of R^T R, but for rounding, which the QR takes away.
        right = leading_eigenvectors(few.mT @ few, threshold, reach)
        return torch.linalg.qr(few @ right)[0] * (right.square().sum(-2, keepdim=True) > 0)

    def total(self) -> Tensor:
        """A number that is not finite if an input is not."""
        kept = self.batches if self.gram is None else [self.gram]
        return torch.stack([self.part.weight.new_zeros(()), *((tensor * 0).sum() for tensor in kept)]).sum()


def largest(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, math.inf).item() if tensor.numel() else 0.0


def exponent(magnitude: float, dtype: torch.dtype) -> int:
    """Of the power of two to divide such inputs by, so that no square overflows or vanishes; 0 for ordinary ones."""
    ordinary, least = (300, -1000) if dtype == torch.float64 else (30, -120)
    found = math.frexp(magnitude)[1]
    return max(found, least) if abs(found) > ordinary else 0


def replay_inputs(
    module: nn.Module, units: Sequence[Unit], replay: Iterable[Tensor], chunk: int, threshold: float
) -> dict[str, list[Inputs]]:
    """By unit name, the inputs of each product, over the replay and over all calls of the layer in a forward."""
    seen = {unit.name: [Inputs(part, product_dtype(part, threshold)) for part in parts(unit.layer)] for unit in units}
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


def inputs_of(replay: Iterable[Tensor]) -> Iterator[Tensor]:
    for inputs in replay:
        if not isinstance(inputs, Tensor):
            kind = type(inputs).__name__
            raise TypeError(f"the replay must hold tensors of inputs, not a {kind}; pass [x for x, _ in loader]")
        yield inputs


def check_finite(tensors: Sequence[tuple[str, Tensor]], message: str) -> None:
    """Raise for the first tensor with a NaN or infinity. Waits for the device once."""
    finite = torch.stack([tensor.isfinite().all() for _, tensor in tensors]).tolist() if tensors else []
    if not all(finite):
        raise NotFinite(message.format(tensors[finite.index(False)][0]))


def empty_gram(part: Part) -> Tensor:
    m = fan_in(part)
    return torch.zeros(groups(part), m, m, dtype=torch.float64, device=part.weight.device)


def product_dtype(part: Part, threshold: float) -> torch.dtype:
    """On a CPU float32, in half the time: it changes a ratio by less than 1e-4 where the directions left out hold at
    least 0.1 % of the energy. GPUs have time for float64, and may round float32 products to TF32."""
    exact = part.weight.dtype == torch.float64 or torch.get_float32_matmul_precision() != "highest"
    return torch.float64 if exact or threshold > 0.999 or not part.weight.is_cpu else torch.float32


def as_batch(part: Part, inputs: Tensor) -> tuple[Tensor, int]:
    """The inputs as images (b, C_in, ...), or as vectors (b, C_in) where each is a column of R. With how many columns
    each of them makes."""
    if not isinstance(part, Convolution):
        return inputs.reshape(-1, fan_in(part)), 1
    images = inputs if inputs.ndim == len(part.kernel_size) + 2 else inputs[None]
    if isinstance(part, TRANSPOSED):
        return images.movedim(1, -1).reshape(-1, part.in_channels), 1
    sizes = zip(pad(part, images[:1]).shape[2:], part.kernel_size, part.dilation, part.stride, strict=True)
    return images, math.prod((size - dilation * (k - 1) - 1) // stride + 1 for size, k, dilation, stride in sizes)


def columns(part: Part, batch: Tensor, slides: bool = False) -> Tensor:
    """R as (groups, m, 1, n). slides: not yet unfolded along the first dimension of a convolution: (groups, m / kernel,
    rows, n), for a kernel of so many rows."""
    if not isinstance(part, Convolution) or isinstance(part, TRANSPOSED):
        return batch.T.reshape(groups(part), fan_in(part), 1, -1)
    dims, first = len(part.kernel_size), int(slides)
    # The input patches as a strided view (b, C_in, rows, columns, kh, kw). Copying it is one GPU kernel; `F.unfold`
    # launches one per image.
    patches = pad(part, batch).contiguous()
    for dim in range(first, dims):
        span = part.dilation[dim] * (part.kernel_size[dim] - 1) + 1
        patches = patches.unfold(2 + dim, span, part.stride[dim])
    kept: tuple[Any, ...] = (..., *(slice(None, None, dilation) for dilation in part.dilation[first:]))
    patches = patches[kept]
    rows, height = (part.kernel_size[0], patches.shape[2]) if slides else (1, 1)
    # Rows are ordered as in weight.reshape(C_out, -1).
    order = (1, *range(2 + dims, patches.ndim), *range(2, 2 + first), 0, *range(2 + first, 2 + dims))
    return patches.permute(order).reshape(groups(part), fan_in(part) // rows, height, -1)


def add_products(gram: Tensor, part: Part, batch: Tensor) -> None:
    """Add R R^T. Where windows move by one row, the products of two rows of the kernel depend on their distance, but
    for the rows at the edges: one large product for each distance, a third of the work for a kernel of 3 x 3. A GPU
    takes fewer kernels for all products at once."""
    kernel, apart, channels = 1, 1, fan_in(part)
    if isinstance(part, Convolution) and batch.ndim > 2 and part.stride[0] == 1 and batch.is_cpu:
        kernel, apart, channels = int(part.kernel_size[0]), int(part.dilation[0]), part.in_channels // part.groups
    r = columns(part, batch, slides=kernel > 1)
    height = r.shape[2] - (kernel - 1) * apart
    blocks = gram.unflatten(2, (channels, kernel, -1)).unflatten(1, (channels, kernel, -1))

    def product(start: int, rows: int, distance: int) -> Tensor:
        """Of these rows with those `distance` further down."""
        one, other = (r[:, :, at : at + rows].flatten(2) for at in (start, start + distance))
        return (one @ other.mT).double()

    for between in range(kernel):
        block = product(0, height, between * apart)
        for top in range(kernel - between):
            if top:
                start = (top - 1) * apart
                block += product(start + height, apart, between * apart) - product(start, apart, between * apart)
            shaped = block.unflatten(2, (channels, -1)).unflatten(1, (channels, -1))
            blocks[:, :, top, :, :, top + between] += shaped
            if between:
                blocks[:, :, top + between, :, :, top] += shaped.permute(0, 3, 4, 1, 2)


def leading_eigenvectors(gram: Tensor, threshold: float, reach: bool = True) -> Tensor:
    """Orthonormal columns (..., m, k): the fewest eigenvectors whose eigenvalues sum to `threshold` of the trace; if
    not `reach`, the most whose sum stays below it.

    All Gram matrices (..., m, m) of a batch share k, the largest number needed; columns that one does not need are 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(-1), vectors.flip(-1)  # now descending
    sums = values.double().cumsum(-1)
    before = F.pad(sums[..., :-1], (1, 0)) if reach else sums  # energy of the eigenvectors before this one
    # The slack exceeds the rounding error of summing a few thousand eigenvalues. It lets an energy equal to the
    # threshold count as reached, and keeps a threshold of 1 from including the null space.
    wanted = before < threshold * (1 - 1e-11) * sums[..., -1:]
    k = int(wanted.sum(-1).max())
    return vectors[..., :k] * wanted[..., None, :k]


def projection_ratio(gradients: Sequence[Tensor], bases: Sequence[Tensor]) -> Tensor:
    """||G B||_F / ||G||_F for G (..., C_out, m) and B (..., m, k), over all groups and products together; a tensor on
    the device. A zero gradient gives 0, not 1: to freeze a unit that the loss does not reach would save nothing."""
    gradients = [gradient.to(basis.dtype) for gradient, basis in zip(gradients, bases, strict=True)]
    # A power of two is exact, and keeps the squares of small gradients.
    power = torch.stack([torch.frexp(gradient.abs().amax()).exponent for gradient in gradients]).amax()
    gradients = [torch.ldexp(gradient, -power.clamp(min=-1000)) for gradient in gradients]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    kept = torch.cat([(gradient @ basis).flatten() for gradient, basis in zip(gradients, bases, strict=True)]).norm()
    return (kept / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)


def passes(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Consecutive units whose Gram matrices fit into GRAM_BYTES, or an eighth of the free GPU memory."""
    room = GRAM_BYTES
    if units and (device := units[0].weights[0].device).type == "cuda":
        room = max(room, torch.cuda.mem_get_info(device)[0] // 8)
    group: list[Unit] = []
    held = 0
    for unit in units:
        needed = sum(8 * groups(part) * fan_in(part) ** 2 for part in parts(unit.layer))
        if group and held + needed > room:
            yield group
            group, held = [], 0
        group.append(unit)
        held += needed
    if group:
        yield group
