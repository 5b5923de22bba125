"""Frozen stays frozen, exactly, and thaws: through what people put around a training loop.

docs/freezer.md has a table of these; every row names its test.
"""

import copy
import io
import itertools
import re
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from architectures import own
from promise import NETWORKS, PREFIX, SCATTERED, keys_of, network, promise
from test_freezer import OPTIMIZERS, compare, equal, loss_of, plainly_frozen, snapshot
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import find_units

pytestmark = pytest.mark.slow

SETS = {"prefix": PREFIX, "scattered": SCATTERED}
CASES = list(itertools.product(NETWORKS, SETS))


def made(name: str, kind: str = "sgd", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Freezer, Tensor]:
    model, x = network(name, seed)
    optimizer = OPTIMIZERS[kind](model.train().parameters())
    return model, optimizer, Freezer(model, optimizer, example=x[:2]), x


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, to_none: bool = True, parts: int = 1):
    def step() -> None:
        optimizer.zero_grad(to_none)
        for part in x.chunk(parts):
            loss_of(model, part).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(("name", "chosen"), CASES)
def test_resume_from_a_state_dict(name, chosen):
    """The resumed run has the bits of the one that went on, also after both thaw."""
    parts = model, optimizer, freezer, x = made(name)
    step = stepper(model, optimizer, x)
    step()
    freezer.freeze(SETS[chosen][name])
    step()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts[:3]], file)
    file.seek(0)
    resumed = made(name, seed=1)
    for part, state in zip(resumed, torch.load(file), strict=False):
        part.load_state_dict(state)
    again = stepper(resumed[0], resumed[1], x)
    assert resumed[2].frozen == freezer.frozen
    for thaws in (False, False, True):
        if thaws:
            freezer.thaw()
            resumed[2].thaw()
        step()
        again()
        assert equal(snapshot(model), snapshot(resumed[0]))
    promise(resumed[0], resumed[2], again, SETS[chosen][name])


@pytest.mark.parametrize("name", NETWORKS)
def test_deep_copies(name):
    """A copy of model, optimizer and freezer trains the same bits and thaws without the original."""
    model, optimizer, freezer, x = made(name)
    step = stepper(model, optimizer, x)
    step()
    freezer.freeze(SCATTERED[name])
    step()
    twin, twin_optimizer, twin_freezer = copy.deepcopy((model, optimizer, freezer))
    twin_step = stepper(twin, twin_optimizer, x)
    step()
    twin_step()
    assert equal(snapshot(model), snapshot(twin))
    frozen = freezer.frozen
    promise(twin, twin_freezer, twin_step, PREFIX[name])
    assert freezer.frozen == frozen
    promise(model, freezer, step, PREFIX[name])


@pytest.mark.parametrize("name", NETWORKS)
def test_averages_of_weights(name):
    """The average holds the frozen weights' own bits, and computes what its weights say."""
    model, optimizer, freezer, x = made(name)
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """What each of two processes holds at the end."""
    folder = tmp_path_factory.mktemp("pair")
    torch.multiprocessing.spawn(parallel.in_process, (folder,), nprocs=parallel.RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(parallel.RANKS)]


@pytest.mark.parametrize("name", NETWORKS)
def test_distributed_data_parallel(name, pair):
    """Both processes hold the same bits; without batch norm, those of one process with the whole batch but for
    rounding."""
    first, second = (results["ddp", name] for results in pair)
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
def test_fully_sharded_data_parallel(name, pair):
    first, second = (results["fsdp", name] for results in pair)
    assert all(torch.equal(first[key], second[key]) for key in first if "running" not in key)


@pytest.mark.parametrize(("name", "save_memory"), [("resnet", True), ("resnet", False), ("vit", True), ("post", True)])
def test_compiled(name, save_memory):
    """Freeze and thaw under a compiled model: the gradients are those of plain PyTorch each time."""
    model, x = own("encoder post") if name == "post" else network(name)
    twin, units = copy.deepcopy(model.train()), find_units(model, x[:2])
    freezer = Freezer(model, units=units, example=x[:2], save_memory=save_memory)
    names = [unit.name for unit in units]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    for chosen in ([], names[:2], names[1::2], []):
        freezer.freeze_only(chosen)
        compare(model, freezer, twin, x, compiled)
    freezer.thaw()
    freezer.optimizers = [optimizer := OPTIMIZERS["sgd"](model.parameters())]
    promise(model, freezer, stepper(compiled, optimizer, x), names[1:3])


@pytest.mark.parametrize(("name", "chosen"), CASES)
def test_activation_checkpointing(name, chosen):
    model, optimizer, freezer, x = made(name)
    twin = copy.deepcopy(model)
    blocks = [model.stem, *model.stages] if name == "resnet" else [model.embedding, *model.blocks, model.pool]
    for reentrant in (False, True):

        def wrapped(y: Tensor, reentrant: bool = reentrant) -> Tensor:
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            return y.mean((2, 3)) if name == "resnet" else y

        freezer.freeze(SETS[chosen][name])
        compare(model, freezer, twin, x, wrapped)
        freezer.thaw()
        x.requires_grad_(reentrant)  # which that kind needs to give any gradient
        promise(model, freezer, stepper(wrapped, optimizer, x), SETS[chosen][name])


@pytest.mark.parametrize(("name", "chosen"), CASES)
def test_autocast_and_gradient_scaling(name, chosen):
    dtype = torch.bfloat16 if (name == "resnet") == (chosen == "prefix") else torch.float16
    model, optimizer, freezer, x = made(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

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
    assert equal(snapshot(model), before)


@pytest.mark.parametrize(("name", "chosen"), CASES)
def test_gradient_accumulation_with_a_freeze_midway(name, chosen):
    """What was accumulated for the frozen units is dropped; the others' gradients are the sum over micro-batches."""
    model, optimizer, freezer, x = made(name)
    twin, parts = copy.deepcopy(model), x.chunk(3)
    for module in (model, twin):
        loss_of(module, parts[0]).backward()
    freezer.freeze(SETS[chosen][name])
    plainly_frozen(twin, find_units(twin, x[:2]), set(freezer.frozen))
    for parameter in twin.parameters():
        parameter.grad = parameter.grad if parameter.requires_grad else None
    for part in parts[1:]:
        for module in (model, twin):
            loss_of(module, part).backward()
    found, expected = ({k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (model, twin))
    torch.testing.assert_close(found, expected)
    freezer.thaw()
    promise(model, freezer, stepper(model, optimizer, x, parts=3), SETS[chosen][name])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_set_to_zero(name):
    """With requires_grad=False alone, momentum and weight decay move a weight whose gradient is zero and not None."""
    for by_hand in (True, False):
        model, optimizer, freezer, x = made(name)
        step = stepper(model, optimizer, x, to_none=False)
        step()
        if by_hand:
            freezer.units[0].layer.weight.requires_grad_(False)
        else:
            freezer.freeze(1)
        optimizer.zero_grad(set_to_none=False)
        before = freezer.units[0].layer.weight.clone()
        step()
        assert torch.equal(before, freezer.units[0].layer.weight) != by_hand
    freezer.thaw()
    promise(model, freezer, step, SCATTERED[name])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind):
    """Neither momentum nor weight decay moves what is frozen."""
    for name in NETWORKS:
        model, optimizer, freezer, x = made(name, kind)
        promise(model, freezer, stepper(model, optimizer, x), SCATTERED[name])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, name):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    raw, x = network(name)
    model, optimizer = accelerator.prepare(raw.train(), OPTIMIZERS["sgd"](raw.parameters()))
    freezer = Freezer(accelerator.unwrap_model(model), optimizer, example=x[:2])

    def step() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()

    promise(raw, freezer, step, SCATTERED[name])


@pytest.mark.parametrize("options", [{}, {"batch_statistics": True}, {"save_memory": False}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_train_and_eval_mode_and_no_grad(name, options):
    model, optimizer, _, x = made(name)
    freezer, train = Freezer(model, optimizer, example=x[:2], **options), stepper(model, optimizer, x)

    def step() -> None:
        with torch.no_grad():
            model.eval()(x)
        with torch.inference_mode():
            model.train()(x)
        for mode in (False, True):
            model.train(mode)
            train()

    promise(model, freezer, step, SCATTERED[name])


def test_every_row_of_the_table_names_its_test():
    root = Path(__file__).parent.parent.parent
    text = (root / "docs" / "freezer.md").read_text()
    rows = re.findall(r"^\|.*\| `(test_\w+)` \|$", text, re.MULTILINE)
    tests = {name for name in globals() if name.startswith("test_")} - {"test_every_row_of_the_table_names_its_test"}
    assert sorted(rows) == sorted(tests)
