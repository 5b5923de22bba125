"""The frozen prefix of a module, run apart from the rest, so that a copy of the module can share its output."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptlf.freezing.kernels import FrozenLayer, replaced_forward
from ptlf.freezing.recording import unchanged


class FrozenPrefix:
    """Runs a module up to the output of its submodule `cut`, and from there on.

    `prefix(x)` is the output of `cut`, without a gradient. `prefix.rest(other, h)` is what `other`, the module or a
    copy of it, computes from there: `cut` returns `h`, and the submodules that end before it return placeholders and
    cost nothing. So two models with the same frozen prefix share one forward through it:

        prefix = find_prefix(model, images[:2])
        h = prefix(images)
        student, teacher = prefix.rest(model, h), prefix.rest(earlier_model, h)
    """

    def __init__(self, module: nn.Module, cut: str, shapes: Mapping[str, torch.Size]) -> None:
        """shapes: of the input ("") and of the outputs of the submodules that are skipped, by their path."""
        self.module, self.cut, self.shapes = module, cut, dict(shapes)

    def __repr__(self) -> str:
        return f"FrozenPrefix(up to {self.cut!r})"

    @torch.no_grad()
    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """The output of `cut` for the input `x`, of the module itself or of a copy."""
        module = self.module if module is None else module
        cut = module.get_submodule(self.cut)

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _ReachedCut(cut._call_impl(*args, **kwargs))

        try:
            with redirect_calls({cut: stop}):
                module(x)
        except _ReachedCut as reached:
            for part in module.modules():
                if isinstance(patch := replaced_forward(part), FrozenLayer):
                    patch.waiting.clear()  # the forward ends here
            return reached.args[0]
        raise RuntimeError(f"the forward did not call {self.cut!r}")

    def rest(self, module: nn.Module, h: Tensor) -> Any:
        """The output of `module` where its `cut` returns `h`."""

        def placeholder(path: str) -> Tensor:
            return h.new_zeros(()).expand(len(h), *self.shapes[path][1:])

        skipped = [path for path in self.shapes if path]
        calls: dict[nn.Module, Callable[..., Any]] = {
            module.get_submodule(path): lambda *_, _path=path, **__: placeholder(_path) for path in skipped
        }
        with redirect_calls({**calls, module.get_submodule(self.cut): lambda *_, **__: h}):
            return module(placeholder(""))


class _ReachedCut(Exception):
    """Ends a forward at the cut, with its output."""


class _Call(NamedTuple):
    path: str
    first: int  # how many calls had ended before this one began; those after them are inside it
    output: Tensor | None


def find_prefix(module: nn.Module, example: Tensor) -> FrozenPrefix | None:
    """The longest prefix of the module in which nothing trains, found by a forward of `example`, a small batch, in the
    module's present mode. None if nothing frozen can be computed apart from the rest.

    A submodule is a cut if its output depends on nothing that trains and on no randomness, and if the rest of the
    forward computes the same from that output alone, bit by bit.
    """
    calls: list[_Call] = []  # of submodules, in the order in which they end
    begun: list[int] = []  # `first` of those that have not ended

    def leave(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        calls.append(_Call(path, begun.pop(), output if isinstance(output, Tensor) else None))

    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        stack.enter_context(torch.enable_grad())
        for path, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(lambda *_: begun.append(len(calls))).remove)
            stack.callback(part.register_forward_hook(functools.partial(leave, path)).remove)
        module(example)
    times = Counter(call.path for call in calls)
    with_weights = {path for path, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}
    for end, cut in reversed(list(enumerate(calls, start=1))):
        if not cut.path or cut.output is None or cut.output.requires_grad or times[cut.path] > 1:
            continue
        if not any(call.path in with_weights for call in calls[:end]):
            return None  # no layer would be saved
        before, shapes = cut.first, {"": example.shape}  # of the outermost calls that ended before the cut began
        while before and (output := calls[before - 1].output) is not None:
            shapes.setdefault(calls[before - 1].path, output.shape)
            before = calls[before - 1].first
        prefix = FrozenPrefix(module, cut.path, shapes)
        if before == 0 and _is_exact(prefix, module, example):
            return prefix
    return None


def _is_exact(prefix: FrozenPrefix, module: nn.Module, example: Tensor) -> bool:
    with torch.no_grad(), unchanged(module):
        try:
            first, second = prefix(example), prefix(example)  # they differ where something is random
            with torch.random.fork_rng(devices=[]):
                rest = prefix.rest(module, first)
            return torch.equal(first, second) and torch.equal(rest, module(example))
        except Exception:  # code between the submodules may do anything with a placeholder
            return False


@contextmanager
def redirect_calls(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, calling one of these modules calls its function; `module._call_impl` is the module's own call."""
    before = {module: module._compiled_call_impl for module in calls}  # not None after `module.compile()`
    try:
        for module, call in calls.items():
            module._compiled_call_impl = call  # type: ignore[assignment]
        yield
    finally:
        for module, own in before.items():
            module._compiled_call_impl = own
