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
from torch.optim import SGD, Optimizer

from ptlf.freezing import kernels
from ptlf.freezing.cost import CostEstimate, Estimate, Loss, format_bytes, parse_bytes, step_cost
from ptlf.freezing.ddp import FreezeAwareDDP
from ptlf.freezing.kernels import EvalMode, ForwardPatch, FrozenLayer, MaskedReLU, PassThrough, replaced_forward
from ptlf.freezing.recording import BATCH_NORMS, INSTANCE_NORMS
from ptlf.freezing.schedule import FreezeSchedule, Timetable
from ptlf.freezing.select import Selector, select, with_tied
from ptlf.freezing.units import Trace, Unit, trace

logger = logging.getLogger("ptlf.freezing")
MARK = "_frozen_by"  # of a frozen unit's layer, patched or not: see `Freezer._check_unfrozen`


@dataclass(eq=False)
class _Frozen:
    """What freezing a unit changed. It is in the layer's `__dict__`; a copy of the layer has another one."""

    trained: list[bool]  # for each parameter of the unit: whether it required a gradient
    patched: list[nn.Module] = field(default_factory=list)
    untracked: list[nn.Module] = field(default_factory=list)  # norms whose track_running_stats was switched off


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

    A frozen BatchNorm is folded into its layer, so hooks on the layer see the normalised output. Weights that
    `load_state_dict` loads into a frozen module count at once. Those written in place (`copy_`) are noticed by eager
    code only, not by compiled or captured code, and those written through `.data` not at all: then call `refresh()`.
    copy.deepcopy(module) gives an independent frozen module; copy.deepcopy((module, freezer)) one that can be thawed.

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
        chosen = [unit for unit in self._select(units) if unit.name not in self._frozen]
        self._check_unfrozen()
        for unit in chosen:
            self._freeze(unit)
        self._mask()
        return [unit.name for unit in chosen]

    def thaw(self, units: Selector | None = None) -> list[str]:
        """Make these units (by default all) trainable again, as they were before; the names of those that were frozen.
        Their optimizer state starts empty."""
        chosen = self.units if units is None else self._select(units)
        thawed = [unit for unit in chosen if unit.name in self._frozen]
        for unit in thawed:
            self._thaw(unit)
        self._mask()
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
        with self._pretending():
            return Estimate(names, self._cost(example, loss), self._cost(example, loss, names))

    def measure(self, example: Any, *, loss: Loss | None = None) -> dict[str, int]:
        """The bytes of a step that each unit saves if it alone freezes beside those that are frozen, by name."""
        with self._pretending():
            now = self._cost(example, loss, backward=False).bytes
            for name in [unit.name for unit in self.units if unit.name not in self._frozen]:
                self.saved[name] = now - self._cost(example, loss, [name], backward=False).bytes
        return self.saved

    def budget(self, limit: str | int, example: Any, *, loss: Loss | None = None) -> Estimate:
        """The units to freeze so that a step on `example` takes at most `limit` bytes ("12GiB"): `names` of what is
        returned. Nothing changes.

        Of all units, those without which the step fits as well are left out one by one. First go those that save the
        least bytes or, with `ratios`, the least bytes for what is lost (1 - ratio). `CostEstimate` says what counts.
        """
        most = parse_bytes(limit)
        with self._pretending():
            now = self._cost(example, loss)
            if now.bytes <= most:
                return Estimate((), now, now)
            saved = self.measure(example, loss=loss)
            candidates = [unit.name for unit in self.units if unit.name not in self._frozen]
            worth = {name: saved[name] / max(1 - self.ratios.get(name, 0.0), 1e-3) for name in candidates}
            needed = sorted(candidates, key=worth.__getitem__, reverse=True)
            if (least := self._cost(example, loss, needed, backward=False)).bytes > most:
                takes = f"{format_bytes(least.bytes)}, {format_bytes(least.bytes - most)} more than {limit}"
                raise ValueError(f"with all units frozen a step takes {takes}; take a smaller batch")
            for name in needed[::-1]:
                rest = [other for other in needed if other != name]
                if self._cost(example, loss, rest, backward=False).bytes <= most:
                    needed = rest
            names = tuple(unit.name for unit in self._select(needed))
            if len(names) == len(candidates):
                logger.warning("a step takes at most %s only if no unit trains; take a smaller batch", limit)
            return Estimate(names, now, self._cost(example, loss, names))

    def ddp(self, model: nn.Module | None = None, **options: Any) -> FreezeAwareDDP:
        """`model`, which contains the module, as a DistributedDataParallel (with its options) that follows freezing."""
        return FreezeAwareDDP(self.module if model is None else model, self.frozen_norm_buffers, **options)

    def refresh(self) -> None:
        """Fold the norms again: needed if weights were changed in place and the code is compiled or captured."""
        for patch in self._layers():
            patch.refresh()

    def state_dict(self) -> dict[str, list[str]]:
        return {"frozen": list(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Freeze exactly the units in `state`. Load weights and optimizer first."""
        units = select(self.units, state["frozen"])  # first: a state that does not fit changes nothing
        self.thaw()
        self.freeze(units)

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
        record = self._frozen[unit.name] = _Frozen([parameter.requires_grad for parameter in unit.parameters()])
        for parameter in unit.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
            for optimizer in self.optimizers:
                optimizer.state.pop(parameter, None)
        _touch(unit)
        layer, norm = unit.layer, unit.norm
        layer.__dict__[MARK] = record
        computed = layer.parametrizations.values() if parametrize.is_parametrized(layer) else ()  # type: ignore[union-attr, operator]
        for parametrization in itertools.chain(*computed):  # in train mode spectral_norm updates its buffers
            self._patch(record, parametrization, EvalMode)
        patched = self.save_memory and kernels.is_plain_layer(layer)
        fold = patched and not self.batch_statistics and unit.name in self._trace.foldable
        # A shard (of fully_shard) holds only a part of the weight between forwards.
        fold = fold and kernels.is_plain_batch_norm(norm) and not hasattr(layer.weight, "full_tensor")
        # PyTorch itself keeps no input for a linear layer's frozen weight: without a norm there is nothing to gain.
        if fold or (patched and isinstance(layer, nn.Conv2d)):
            self._patch(record, layer, FrozenLayer, norm if fold else None)
        for held in unit.norms:
            if not isinstance(held, BATCH_NORMS | INSTANCE_NORMS) or held.running_mean is None:
                continue
            # An InstanceNorm has no mode that normalises by its input and leaves its statistics alone.
            if not self.batch_statistics or isinstance(held, INSTANCE_NORMS):
                self._patch(record, held, PassThrough if fold and held is norm else EvalMode)
            elif held.track_running_stats:
                # PyTorch then uses batch statistics in train mode and running ones in eval mode, updating neither.
                held.track_running_stats = False
                record.untracked.append(held)

    def _thaw(self, unit: Unit) -> None:
        record = self._frozen.pop(unit.name)
        del unit.layer.__dict__[MARK]
        for parameter, trained in zip(unit.parameters(), record.trained, strict=True):
            if trained:
                parameter.requires_grad_(True)
        _touch(unit)
        for optimizer in self.optimizers:
            _start_momentum(optimizer, unit.parameters())
        for norm in record.untracked:
            norm.track_running_stats = True  # type: ignore[assignment]
        still = {module for other in self._frozen.values() for module in other.patched}
        for module in record.patched:
            if module not in still:  # two layers may share a parametrization
                self._patched.pop(module).detach()

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

    @contextmanager
    def _pretending(self) -> Iterator[None]:
        """What freezes inside thaws at the end, and its gradients and optimizer state come back."""
        frozen, states = self.frozen, [dict(optimizer.state) for optimizer in self.optimizers]
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        try:
            yield
        finally:
            self.thaw([name for name in self.frozen if name not in frozen])
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)

    def _cost(self, example: Any, loss: Loss | None, names: Selector = (), *, backward: bool = True) -> CostEstimate:
        """With the units of these names frozen too."""
        with self.temporarily_frozen(names):
            for patch in self._layers():  # not among fake tensors, which have no values
                patch.refresh_if_stale()
            return step_cost(self.module, self.optimizers, example, self.folded, loss, backward=backward)

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
    norm = () if unit.norm is None else unit.norm.modules()
    for module in {*unit.extra.values(), *unit.layer.modules(), *norm}:
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = None
            module._parameters[name] = parameter
