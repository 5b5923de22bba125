import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing.cost import backward_flops, kept_bytes
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import Unit, find_units
from ptlf.training.cost import Stopwatch, peak_memory_bytes, reset_peak_memory

CPU = torch.device("cpu")
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


# Layer, shape of its input, multiply-adds of one gradient: group channels in x group channels out x groups x kernel
# x batch x positions (of the output; of the input for a transposed convolution).
CONVOLUTIONS = {
    "plain": (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 5, 5), 3 * 8 * 9 * 2 * 25),
    "depthwise": (nn.Conv2d(8, 8, 7, padding=3, groups=8), (2, 8, 5, 5), 1 * 1 * 8 * 49 * 2 * 25),
    "grouped, strided": (nn.Conv2d(8, 16, 3, stride=2, groups=4), (2, 8, 9, 9), 2 * 4 * 4 * 9 * 2 * 16),
    "grouped, one dimension": (nn.Conv1d(8, 16, 3, groups=2), (2, 8, 20), 4 * 8 * 2 * 3 * 2 * 18),
    "transposed": (nn.ConvTranspose2d(8, 16, 3, stride=2), (2, 8, 9, 9), 8 * 16 * 9 * 2 * 81),
    "transposed, grouped": (nn.ConvTranspose2d(8, 16, 3, stride=2, groups=4), (2, 8, 9, 9), 2 * 4 * 4 * 9 * 2 * 81),
    "transposed, grouped, one dimension": (nn.ConvTranspose1d(6, 9, 4, groups=3), (2, 6, 7), 2 * 3 * 3 * 4 * 2 * 7),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_backward_flops_of_convolutions_counted_by_hand(kind):
    layer, shape, product = CONVOLUTIONS[kind]
    for weight, images in ((True, True), (True, False), (False, True)):
        layer.weight.requires_grad_(weight)
        x = torch.randn(shape, requires_grad=images)
        assert backward_flops(layer(x).sum()) == 2 * product * (weight + images)
    layer.weight.requires_grad_(True)
    x = torch.randn(shape)
    assert Freezer(layer, example=x).estimate([], x).current.backward_flops == 2 * product


def test_backward_flops_of_attention_counted_by_hand():
    batch, heads, queries, keys, depth = 2, 3, 16, 24, 8
    product = 2 * batch * heads * queries * keys * depth
    q = torch.randn(batch, heads, queries, depth, requires_grad=True)
    k, v = (torch.randn(batch, heads, keys, depth, requires_grad=True) for _ in range(2))
    # Of a kernel that keeps no scores: these again, and the gradients of scores, query, key and value.
    assert backward_flops(F.scaled_dot_product_attention(q, k, v).sum()) == 5 * product
    with sdpa_kernel(SDPBackend.MATH):
        assert backward_flops(F.scaled_dot_product_attention(q, k, v).sum()) == 4 * product
    again = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)  # two products of the forward
    assert backward_flops(again.sum()) == 7 * product


def test_backward_flops_of_resnet18_are_those_of_torchs_counter(resnet18):
    x = torch.randn(2, 3, 32, 32)
    loss = resnet18(x).square().mean()
    one_image = 2_218_131_456  # as in results/bench/freezing-cpu.json
    with FlopCounterMode(display=False) as counter:
        loss.backward(retain_graph=True)
    assert backward_flops(loss) == counter.get_total_flops() == 2 * one_image


def test_kept_bytes_counts_live_storages_once_and_whole():
    x = torch.randn(10, 4, requires_grad=True)
    assert kept_bytes(lambda: x.exp().sum()) == 160  # the result of exp
    assert kept_bytes(lambda: (F.relu(x).sum(), F.relu(x).sum())) == 320
    y = torch.randn(100, 4)
    assert kept_bytes(lambda: (x * y[:10] + x * y[10:20]).sum()) == 1600  # two views of one storage
    assert kept_bytes(lambda: (x * y[:10]).sum(), exclude=[y]) == 0
    assert kept_bytes(lambda: (x * torch.ones(1).expand(10, 4)).sum()) == 4
    x = torch.randn(10, 4, requires_grad=True)

    def forward():
        x.exp().exp()
        return x.exp().sum()

    assert kept_bytes(forward) == 160


def test_stopwatch_splits_time_without_counting_twice_also_after_an_error(monkeypatch):
    watch, clock = Stopwatch(CPU), [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    for _ in range(2):
        with watch("training"):
            clock[0] += 2
            with watch("rebuild"):
                clock[0] += 3
            clock[0] += 1
        clock[0] += 50
    assert watch.seconds == {"training": 6, "rebuild": 6}
    watch.add({"training": 4, "tests": 1})
    assert watch.seconds == {"training": 10, "rebuild": 6, "tests": 1}
    watch = Stopwatch(CPU)
    with pytest.raises(RuntimeError), watch("training"):
        clock[0] += 2
        raise RuntimeError
    with watch("evaluation"):
        clock[0] += 1
    assert watch.seconds == {"training": 2, "evaluation": 1}
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) is None  # not made up
