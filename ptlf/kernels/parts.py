"""The parts of a training step in faster code: heads, augmentation, and the encoder.

On a GPU heads run in `norm` and our residual networks in `resnet`, where a freeze leaves nothing to compile. Views are
compiled, and of other encoders the repeated blocks, or else the whole, with a variant for each way units freeze.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from ptlf.core.errors import UserError
from ptlf.encoders import norm
from ptlf.freezing import replaced_forward
from ptlf.freezing.prefix import redirect_calls
from ptlf.kernels import resnet
from ptlf.model import Accelerator
from ptlf.views import apply_view

BACKEND = "inductor"
# A part has a variant per frozen set. Running out of variants must be an error, not a silent eager run. A block with
# hooks does not share the code of one without.
DYNAMO = {
    "recompile_limit": 1024,
    "accumulated_recompile_limit": 8192,
    "fail_on_recompile_limit_hit": True,
    "skip_nnmodule_hook_guards": False,
}


class FastParts(Accelerator):
    """Triton kernels where they fit, for any number of rows, and compiled code for full batches, multiples of `batch`:
    for an epoch's last, smaller one it would be compiled again."""

    takes_views_in_one_pass = staticmethod(norm.takes_views_in_one_pass)

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch = batch
        self.has_kernels = device.type == "cuda" and has_triton()

    def prepare(self, module: nn.Module) -> None:
        if self.has_kernels:
            from ptlf.kernels.norm import fuse_heads  # needs Triton

            fuse_heads(module)

    def encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        if self.has_kernels and resnet.can_fuse(encoder):
            return resnet.fused_forward(encoder, images)
        if len(images) % self.batch:
            return encoder(images)
        blocks = repeated_blocks(encoder) or [encoder]
        with redirect_calls({block: functools.partial(self.block, block) for block in blocks}):
            return encoder(images)

    def block(self, module: nn.Module, *arguments: Any, **named: Any) -> Any:
        try:
            return run_compiled(call_module, module, module_variant(module), *arguments, **named)
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            why = str(error).strip().splitlines()[0]
            name = type(module).__name__
            raise UserError(f"{name} cannot be compiled ({why}); use --training.engine eager") from error

    def augment(self, images: Tensor, *arguments: Any) -> Tensor:
        full = len(images) % self.batch == 0
        return run_compiled(apply_view, images, *arguments) if full else apply_view(images, *arguments)


def repeated_blocks(encoder: nn.Module) -> list[nn.Module]:
    """The modules, made of others, that share a list with another of their type; the innermost of them."""
    repeated = []
    for parent in encoder.modules():
        if isinstance(parent, nn.Sequential | nn.ModuleList):
            kinds = Counter(type(child) for child in parent.children())
            repeated += [child for child in parent.children() if kinds[type(child)] > 1 and any(child.children())]
    return [block for block in repeated if not any(other in repeated for other in list(block.modules())[1:])]


def call_module(module: nn.Module, variant: str, *arguments: Any, **named: Any) -> Any:
    """The module's hooks and forward; `module(...)` would look at what `redirect_calls` has set."""
    return module._call_impl(*arguments, **named)


def module_variant(module: nn.Module) -> str:
    """Which forwards below this module are replaced, and which parameters train: compiled code is for one of these."""
    names = []
    for child in module.modules():
        replaced = "-" if (forward := replaced_forward(child)) is None else type(forward).__name__
        trained = "".join("01"[p.requires_grad] for p in child._parameters.values() if p is not None)
        names.append(replaced + trained)
    return " ".join(names)


@functools.cache
def compile_part(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=BACKEND, dynamic=False, fullgraph=True)


def run_compiled(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Compiles when it runs. The compiler's settings hold for this call alone."""
    with torch._dynamo.config.patch(DYNAMO):
        return compile_part(function)(*arguments, **named)
