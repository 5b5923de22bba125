"""Freeze and thaw the units of a module: weights, norm, optimizer state, and what autograd keeps for backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ptlf.core.errors import unknown
from ptlf.freezing.kernels import (
    EvalMode,
    ForwardPatch,
    FrozenLayer,
    MaskedReLU,
    PassThrough,
    is_plain_batch_norm,
    is_plain_layer,
)
from ptlf.freezing.units import Relu, Trace, Unit, trace

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)


class Freezer:
    """Freezes units of `module` by name, in place, and thaws them all.

    A frozen unit's weights, affine parameters and statistics do not change by a bit: no gradient is computed, one half
    accumulated is dropped, the optimizer's state for them is dropped (its param_groups stay), and neither a step nor
    `module.train()` undoes it. The replaced forwards live in the modules' `__dict__`, so `state_dict()` never changes.

    units: which may freeze, if not all that one forward finds.
    example: what to call the module with for that one forward, see `find_units`.
    batch_statistics: in train mode frozen norms still normalise by the batch (their running statistics stay). Otherwise
        they use the running statistics.
    save_memory: keep only what backward needs. Otherwise plain PyTorch, which keeps as much as if nothing were frozen.

    A frozen BatchNorm is folded into its layer, so hooks on the layer see the normalised output and those on the norm
    see it pass. Weights loaded into a frozen module are noticed, except by compiled or captured code and where they are
    written through `.data`: there call `refresh()`.
    copy.deepcopy(module) gives an independent module that stays frozen; copy.deepcopy((module, freezer)) can be thawed.
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
        self._replaced: dict[nn.Module, Any] = {}  # module -> the instance's own forward before, mostly none
        self._refuse_others()
        seen = trace(module, example) if units is None or save_memory else Trace([], frozenset(), [])
        self.units = list(seen.units if units is None else units)
        self._foldable, self._relus = seen.foldable, seen.relus
        self._by_name = {unit.name: unit for unit in self.units}
        self._frozen: dict[str, list[nn.Parameter]] = {}  # unit -> its parameters that required a gradient
        # Kept over a thaw: code compiled with an override is reused only as long as that very object lives.
        self._overrides: dict[tuple[nn.Module, type[ForwardPatch]], ForwardPatch] = {}
        self._tracked: list[nn.Module] = []  # norms whose track_running_stats was switched off

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen units, in data order."""
        return tuple(unit.name for unit in self.units if unit.name in self._frozen)

    @property
    def folded(self) -> list[Tensor]:
        """The folded weights and biases in use: copies made when freezing."""
        return [tensor for override in self._layers() for tensor in override.tensors()]

    def freeze(self, names: Iterable[str]) -> None:
        """Freeze these units in addition to those frozen already."""
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self._by_name:
                raise ValueError(str(unknown("unit", name, self._by_name)))
        self._refuse_others()
        for name in names:
            if name not in self._frozen:
                self._freeze(self._by_name[name])
        if self.save_memory:
            self._mask_relus()

    def thaw(self) -> None:
        """Make everything trainable that was so before. Optimizer state starts anew."""
        for parameters in self._frozen.values():
            for parameter in parameters:
                parameter.requires_grad_(True)
        for norm in self._tracked:
            norm.track_running_stats = True  # type: ignore[assignment]
        for module in list(self._replaced):
            self._restore(module)
        self._frozen.clear()
        self._tracked.clear()

    def refresh(self) -> None:
        """Fold the norms again, after weights were changed from outside under compiled or captured code."""
        for override in self._layers():
            override.refresh()

    def state_dict(self) -> dict[str, list[str]]:
        return {"frozen": list(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Freeze exactly what was frozen. Load weights and optimizer first."""
        self.thaw()
        self.freeze(state["frozen"])

    def _refuse_others(self) -> None:
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
        for parametrization in parametrizations(unit.layer):  # of which some move in train mode, as spectral_norm
            self._replace(parametrization, EvalMode, functools.partial(EvalMode, parametrization))
        fold = self._can_fold(unit)
        if self.save_memory and is_plain_layer(unit.layer):
            norm = unit.norm if fold else None
            self._replace(unit.layer, FrozenLayer, lambda: FrozenLayer(unit.layer, norm))
        if fold and unit.norm is not None:
            self._replace(unit.norm, PassThrough, PassThrough)
        elif isinstance(unit.norm, BATCH_NORMS):
            self._hold_statistics(unit.norm)

    def _can_fold(self, unit: Unit) -> bool:
        return (
            self.save_memory
            and not self.batch_statistics
            and unit.name in self._foldable
            and is_plain_layer(unit.layer)
            and is_plain_batch_norm(unit.norm)
        )

    def _hold_statistics(self, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm) -> None:
        if norm.running_mean is None:
            return
        if not self.batch_statistics:
            self._replace(norm, EvalMode, lambda: EvalMode(norm))
        elif norm.track_running_stats:
            # PyTorch then normalises by the batch in train mode and by the running statistics in eval mode.
            norm.track_running_stats = False
            self._tracked.append(norm)

    def _mask_relus(self) -> None:
        for relu in self._relus:
            if self._is_released(relu) and "forward" not in relu.module.__dict__:
                self._replace(relu.module, MaskedReLU, functools.partial(MaskedReLU, relu.module))

    def _is_released(self, relu: Relu) -> bool:
        """Whether the ReLU alone would keep its output. Where a trainable layer keeps it too, a mask saves nothing."""
        return bool(self._frozen) and relu.keepers <= self._frozen.keys()

    def _replace(self, module: nn.Module, kind: type[ForwardPatch], make: Callable[[], ForwardPatch]) -> None:
        if module not in self._replaced:
            self._replaced[module] = module.__dict__.get("forward")
        if (module, kind) not in self._overrides:
            self._overrides[module, kind] = make()
        override = module.__dict__["forward"] = self._overrides[module, kind]
        if isinstance(override, FrozenLayer):
            override.refresh()

    def _restore(self, module: nn.Module) -> None:
        before = self._replaced.pop(module)
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before

    def _layers(self) -> list[FrozenLayer]:
        overrides = (module.__dict__["forward"] for module in self._replaced)
        return [override for override in overrides if isinstance(override, FrozenLayer)]


def parametrizations(layer: nn.Module) -> list[nn.Module]:
    """The modules that compute its parameters, where it has such."""
    lists = layer.parametrizations.values() if parametrize.is_parametrized(layer) else ()  # type: ignore[union-attr, operator]
    return [part for parts in lists for part in parts]
