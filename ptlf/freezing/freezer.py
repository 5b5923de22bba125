"""Freeze and thaw the units of a module: weights, norms, optimizer state, and tensors saved for backward."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ptlf.core.errors import unknown
from ptlf.freezing import kernels
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, PassThrough
from ptlf.freezing.units import BATCH_NORMS, INSTANCE_NORMS, Trace, Unit, trace


class Freezer:
    """Freezes units of `module` by name, in place, and thaws them all.

    The weights, affine parameters and statistics of a frozen unit stay bitwise the same: they get no gradient, an
    accumulated one is dropped, and so is their optimizer state (its param_groups stay). Neither an optimizer step nor
    `module.train()` changes them. The patched forwards are in the modules' `__dict__`, so `state_dict()` is unaffected.

    units: the units that may freeze; default: all units found by one forward.
    example: the input of that forward, see `find_units`.
    batch_statistics: in train mode, frozen norms normalise by the batch, without updating their running statistics. By
        default they use the running statistics.
    save_memory: save only what backward needs. False: plain PyTorch, which saves as much as if nothing were frozen.

    A frozen BatchNorm is folded into its layer, so hooks on the layer see the normalised output, and the norm passes it
    on. Weights loaded into a frozen module are noticed, except by compiled or captured code, or if they were written
    through `.data`: then call `refresh()`.
    copy.deepcopy(module) gives an independent frozen module; copy.deepcopy((module, freezer)) one that can be thawed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        units: Sequence[Unit] | None = None,
        example: Any = None,
        batch_statistics: bool = False,
        save_memory: bool = True,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        self.batch_statistics, self.save_memory = batch_statistics, save_memory
        self._replaced: dict[nn.Module, Any] = {}  # module -> its own `forward` in __dict__ before, mostly None
        self._check_unfrozen()
        seen = trace(module, example) if units is None or save_memory else Trace([], frozenset(), [])
        self.units = list(seen.units if units is None else units)
        self._foldable, self._relus = seen.foldable, seen.relus
        self._by_name = {unit.name: unit for unit in self.units}
        self._frozen: dict[str, list[nn.Parameter]] = {}  # unit -> its parameters that required a gradient
        # Kept after a thaw: compiled code is reused only if it finds the same patch object again.
        self._patches: dict[tuple[nn.Module, type[ForwardPatch]], ForwardPatch] = {}
        self._tracked: list[nn.Module] = []  # norms whose track_running_stats was switched off

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen units, in order of execution."""
        return tuple(unit.name for unit in self.units if unit.name in self._frozen)

    @property
    def folded(self) -> list[Tensor]:
        """The folded weights and biases in use, which are extra copies."""
        return [tensor for patch in self._layers() for tensor in patch.tensors()]

    def freeze(self, names: Iterable[str]) -> None:
        """Freeze these units, in addition to those already frozen."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self._by_name:
                raise ValueError(str(unknown("unit", name, self._by_name)))
        self._check_unfrozen()
        for name in names:
            if name not in self._frozen:
                self._freeze(self._by_name[name])
        for relu in self._relus if self.save_memory and self._frozen else ():
            # If a trainable layer saves the output too, a mask saves nothing.
            if relu.keepers <= self._frozen.keys() and "forward" not in relu.module.__dict__:
                self._replace(relu.module, MaskedReLU)

    def thaw(self) -> None:
        """Make all units trainable again, as they were before. Their optimizer state starts empty."""
        for parameters in self._frozen.values():
            for parameter in parameters:
                parameter.requires_grad_(True)
        for norm in self._tracked:
            norm.track_running_stats = True  # type: ignore[assignment]
        for module, before in self._replaced.items():
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        for record in (self._frozen, self._tracked, self._replaced):
            record.clear()

    def refresh(self) -> None:
        """Fold the norms again: needed if weights were changed from outside and the code is compiled or captured."""
        for patch in self._layers():
            patch.refresh()

    def state_dict(self) -> dict[str, list[str]]:
        return {"frozen": list(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Freeze exactly the units in `state`. Load weights and optimizer first."""
        self.thaw()
        self.freeze(state["frozen"])

    def _check_unfrozen(self) -> None:
        for name, child in self.module.named_modules():
            if isinstance(child.__dict__.get("forward"), ForwardPatch) and child not in self._replaced:
                raise ValueError(f"{name!r} is frozen by another Freezer (or copied from one); thaw that one first")

    def _freeze(self, unit: Unit) -> None:
        self._frozen[unit.name] = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        for parameter in unit.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
            if self.optimizer is not None:
                self.optimizer.state.pop(parameter, None)
        for parametrization in parametrizations(unit.layer):  # in train mode spectral_norm updates its buffers
            self._replace(parametrization, EvalMode)
        layer, norm = unit.layer, unit.norm
        patched = self.save_memory and kernels.is_plain_layer(layer)
        fold = patched and not self.batch_statistics and unit.name in self._foldable
        fold = fold and kernels.is_plain_batch_norm(norm)
        if patched:
            self._replace(layer, FrozenLayer, norm if fold else None)
        for held in unit.norms:
            if not isinstance(held, BATCH_NORMS | INSTANCE_NORMS) or held.running_mean is None:
                continue
            # An InstanceNorm has no mode that normalises by its input and leaves its statistics alone.
            if not self.batch_statistics or isinstance(held, INSTANCE_NORMS):
                self._replace(held, PassThrough if fold and held is norm else EvalMode)
            elif held.track_running_stats:
                # PyTorch then uses batch statistics in train mode and running ones in eval mode, updating neither.
                held.track_running_stats = False
                self._tracked.append(held)

    def _replace(self, module: nn.Module, kind: type[ForwardPatch], *arguments: Any) -> None:
        self._replaced.setdefault(module, module.__dict__.get("forward"))
        if (module, kind) not in self._patches:
            self._patches[module, kind] = kind(module, *arguments)
        patch = module.__dict__["forward"] = self._patches[module, kind]
        if isinstance(patch, FrozenLayer):
            patch.refresh()

    def _layers(self) -> list[FrozenLayer]:
        patches = (module.__dict__["forward"] for module in self._replaced)
        return [patch for patch in patches if isinstance(patch, FrozenLayer)]


def parametrizations(layer: nn.Module) -> list[nn.Module]:
    """The modules that compute the layer's parametrized tensors, if any."""
    lists = layer.parametrizations.values() if parametrize.is_parametrized(layer) else ()  # type: ignore[union-attr, operator]
    return [part for parts in lists for part in parts]
