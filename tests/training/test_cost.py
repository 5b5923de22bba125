import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import Unit, find_units
from ptlf.training import cost
from ptlf.training.cost import Stopwatch, backward_flops, kept_bytes, peak_memory_bytes, reset_peak_memory

MIDDLE = range(6, 14)
# The second convolution of every block: eight of the thirteen heaviest units, no two in a row.
SCATTERED = (2, 4, 6, 9, 11, 14, 16, 19)


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(0)
    return ResNet(BasicBlock, (2, 2, 2, 2)).train()


def kept(model: nn.Module, x: torch.Tensor, indices, **options) -> int:
    freezer = Freezer(model, **options)
    freezer.freeze([freezer.units[index].name for index in indices])
    exclude = [*model.parameters(), *model.buffers(), *freezer.folded]
    result = kept_bytes(lambda: model(x).square().mean(), exclude)
    freezer.thaw()
    return result


def test_bytes_kept_for_backward_by_resnet18(resnet18):
    x = torch.randn(4, 3, 32, 32)
    everything = kept(resnet18, x, [])
    assert kept(resnet18, x, MIDDLE, save_memory=False) / everything > 0.999  # requires_grad=False alone saves nothing
    assert kept(resnet18, x, MIDDLE) / everything == pytest.approx(0.691, abs=0.002)
    assert kept(resnet18, x, SCATTERED) / everything == pytest.approx(0.582, abs=0.002)
    assert kept(resnet18, x, range(8)) / everything < 0.33
    assert kept(resnet18, x, MIDDLE, batch_statistics=True) / everything < 0.87


def forward_flops(module: nn.Module, x: torch.Tensor) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    root = type(module).__name__
    return {name.removeprefix(root + "."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


def theoretical(units: list[Unit], flops: dict[str, int], frozen: set[str]) -> int:
    """A unit costs its forward FLOPs for the weight gradient if it is trainable, and again for the input gradient if a
    unit before it is trainable. The units before a shortcut are those before its block."""
    total, trainable, before_block = 0, False, False
    for unit in units:
        if unit.name.endswith("conv1"):
            before_block = trainable
        needs_input_gradient = before_block if "shortcut" in unit.name else trainable
        total += flops[unit.name] * ((unit.name not in frozen) + needs_input_gradient)
        trainable = trainable or unit.name not in frozen
    return total


def test_backward_flops_equal_theory_for_random_sets():
    torch.manual_seed(0)
    model, x, generator = ResNet(BasicBlock, (2, 2, 2, 2), width=8), torch.randn(2, 3, 16, 16), random.Random(0)
    units = find_units(model)
    names = [unit.name for unit in units]
    flops = forward_flops(model, x)
    sets = [set(), set(names[:8]), set(names[8:]), {names[i] for i in MIDDLE}, {names[i] for i in SCATTERED}]
    sets += [set(generator.sample(names, generator.randint(1, 19))) for _ in range(20)]
    freezer = Freezer(model)
    for chosen in sets:
        freezer.freeze(chosen)
        assert backward_flops(model(x).square().mean()) == theoretical(units, flops, chosen), sorted(chosen)
        freezer.thaw()


def test_backward_flops_of_eight_units_at_full_size(resnet18):
    x, names = torch.randn(1, 3, 32, 32), [unit.name for unit in find_units(resnet18)]
    flops = forward_flops(resnet18, x)
    everything = theoretical(find_units(resnet18), flops, set())
    freezer = Freezer(resnet18)
    for indices, expected in ((MIDDLE, 0.809), (SCATTERED, 0.728), (range(8), 0.586)):
        freezer.freeze([names[index] for index in indices])
        assert backward_flops(resnet18(x).square().mean()) / everything == pytest.approx(expected, abs=0.001)
        freezer.thaw()


def test_kept_bytes_counts_storages_once_and_whole():
    x = torch.randn(10, 4, requires_grad=True)
    assert kept_bytes(lambda: x.exp().sum()) == 160  # the result of exp
    assert kept_bytes(lambda: (F.relu(x).sum(), F.relu(x).sum())) == 320
    y = torch.randn(100, 4)
    assert kept_bytes(lambda: (x * y[:10] + x * y[10:20]).sum()) == 1600  # two views of one storage
    assert kept_bytes(lambda: (x * y[:10]).sum(), exclude=[y]) == 0
    assert kept_bytes(lambda: (x * torch.ones(1).expand(10, 4)).sum()) == 4


def test_kept_bytes_forgets_graphs_that_died():
    x = torch.randn(10, 4, requires_grad=True)

    def forward():
        x.exp().exp()
        return x.exp().sum()

    assert kept_bytes(forward) == 160


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still: tests advance its only element, in seconds."""
    now = [100.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    return now


def test_stopwatch_splits_time_without_counting_twice(clock):
    watch = Stopwatch()
    for _ in range(2):
        with watch("training"):
            clock[0] += 2
            with watch("rebuild"):
                clock[0] += 3
            clock[0] += 1
        clock[0] += 50
    assert watch.seconds == {"training": 6, "rebuild": 6}
    other = Stopwatch()
    other.load_state_dict(watch.state_dict())
    with other("training"):
        clock[0] += 4
    assert other.seconds == {"training": 10, "rebuild": 6}


def test_stopwatch_counts_what_was_spent_before_an_error(clock):
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch("training"):
        clock[0] += 2
        raise RuntimeError
    with watch("evaluation"):
        clock[0] += 1
    assert watch.seconds == {"training": 2, "evaluation": 1}


def test_peak_memory_is_not_made_up_on_the_cpu():
    reset_peak_memory("cpu")
    assert peak_memory_bytes("cpu") is None
