"""Freeze and thaw the units of a module: weights, norms, optimizer state, and tensors saved for backward."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import LBFGS, SGD, Optimizer

from ptlf.freezing import kernels
from ptlf.freezing.cost import Cost, Estimate, Loss, format_bytes, on_copy, parse_bytes
from ptlf.freezing.ddp import FreezeAwareDDP
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, PassThrough, replaced_forward
from ptlf.freezing.recording import BATCH_NORMS
from ptlf.freezing.schedule import FreezeSchedule, Timetable
from ptlf.freezing.select import Selector, select, with_tied
from ptlf.freezing.units import Trace, Unit, trace

logger = logging.getLogger("ptlf.freezing")
MARK = "_frozen_by"  # of a frozen unit's layer, patched or not: see `Freezer._check_unfrozen`


@dataclass(eq=False)
class _Frozen:
    """What freezing a unit changed. It is in the layer's `__dict__`; a copy of the layer has another one."""

    held: list[nn.Parameter]  # the parameters that trained before
    other: list[tuple[nn.Module, str, nn.Parameter | None]]  # places of the unit's parameters that did not
    patched: list[nn.Module] = field(default_factory=list)
    switched: list[tuple[Any, str, Any]] = field(default_factory=list)  # (owner, attribute, what `vars(owner)` had)
    warned: bool = False

    def switch(self, owner: Any, name: str, value: Any) -> None:
        self.switched.append((owner, name, vars(owner).get(name, owner)))  # itself: nothing
        vars(owner)[name] = value

    def trains(self) -> bool:
        """Whether all of the unit trains again, by `requires_grad_`; if only some does, it is meant."""
        return bool(self.held) and all(parameter.requires_grad for parameter in self.held)


class Freezer:
    """Freezes units of `module`, in place, and thaws them.

    The weights, affine parameters and statistics of a frozen unit stay bitwise the same: they get no gradient, an
    accumulated one is dropped, and so is their optimizer state (its param_groups stay). Neither an optimizer step nor
    `module.train()` changes them. The patched forwards are in the modules' `__dict__`, so `state_dict()` is unaffected.

    optimizer: one or several, or none; one that is made later is set as `freezer.optimizers = [optimizer]`.
    units: the units that may freeze; default: all units found by one forward.
    example: the input of that forward, see `find_units`.
    batch_statistics: in train mode, frozen norms normalise by the batch, without updating their running statistics. By
        default they use the running statistics.
    save_memory: save only what backward needs. False: plain PyTorch, which saves as much as if nothing were frozen.

    `select` says how units are chosen. Units that share a parameter (tied weights) freeze and thaw together. A
    parameter that is also used outside of units, such as an embedding tied to the last layer, is frozen there too.

    A frozen BatchNorm is folded into its layer, so hooks on the layer see the normalised output. See `refresh` for
    weights that change. copy.deepcopy((module, freezer)) gives an independent frozen module that can be thawed.

    ratios: correlation ratios by unit name, if they were set; `budget` and `print(freezer)` use them.
    saved: bytes that each unit saves if it alone freezes, once `budget` or `measure` has found them.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        units: Sequence[Unit] | None = None,
        example: Any = None,
        batch_statistics: bool = False,
        save_memory: bool = True,
    ) -> None:
        self.module, self.optimizers = module, unwrapped_optimizers(optimizer)
        self.batch_statistics, self.save_memory = batch_statistics, save_memory
        self._patched: dict[nn.Module, ForwardPatch] = {}
        self._frozen: dict[str, _Frozen] = {}
        self._check_unfrozen()
        self._trace = trace(module, example) if units is None or save_memory else Trace([])
        self.units = list(self._trace.units if units is None else units)
        self.ratios: Mapping[str, float] = {}
        self.saved: dict[str, int] = {}
        # Kept after a thaw: compiled code is reused only if it finds the same patch object again.
        self._patches: dict[tuple[Any, ...], ForwardPatch] = {}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the frozen units, in order of execution."""
        return tuple(unit.name for unit in self.units if unit.name in self._frozen)

    @property
    def folded(self) -> list[Tensor]:
        """The folded weights and biases in use, which are extra copies."""
        return [tensor for patch in self._layers() for tensor in patch.tensors()]

    def freeze(self, units: Selector) -> list[str]:
        """Freeze these units, in addition to those already frozen; the names of those that were not yet."""
        names = {name for name, record in self._frozen.items() if not record.trains()}
        chosen = [unit for unit in self._select(units) if unit.name not in names]
        self._check_unfrozen()
        self._thaw([unit for unit in chosen if unit.name in self._frozen])
        try:
            for unit in chosen:
                self._freeze(unit)
            self._mask()
        except BaseException:
            self._thaw([unit for unit in chosen if unit.name in self._frozen])
            raise
        self._forget(chosen)
        for optimizer in self.optimizers:
            if self._warn not in optimizer._optimizer_step_pre_hooks.values():
                optimizer.register_step_pre_hook(self._warn)
        return [unit.name for unit in chosen]

    def thaw(self, units: Selector | None = None) -> list[str]:
        """Make these units (by default all) trainable again, as they were before; the names of those that were frozen.
        Their optimizer state starts empty."""
        chosen = self.units if units is None else self._select(units)
        thawed = [unit for unit in chosen if unit.name in self._frozen]
        self._forget(thawed)  # it may have been loaded
        self._thaw(thawed)
        return [unit.name for unit in thawed]

    unfreeze = thaw

    def freeze_only(self, units: Selector) -> list[str]:
        """Freeze these units and thaw all others; the names of those that were not frozen before."""
        wanted = [unit.name for unit in self._select(units)]
        self.thaw([name for name in self.frozen if name not in wanted])
        return self.freeze(wanted)

    @contextmanager
    def temporarily_frozen(self, units: Selector) -> Iterator[list[str]]:
        """Inside, these units are frozen too; at the end, those that were not before thaw."""
        names = self.freeze(units)
        try:
            yield names
        finally:
            self.thaw(names)

    frozen_for = temporarily_frozen  # its older name

    def schedule(
        self,
        when: FreezeSchedule | Mapping[int | float, Selector],
        total: int | None = None,
        order: Sequence[str] | None = None,
    ) -> Timetable:
        """`plan = freezer.schedule({0.25: "layer1"}, total=n)`; `plan.at(step)` before each step: see `Timetable`."""
        return Timetable(self.units, self.freeze_only, when, total, order)

    def estimate(self, units: Selector, example: Any, *, loss: Loss | None = None) -> Estimate:
        """What a training step on `example` costs now, and with these units frozen too. Nothing changes.

        example: a whole batch, as the module is called with, or tensors of its shape on the meta device. loss: of the
        module's output, by default its sum. Call it in the mode and under the autocast of training.
        """
        names = tuple(unit.name for unit in self._select(units) if unit.name not in self._frozen)
        return on_copy(self, example, loss, lambda cost: Estimate(names, cost(), cost(names)))

    def measure(self, example: Any, *, loss: Loss | None = None) -> dict[str, int]:
        """The bytes of a step that each unit saves if it alone freezes beside those that are frozen, by name."""
        self.saved |= on_copy(self, example, loss, self._savings)
        return self.saved

    def _savings(self, cost: Cost) -> dict[str, int]:
        now, names = cost(backward=False).bytes, [unit.name for unit in self.units if unit.name not in self._frozen]
        return {name: now - cost([name], backward=False).bytes for name in names}

    def budget(self, limit: str | int, example: Any, *, loss: Loss | None = None) -> Estimate:
        """The units to freeze so that a step on `example` takes at most `limit` bytes ("12GiB"): `names` of what is
        returned. Nothing changes.

        Of all units, those without which the step fits as well are left out one by one. First go those that save the
        least bytes or, with `ratios`, the least bytes for what is lost (1 - ratio). `CostEstimate` says what counts.
        """
        most = parse_bytes(limit)

        def search(cost: Cost) -> tuple[Estimate, int]:
            """What is found, and the bytes of a step at the least."""
            if (now := cost()).bytes <= most:
                return Estimate((), now, now), now.bytes
            saved = self._savings(cost)
            self.saved |= saved
            worth = {name: saved[name] / max(1 - self.ratios.get(name, 0.0), 1e-3) for name in saved}
            needed = sorted(saved, key=worth.__getitem__, reverse=True)
            least = cost(needed, backward=False).bytes
            for name in needed[::-1] if least <= most else ():
                rest = [other for other in needed if other != name]
                if cost(rest, backward=False).bytes <= most:
                    needed = rest
            names = tuple(unit.name for unit in self._select(needed))
            return Estimate(names, now, cost(names)), least

        found, least = on_copy(self, example, loss, search)
        if least > most:
            takes = f"{format_bytes(least)}, {format_bytes(least - most)} more than {limit}"
            raise ValueError(f"with all units frozen a step takes {takes}; take a smaller batch")
        if found.names and len(found.names) == len(self.units) - len(self._frozen):
            logger.warning("a step takes at most %s only if no unit trains; take a smaller batch", limit)
        return found

    def ddp(self, model: nn.Module | None = None, **options: Any) -> FreezeAwareDDP:
        """`model`, which contains the module, as a DistributedDataParallel (with its options) that follows freezing."""
        return FreezeAwareDDP(self.module if model is None else model, self.frozen_norm_buffers, **options)

    def refresh(self) -> None:
        """Fold the norms again: needed after weights were written through `.data` or, if the code is compiled or
        captured, in place. `load_state_dict` does it, and eager code notices what is written in place."""
        for patch in self._layers():
            patch.refresh()

    def state_dict(self) -> dict[str, list[str]]:
        return {"frozen": list(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Freeze exactly the units in `state`. Load weights and optimizer first."""
        units = select(self.units, state["frozen"])  # first: a state that does not fit changes nothing
        states = [dict(optimizer.state) for optimizer in self.optimizers]
        self.thaw()
        self.freeze(units)
        for optimizer, loaded in zip(self.optimizers, states, strict=True):
            optimizer.state.update((parameter, value) for parameter, value in loaded.items() if parameter.requires_grad)

    def __str__(self) -> str:
        """A line per unit."""
        rows = [["unit", "parameters", "norm", "frozen", "ratio", "saved"]]
        for unit in self.units:
            ratio, saved = self.ratios.get(unit.name), self.saved.get(unit.name)
            rows.append([
                unit.name,
                f"{sum(parameter.numel() for parameter in unit.parameters()):,}",
                ", ".join(dict.fromkeys(type(norm).__name__ for norm in unit.norms)) or "-",
                "yes" if unit.name in self._frozen else "-",
                "-" if ratio is None else f"{ratio:.3f}",
                "-" if saved is None else format_bytes(saved),
            ])  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self._frozen)} of {len(self.units)} units frozen"])

    def _select(self, units: Selector) -> list[Unit]:
        """The units that are meant, and those that share a parameter with them."""
        return with_tied(self.units, select(self.units, units))

    def _check_unfrozen(self) -> None:
        for name, child in self.module.named_modules():
            if child.__dict__.get(MARK) not in (None, *self._frozen.values()):
                raise ValueError(f"{name!r} is frozen by another Freezer (or copied from one); thaw that one first")

    def _freeze(self, unit: Unit) -> None:
        places = [(module, key, module._parameters.get(key)) for module, key in unit.places()]
        held = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        other = [place for place in places if place[2] is None or not place[2].requires_grad]
        record = self._frozen[unit.name] = _Frozen(held, other)
        layer, norm = unit.layer, unit.norm
        layer.__dict__[MARK] = record
        for parameter in held:
            parameter.requires_grad_(False)
        _touch(unit)
        computed = layer.parametrizations.values() if parametrize.is_parametrized(layer) else ()  # type: ignore[union-attr, operator]
        for parametrization in itertools.chain(*computed):  # in train mode spectral_norm updates its buffers
            self._patch(record, parametrization, EvalMode)
        for hook in layer._forward_pre_hooks.values():  # as its older function does
            if isinstance(hook, SpectralNorm):
                record.switch(hook, "n_power_iterations", 0)
        patched = self.save_memory and kernels.is_plain_layer(layer)
        fold = patched and not self.batch_statistics and unit.name in self._trace.foldable
        # A shard (of fully_shard) holds only a part of the weight between forwards.
        fold = fold and kernels.is_plain_batch_norm(norm) and not hasattr(layer.weight, "full_tensor")
        # PyTorch itself keeps no input for a linear layer's frozen weight: without a norm there is nothing to gain.
        if fold or (patched and isinstance(layer, nn.Conv2d)):
            self._patch(record, layer, FrozenLayer, *((norm, self.module) if fold else ()))
        for each in unit.norms:
            if next(each.buffers(), None) is None:
                continue
            # An InstanceNorm has no mode that normalises by its input and leaves its statistics alone.
            if not self.batch_statistics or not isinstance(each, BATCH_NORMS):
                folded = fold and each is norm
                self._patch(record, each, *((PassThrough, self._patched[layer]) if folded else (EvalMode,)))
                if hasattr(each, "reset_running_stats"):  # torch.optim.swa_utils.update_bn calls it
                    record.switch(each, "reset_running_stats", kernels.keep_statistics)
            elif each.track_running_stats:
                # PyTorch then uses batch statistics in train mode and running ones in eval mode, updating neither.
                record.switch(each, "track_running_stats", False)

    def _thaw(self, units: Sequence[Unit]) -> None:
        for unit in units:
            record = self._frozen.pop(unit.name)
            unit.layer.__dict__.pop(MARK, None)
            for module, key in unit.places():  # which may not be those of before
                parameter = module._parameters.get(key)
                kept = any(parameter is same or (module, key) == (where, name) for where, name, same in record.other)
                if parameter is not None and parameter.is_floating_point() and not kept:
                    parameter.requires_grad_(True)
            _touch(unit)
            for owner, name, value in record.switched:
                vars(owner)[name] = value
                if value is owner:
                    del vars(owner)[name]
            still = {module for other in self._frozen.values() for module in other.patched}
            for module in record.patched:
                if module not in still and module in self._patched:  # two layers may share a parametrization
                    self._patched.pop(module).detach()
        for optimizer in self.optimizers:
            _start_momentum(optimizer, [parameter for unit in units for parameter in unit.parameters()])
        self._mask()

    def _forget(self, units: Sequence[Unit]) -> None:
        """Drop gradients and optimizer state."""
        frozen: list[Tensor] = [p for unit in units for p in unit.parameters() if not p.requires_grad]
        for parameter in frozen:
            parameter.grad = None
        for optimizer in self.optimizers:
            one_for_all = isinstance(optimizer, LBFGS)  # its history would move what is frozen
            for parameter in list(optimizer.state) if frozen and one_for_all else frozen:
                optimizer.state.pop(parameter, None)

    def _warn(self, *step: Any) -> None:
        """Before a step of an optimizer."""
        for name, record in self._frozen.items():
            if not record.warned and record.trains():
                record.warned = True
                logger.warning("unit %r is frozen, but trains: requires_grad_(True) was called; freeze it again", name)

    def _mask(self) -> None:
        """Masked ReLUs are those whose output no trainable layer saves: it would keep the output beside the mask."""
        for relu, keepers in self._trace.relus.items() if self.save_memory else ():
            masked = bool(self._frozen) and keepers <= self._frozen.keys()
            if masked and replaced_forward(relu) is None:
                self._patch(None, relu, MaskedReLU)
            elif not masked and relu in self._patched:
                self._patched.pop(relu).detach()

    def _patch(self, record: _Frozen | None, module: nn.Module, kind: type[ForwardPatch], *arguments: Any) -> None:
        if record is not None:
            record.patched.append(module)
        if module in self._patched:
            return
        key = (kind, module, *arguments)
        self._patched[module] = self._patches[key] = self._patches.get(key) or kind(module, *arguments)
        self._patched[module].attach()

    def frozen_norm_buffers(self) -> list[Tensor]:
        """The statistics of frozen norms, which no longer change."""
        return [b for u in self.units if u.name in self._frozen for norm in u.norms for b in norm.buffers()]

    def _layers(self) -> list[FrozenLayer]:
        return [patch for patch in self._patched.values() if isinstance(patch, FrozenLayer)]


def unwrapped_optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers, out of wrappers such as those of Accelerate."""
    found = []
    for optimizer in [] if given is None else [given] if hasattr(given, "param_groups") else given:
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a Freezer takes one torch.optim.Optimizer or several, not a {type(optimizer).__name__}")
        found.append(optimizer)
    return found


def _start_momentum(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """The fused SGD of torch 2.13 needs momentum of all or none; with a rate on the device the step sets it itself."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        held = [optimizer.state.get(parameter, {}).get("momentum_buffer") for parameter in group["params"]]
        if group["fused"] and not isinstance(group["lr"], Tensor) and any(buffer is not None for buffer in held):
            for parameter in set(parameters) & set(group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _touch(unit: Unit) -> None:
    """Make compiled code check the unit's parameters again: Dynamo does if the dictionary that holds them changed."""
    for module, name in unit.places():
        if (parameter := module._parameters.get(name)) is not None:
            module._parameters[name] = None
            module._parameters[name] = parameter
