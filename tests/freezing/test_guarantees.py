"""Frozen stays frozen, exactly, and thaws: through what people put around a training loop.

docs/freezer.md has a table of these; every row names its test.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path

import parallel
import pytest
import torch
from architectures import own
from promise import NETWORKS, PREFIX, SCATTERED, keys_of, network, promise, snapshot
from test_freezer import OPTIMIZERS, loss_of, plainly_frozen
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import find_units

pytestmark = pytest.mark.slow

SETS = {"prefix": PREFIX, "scattered": SCATTERED}
SGD = OPTIMIZERS["sgd"]


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    return step


def equal(a: nn.Module, b: nn.Module) -> bool:
    states = snapshot(a), snapshot(b)
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("chosen", SETS)
def test_resume_from_a_state_dict(name, chosen):
    """The resumed run has the bits of the one that went on, also after both thaw."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Freezer, Tensor]:
        model, x = network(name, seed)
        optimizer = SGD(model.train().parameters())
        return model, optimizer, Freezer(model, optimizer, example=x[:2]), x

    parts = made(0)
    model, optimizer, freezer, x = parts
    step = stepper(model, optimizer, x)
    step()
    freezer.freeze(SETS[chosen][name])
    step()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts[:3]], file)
    file.seek(0)
    resumed = made(1)
    for part, state in zip(resumed, torch.load(file), strict=False):
        part.load_state_dict(state)
    again = stepper(resumed[0], resumed[1], x)
    assert resumed[2].frozen == freezer.frozen
    for _ in range(2):
        step()
        again()
        assert equal(model, resumed[0])
    freezer.thaw()
    resumed[2].thaw()
    step()
    again()
    assert equal(model, resumed[0])
    promise(resumed[0], resumed[2], again, SETS[chosen][name])


@pytest.mark.parametrize("name", NETWORKS)
def test_deep_copies(name):
    """A copy of model, optimizer and freezer trains the same bits and thaws without the original."""
    model, x = network(name)
    optimizer = SGD(model.train().parameters())
    freezer = Freezer(model, optimizer, example=x[:2])
    step = stepper(model, optimizer, x)
    step()
    freezer.freeze(SCATTERED[name])
    step()
    twin, twin_optimizer, twin_freezer = copy.deepcopy((model, optimizer, freezer))
    twin_step = stepper(twin, twin_optimizer, x)
    step()
    twin_step()
    assert equal(model, twin)
    frozen = freezer.frozen
    promise(twin, twin_freezer, twin_step, PREFIX[name])
    assert freezer.frozen == frozen
    promise(model, freezer, step, PREFIX[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_averages_of_weights(name):
    """The average holds the frozen weights' own bits, and computes what its weights say."""
    model, x = network(name)
    optimizer = SGD(model.train().parameters())
    freezer = Freezer(model, optimizer, example=x[:2])
    freezer.freeze(SCATTERED[name])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    step = stepper(model, optimizer, x)

    def averaged_step() -> None:
        step()
        average.update_parameters(model)

    averaged_step()
    averaged_step()
    frozen = keys_of(model, [unit for unit in freezer.units if unit.name in freezer.frozen])
    mine, kept = snapshot(model), snapshot(average.module)
    assert frozen and all(torch.equal(mine[key], kept[key]) for key in frozen)
    reference, _ = network(name)
    reference.load_state_dict(kept)
    torch.testing.assert_close(average.module.eval()(x), reference.eval()(x))
    freezer.thaw()
    promise(model, freezer, averaged_step, PREFIX[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_distributed_data_parallel(name, tmp_path):
    """Both processes hold the same bits; without batch norm, those of one process with the whole batch but for
    rounding."""
    torch.multiprocessing.spawn(parallel.in_process, (parallel.ddp, name, tmp_path), nprocs=parallel.RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(parallel.RANKS))
    before: dict[str, Tensor] = {}
    for (held, then, here), (*_, there), (*_, alone) in zip(first, second, parallel.alone(name), strict=True):
        weights = {key for key in here if "running" not in key}  # of trained norms, each process has its own
        assert all(torch.equal(here[key], there[key]) for key in {*weights, *then})
        if name == "vit":
            torch.testing.assert_close(here, alone, rtol=1e-9, atol=1e-9)
        if before:
            still = {key for key in here if torch.equal(here[key], before[key])}
            assert held <= still <= then
            assert {key for key in then - still if not key.endswith(("mean", "var", "tracked"))} == set()
        before = here


@pytest.mark.parametrize("name", NETWORKS)
def test_fully_sharded_data_parallel(name, tmp_path):
    torch.multiprocessing.spawn(parallel.in_process, (parallel.fsdp, name, tmp_path), nprocs=parallel.RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(parallel.RANKS))
    assert all(torch.equal(first[key], second[key]) for key in first if "running" not in key)


@pytest.mark.parametrize(
    ("name", "save_memory"), [*((name, True) for name in (*NETWORKS, "encoder post")), ("resnet", False)]
)
def test_compiled(name, save_memory):
    """Freeze and thaw under a compiled model: the gradients are those of plain PyTorch each time."""
    model, x = own(name) if name not in NETWORKS else network(name)
    twin, units = copy.deepcopy(model.train()), find_units(model, x[:2])
    freezer = Freezer(model, units=units, example=x[:2], save_memory=save_memory)
    names = [unit.name for unit in units]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    for chosen in ([], names[:2], names[1::2], names[2:4], [], names[:2], names[:1]):
        freezer.freeze_only(chosen)
        plainly_frozen(twin, find_units(twin, x[:2]), set(chosen))
        twin.load_state_dict(model.state_dict())
        for module in (compiled, twin):
            module.zero_grad()
            loss_of(module, x).backward()
        found, expected = ({k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (model, twin))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected)
    freezer.thaw()
    optimizer = SGD(model.parameters())
    freezer.optimizers = [optimizer]
    promise(model, freezer, stepper(compiled, optimizer, x), names[1:3])


class Checkpointed(nn.Module):
    """A network whose blocks are computed anew in backward."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, call=lambda block, y: checkpoint(block, y, use_reentrant=self.reentrant))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, chosen, name):
    model, x = network(name)
    x.requires_grad_(reentrant)  # which that kind needs to give any gradient
    twin = copy.deepcopy(model.train())
    optimizer = SGD(model.parameters())
    freezer = Freezer(model, optimizer, example=x[:2].detach())
    wrapped = Checkpointed(model, reentrant)
    freezer.freeze(SETS[chosen][name])
    plainly_frozen(twin, find_units(twin, x[:2].detach()), set(freezer.frozen))
    for module in (wrapped, twin):
        loss_of(module, x).backward()
    found, expected = ({k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (model, twin))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)
    freezer.thaw()
    promise(model, freezer, stepper(wrapped, optimizer, x), SETS[chosen][name])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_gradient_scaling(dtype, chosen, name):
    model, x = network(name)
    optimizer = SGD(model.train().parameters())
    freezer, scaler = Freezer(model, optimizer, example=x[:2]), torch.amp.GradScaler("cpu", init_scale=64.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, x).float()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    promise(model, freezer, step, SETS[chosen][name])
    freezer.freeze(SETS[chosen][name])
    before = snapshot(model)
    optimizer.zero_grad()
    scaler.scale(loss_of(model.eval(), x) * float("inf")).backward()  # a step that the scaler leaves out
    scaler.step(optimizer)
    assert all(torch.equal(value, before[key]) for key, value in snapshot(model).items())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("chosen", SETS)
def test_gradient_accumulation_with_a_freeze_midway(chosen, name):
    """What was accumulated for the frozen units is dropped; the others' gradients are the sum over micro-batches."""
    model, x = network(name)
    twin = copy.deepcopy(model.train())
    optimizer = SGD(model.parameters())
    freezer, units = Freezer(model, optimizer, example=x[:2]), find_units(twin, x[:2])
    parts = x.chunk(3)
    loss_of(model, parts[0]).backward()
    loss_of(twin, parts[0]).backward()
    freezer.freeze(SETS[chosen][name])
    plainly_frozen(twin, units, set(freezer.frozen))
    for parameter in twin.parameters():
        parameter.grad = parameter.grad if parameter.requires_grad else None
    for part in parts[1:]:
        loss_of(model, part).backward()
        loss_of(twin, part).backward()
    found, expected = ({k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (model, twin))
    assert found.keys() == expected.keys() == {k for k, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(found, expected)

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            loss_of(model, part).backward()
        optimizer.step()

    freezer.thaw()
    promise(model, freezer, step, SETS[chosen][name])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_set_to_zero(name):
    """With requires_grad=False alone, momentum and weight decay move a weight whose gradient is zero and not None."""

    def train(freeze: Callable[[nn.Module, torch.optim.Optimizer, Tensor], object]) -> bool:
        model, x = network(name)
        optimizer = SGD(model.train().parameters())
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        freeze(model, optimizer, x)
        before = [parameter.clone() for parameter in model.parameters()]
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        pairs = zip(before, model.parameters(), strict=True)
        return any(not torch.equal(a, b) for a, b in pairs if not b.requires_grad)

    def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        next(model.parameters()).requires_grad_(False)

    assert train(by_hand)
    assert not train(lambda model, optimizer, x: Freezer(model, optimizer, example=x[:2]).freeze(1))
    model, x = network(name)
    optimizer = SGD(model.train().parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x).backward()
        optimizer.step()

    promise(model, Freezer(model, optimizer, example=x[:2]), step, SCATTERED[name])


MORE_OPTIMIZERS = {
    **OPTIMIZERS,
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", MORE_OPTIMIZERS)
def test_optimizers(kind, name):
    """Neither momentum nor weight decay moves what is frozen."""
    model, x = network(name)
    optimizer = MORE_OPTIMIZERS[kind](model.train().parameters())
    promise(model, Freezer(model, optimizer, example=x[:2]), stepper(model, optimizer, x), SCATTERED[name])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, name):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    raw, x = network(name)
    model, optimizer = accelerator.prepare(raw.train(), SGD(raw.parameters()))
    freezer = Freezer(accelerator.unwrap_model(model), optimizer, example=x[:2])

    def step() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()

    promise(raw, freezer, step, SCATTERED[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_train_and_eval_mode_and_no_grad(name):
    model, x = network(name)
    optimizer = SGD(model.train().parameters())

    def step() -> None:
        with torch.no_grad():
            model.eval()(x)
        with torch.inference_mode():
            model.train()(x)
        for train in (False, True):
            model.train(train)
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

    promise(model, Freezer(model, optimizer, example=x[:2]), step, SCATTERED[name])


def test_every_row_of_the_table_names_its_test():
    root = Path(__file__).parent.parent.parent
    text = (root / "docs" / "freezer.md").read_text()
    rows = re.findall(r"^\|.*\| `(test_\w+)` \|$", text, re.MULTILINE)
    tests = {name for name in globals() if name.startswith("test_")} - {"test_every_row_of_the_table_names_its_test"}
    assert sorted(rows) == sorted(tests)
