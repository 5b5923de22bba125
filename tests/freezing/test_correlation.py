from __future__ import annotations

import copy
import itertools
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing import subspace
from ptlf.freezing.correlation import TaskCorrelation, correlation_ratios, gradients_of, mean_gradients
from ptlf.freezing.subspace import columns, empty_gram, leading_eigenvectors, passes, projection_ratio
from ptlf.freezing.units import Unit


def gram(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    blocks = columns(layer, x)
    return sum((block @ block.mT for block in blocks), empty_gram(layer))


NUMPY_PADDING = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}


class Network(nn.Module):
    """Every kind of layer in sequence; `inputs` returns the input of each, without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.strided = nn.Conv2d(8, 12, 3, stride=(2, 1), padding=(1, 0), bias=False)
        self.grouped = nn.Conv2d(12, 8, 3, padding="same", groups=4, padding_mode="circular")
        self.dilated = nn.Conv2d(8, 8, 3, dilation=2, padding=2, padding_mode="reflect")
        self.depthwise = nn.Conv2d(8, 16, (2, 3), padding="same", groups=8, padding_mode="replicate")
        self.pointwise = nn.Conv2d(16, 16, 1, stride=2, padding=1)
        self.plain = nn.Conv2d(16, 16, 2, padding="valid", bias=False)
        self.tokens = nn.Linear(16, 24)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(24, 10, bias=False)

    def inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = {"stem": x}
        seen["strided"] = self.norm(self.stem(x)).relu()
        for name, after in itertools.pairwise(CONVOLUTIONS[1:]):
            seen[after] = F.leaky_relu(self.get_submodule(name)(seen[name]), 0.1)
        seen["tokens"] = self.plain(seen["plain"]).flatten(2).mT  # (B, positions, 16)
        seen["head"] = self.drop(self.tokens(seen["tokens"]).relu()).mean(1)
        return seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inputs(x)["head"])


CONVOLUTIONS = ["stem", "strided", "grouped", "dilated", "depthwise", "pointwise", "plain"]
NAMES = [*CONVOLUTIONS, "tokens", "head"]


def unit(module: nn.Module, name: str) -> Unit:
    return Unit(name, module.get_submodule(name), None, None)


def units_of(module: nn.Module, names: list[str]) -> list[Unit]:
    return [unit(module, name) for name in names]


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    network = Network()
    network.norm.running_mean.normal_()
    return network


def task_loss(module: nn.Module, seed: int = 3):
    """A loss on new images at every call, drawn from the caller's generator."""
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        return module(torch.randn(6, 3, 8, 8, generator=generator)).logsumexp(1).mean()

    return loss


def naive_columns(layer: nn.Module, inputs: torch.Tensor, group: int) -> np.ndarray:
    """R (m x n), patch by patch."""
    x = inputs.detach().double().numpy()
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1]).T
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    if layer.padding == "same":
        rows, cols = (((d * (k - 1)) // 2, d * (k - 1) - d * (k - 1) // 2) for d, k in ((dh, kh), (dw, kw)))
    else:
        rows, cols = ((p, p) for p in ((0, 0) if layer.padding == "valid" else layer.padding))
    x = np.pad(x, ((0, 0), (0, 0), rows, cols), mode=NUMPY_PADDING[layer.padding_mode])
    size = x.shape[1] // layer.groups
    patches = []
    for image in x:
        for top in range(0, x.shape[2] - dh * (kh - 1), sh):
            for left in range(0, x.shape[3] - dw * (kw - 1), sw):
                patch = []
                for channel in range(group * size, (group + 1) * size):
                    for i in range(kh):
                        for j in range(kw):
                            patch.append(image[channel, top + i * dh, left + j * dw])
                patches.append(patch)
    return np.array(patches).T


def reference_ratio(layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, threshold: float) -> float:
    """||G B B^T|| / ||G|| by numpy's SVD, group by group."""
    groups = getattr(layer, "groups", 1)
    g_all = gradient.double().numpy().reshape(gradient.shape[0], -1)
    rows = len(g_all) // groups
    projected = 0.0
    for group in range(groups):
        u, s, _ = np.linalg.svd(naive_columns(layer, inputs, group), full_matrices=False)
        energy = np.cumsum(s**2)
        basis = u[:, : 1 + np.argmax(energy >= threshold * energy[-1])]
        g = g_all[group * rows : (group + 1) * rows]
        projected += np.linalg.norm(g @ basis @ basis.T) ** 2
    return float(np.sqrt(projected) / np.linalg.norm(g_all))


@pytest.mark.parametrize("images", [1, 40])
@pytest.mark.parametrize("threshold", [0.6, 0.95, 0.99])
def test_ratios_agree_with_numpy_on_every_kind_of_layer(network, images, threshold):
    replay = torch.randn(images, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    network.drop.p = 0.0  # the reference runs the losses once more
    ratios = correlation_ratios(
        network, replay, task_loss(network), threshold, batches=3, units=units_of(network, NAMES), chunk=7
    )

    twin = copy.deepcopy(network)
    loss = task_loss(twin)
    sum(loss() for _ in range(3)).backward()
    network.eval()
    with torch.no_grad():
        seen = network.inputs(replay)
    m_less_than_n = []
    for name in NAMES:
        layer = network.get_submodule(name)
        gradient = twin.get_submodule(name).weight.grad / 3
        assert ratios[name] == pytest.approx(reference_ratio(layer, seen[name], gradient, threshold), abs=1e-5), name
        m, n = naive_columns(layer, seen[name], 0).shape
        m_less_than_n.append(m < n)
    assert all(m_less_than_n) if images == 40 else m_less_than_n.count(False) >= 3
    assert len({round(ratio, 6) for ratio in ratios.values()}) == len(NAMES)  # nine different ratios


def test_splitting_changes_nothing(network, monkeypatch):
    replay = torch.randn(20, 3, 8, 8)
    units = units_of(network, NAMES)
    network.eval()

    def ratios(replay, chunk):
        return correlation_ratios(network, replay, task_loss(network), batches=2, units=units, chunk=chunk)

    whole = ratios(replay, 20)
    blocks = []
    columns = subspace.columns

    def watched(layer, inputs):
        for block in columns(layer, inputs):
            blocks.append((block.numel() * 8, layer))
            yield block

    monkeypatch.setattr(subspace, "columns", watched)
    monkeypatch.setattr(subspace, "COLUMN_BYTES", 2**16)
    split = ratios(replay, 20)
    assert split == pytest.approx(whole, abs=1e-7)
    assert len(blocks) > 2 * len(NAMES)
    assert max(size for size, _ in blocks) <= 2**16
    assert ratios(list(replay.split(6)), 4) == pytest.approx(whole, abs=1e-6)
    assert ratios(iter(replay.split(6)), 4) == pytest.approx(whole, abs=1e-6)


def test_grams_alive_never_exceed_the_largest(network, monkeypatch):
    units = units_of(network, NAMES)
    alive, peak = [0], [0]

    def freed(size: int) -> None:
        alive[0] -= size

    def watched(layer: nn.Module) -> torch.Tensor:
        made = original(layer)
        size = made.numel() * made.element_size()
        alive[0] += size
        peak[0] = max(peak[0], alive[0])
        weakref.finalize(made, freed, size)
        return made

    original = subspace.empty_gram
    largest = max(original(unit.layer).numel() * 8 for unit in units)
    monkeypatch.setattr(subspace, "empty_gram", watched)
    correlation_ratios(network, torch.randn(4, 3, 8, 8), task_loss(network), batches=1, units=units)
    assert 0 < peak[0] <= largest
    assert alive[0] == 0
    assert [name for together in passes(units) for name in together] == units
    assert 1 < len(list(passes(units))) < len(units)


def test_the_replay_is_forwarded_once_where_a_gpu_has_room(network, monkeypatch):
    units = units_of(network, NAMES)
    assert len(list(passes(units))) > 1
    gpu = [
        SimpleNamespace(layer=unit.layer, weights=[SimpleNamespace(device=torch.device("cuda", 0))]) for unit in units
    ]
    grams = sum(empty_gram(unit.layer).nbytes for unit in units)
    for free, count in {grams * 7: 2, grams * 8: 1}.items():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**15))
        assert len(list(passes(gpu))) == count
    assert list(passes([])) == []


def test_ratios_asked_for_one_by_one_are_those_of_all_at_once(network):
    replay, units = torch.randn(20, 3, 8, 8), units_of(network, NAMES)
    network.drop.p = 0.0
    calls = []

    def loss() -> torch.Tensor:
        calls.append(1)
        return task_loss(network)()

    torch.manual_seed(0)
    whole = correlation_ratios(network, replay, loss, batches=2, units=units)
    torch.manual_seed(0)
    some = TaskCorrelation(network, replay, loss, units=units, batches=2)
    assert len(calls) == 4
    for name in reversed(NAMES):
        assert some([name]) == pytest.approx({name: whole[name]}, abs=1e-12)
    assert some([]) == {}
    assert len(calls) == 4  # gradients are computed once
    assert set(some.directions) == set(NAMES)


def state(module: nn.Module) -> dict[str, object]:
    return {
        "tensors": {name: value.clone() for name, value in module.state_dict().items()},
        "identities": {name: id(value) for name, value in (*module.named_parameters(), *module.named_buffers())},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        "modes": [part.training for part in module.modules()],
        "requires": [p.requires_grad for p in module.parameters()],
        "hooks": [
            (len(part._forward_pre_hooks), len(part._forward_hooks), len(part._backward_hooks))
            for part in module.modules()
        ],
        "random": torch.get_rng_state(),
        "grad_mode": torch.is_grad_enabled(),
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b


@pytest.mark.parametrize("fails", ["never", "in the loss", "in the replay"])
def test_everything_is_left_as_it_was(network, fails):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)
            self.register_buffer("queue", torch.zeros(3))
            self.momentum = nn.Parameter(torch.ones(3), requires_grad=False)

    head = Head()
    (network(torch.randn(4, 3, 8, 8)).sum() * 0.1).backward()
    network.train()
    network.norm.eval()
    network.norm.train()
    network.dilated.eval()
    network.stem.bias.requires_grad_(False)
    calls = []

    def loss() -> torch.Tensor:
        calls.append(network.training)
        head.queue = head.queue + torch.randn(3)  # replaced, not written to
        head.momentum.mul_(0.9)
        if fails == "in the loss" and len(calls) == 2:
            raise ArithmeticError("as planned")
        return head.norm(network(torch.randn(6, 3, 8, 8))).pow(3).sum()

    def run() -> None:
        replay = torch.randn(5, 3 if fails != "in the replay" else 4, 8, 8, generator=torch.Generator().manual_seed(0))
        correlation_ratios(network, replay, loss, batches=3, units=units_of(network, NAMES), keep=[head])

    before = state(network), state(head)
    if fails == "never":
        run()
    else:
        with pytest.raises(ArithmeticError if fails == "in the loss" else RuntimeError):
            run()
    after = state(network), state(head)
    for old, new in zip(before, after, strict=True):
        for part in old:
            assert same(old[part], new[part]), part
    reached = {"never": 3, "in the loss": 2, "in the replay": 3}
    assert calls == [True] * reached[fails]


def test_gradient_is_taken_in_the_mode_found_and_inputs_in_eval_mode(network):
    network.norm.running_mean.fill_(-1.0)  # far from the batch's mean
    network.drop.p = 0.0
    replay = torch.randn(40, 3, 8, 8)

    def ratios() -> dict[str, float]:
        units = units_of(network, ["strided", "head"])
        return correlation_ratios(network, replay, task_loss(network), 0.9, batches=1, units=units)

    training = ratios()
    twin = copy.deepcopy(network)
    task_loss(twin)().backward()
    seen = copy.deepcopy(network).eval().inputs(replay)
    expected = reference_ratio(network.strided, seen["strided"], twin.strided.weight.grad, 0.9)
    assert training["strided"] == pytest.approx(expected, abs=1e-5)
    network.eval()
    assert ratios()["strided"] != pytest.approx(expected, abs=1e-3)


def test_gradients_are_averaged(network):
    network.drop.p = 0.0
    units = units_of(network, ["grouped"])
    mean = mean_gradients(units, partial(gradients_of, task_loss(network)), 4)["grouped"][0]
    assert all(parameter.grad is None for parameter in network.parameters())
    loss = task_loss(network)
    sum(loss() / 4 for _ in range(4)).backward()
    assert mean.shape == (4, 2, 27)
    torch.testing.assert_close(mean.reshape(8, 3, 3, 3).float(), network.grouped.weight.grad)


def test_a_layer_called_twice_sums_inputs_and_gradients():
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, bias=False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(input=self.layer(x).relu())

    module, replay, new = Twice(), torch.randn(3, 6), torch.randn(5, 6)
    ratios = correlation_ratios(
        module, replay, lambda: module(new).pow(2).sum(), 0.9, batches=1, units=[unit(module, "layer")]
    )
    module(new).pow(2).sum().backward()
    both = torch.cat([replay, layer(replay).relu()])
    once = reference_ratio(layer, replay, layer.weight.grad, 0.9)
    assert ratios["layer"] == pytest.approx(reference_ratio(layer, both, layer.weight.grad, 0.9), abs=1e-5)
    assert ratios["layer"] != pytest.approx(once, abs=1e-3)


def test_no_gradient_no_inputs_and_unused_layers_are_zero(network):
    network.unused = nn.Linear(4, 4)
    names = ["stem", "tokens", "unused"]
    replay = torch.zeros(3, 3, 8, 8)
    units = units_of(network, names)
    ratios = correlation_ratios(network, replay, task_loss(network), batches=1, units=units)
    assert ratios["stem"] == 0.0  # inputs all zero
    assert ratios["unused"] == 0.0  # no gradient, never called
    assert 0 < ratios["tokens"] <= 1
    flat = correlation_ratios(network, replay + 1, lambda: network(replay).sum() * 0, batches=1, units=units)
    assert flat == {"stem": 0.0, "tokens": 0.0, "unused": 0.0}


def test_a_parametrised_weight_has_the_ratio_of_its_plain_one():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    made_up = copy.deepcopy(plain)
    weight_norm(made_up[0])
    x = torch.randn(6, 3, 8, 8)
    ratios, same = (
        correlation_ratios(model, x, lambda model=model: model(x).square().sum()) for model in (plain, made_up)
    )
    assert ratios["0"] > 0.5
    assert same == pytest.approx(ratios, rel=1e-4)


def test_a_weight_made_by_a_hook_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prune.random_unstructured(model[2], "weight", amount=0.5)
    x = torch.randn(6, 3, 8, 8)
    with pytest.raises(ValueError, match="the weight of unit '2' is computed anew in every forward"):
        correlation_ratios(model, x, lambda: model(x).square().sum())


def test_errors_name_the_unit_and_the_way_out(network):
    units = units_of(network, ["stem", "head"])
    replay = torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match="gradient for unit 'stem' is not finite"):
        correlation_ratios(network, replay, lambda: network(replay * float("nan")).sum(), units=units[:1])
    with pytest.raises(ValueError, match="inputs to unit 'head' are not finite"):
        correlation_ratios(network, replay * float("inf"), task_loss(network), units=units[1:])
    with pytest.raises(ValueError, match=r"threshold .* not 0"):
        correlation_ratios(network, replay, task_loss(network), 0, units=units)
    for wrong, message in (
        ((replay, task_loss(network)()), "loss_fn must be a function"),
        ((task_loss(network), task_loss(network)), "replay must be a tensor"),
        (([(replay, None)], task_loss(network)), "the replay must hold tensors of inputs, and holds a tuple"),
        ((replay, lambda: 3), "loss_fn must return the loss, a tensor, and returned a int"),
    ):
        with pytest.raises(TypeError, match=message):
            correlation_ratios(network, *wrong, units=units)
    with pytest.raises(ValueError, match="threshold"):
        correlation_ratios(network, replay, task_loss(network), 2, units=units)
    with pytest.raises(ValueError, match="batches and chunk"):
        correlation_ratios(network, replay, task_loss(network), batches=0, units=units)
    for empty in (replay[:0], []):
        with pytest.raises(ValueError, match="replay is empty"):
            correlation_ratios(network, empty, task_loss(network), units=units)
    network.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="unit 'head' is frozen"):
        correlation_ratios(network, replay, task_loss(network), units=units)


def test_units_are_all_trainable_ones_by_default():
    torch.manual_seed(0)
    encoder = ResNet(BasicBlock, (1, 1), width=4)
    encoder.stages[0][0].conv2.weight.requires_grad_(False)
    ratios = correlation_ratios(encoder, torch.randn(4, 3, 8, 8), task_loss(encoder), batches=2)
    expected = {name for name, part in encoder.named_modules() if isinstance(part, nn.Conv2d)}
    assert len(ratios) == len(expected) - 1
    assert all(0 < ratio <= 1 for ratio in ratios.values())
    assert correlation_ratios(encoder, torch.randn(4, 3, 8, 8), task_loss(encoder), units=[]) == {}


def test_low_precision_inputs_are_summed_in_float64(network):
    layer = network.strided
    x = torch.randn(50, 8, 8, 8).bfloat16()
    exact = naive_columns(layer, x, 0) @ naive_columns(layer, x, 0).T
    assert gram(layer, x).dtype == torch.float64
    np.testing.assert_allclose(gram(layer, x)[0].numpy(), exact, rtol=1e-10, atol=1e-9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_allclose(gram(layer, x)[0].numpy(), exact, rtol=1e-10, atol=1e-9)
        ratios = correlation_ratios(
            network, torch.randn(9, 3, 8, 8), task_loss(network), batches=1, units=units_of(network, NAMES)
        )
    assert all(0 < ratio <= 1 for ratio in ratios.values())


def test_an_unbatched_image_is_one_image(network):
    x = torch.randn(1, 8, 8, 8)
    assert torch.equal(gram(network.strided, x[0]), gram(network.strided, x))


def test_a_compiled_module_gives_the_same_ratios():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    torch.manual_seed(0)
    module, replay, new = Two(), torch.randn(4, 5), torch.randn(7, 5)

    def ratios() -> dict[str, float]:
        units = units_of(module, ["first", "second"])
        return correlation_ratios(module, replay, lambda: module(new).pow(2).sum(), 0.9, batches=1, units=units)

    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        traced.append(graph)
        return graph

    eager = ratios()
    module.compile(backend=backend)
    module(new)  # traced without hooks
    count = len(traced)
    assert ratios() == pytest.approx(eager, abs=1e-6)
    assert len(traced) == count > 0  # the hooks cost no new trace


def test_leading_eigenvectors_by_hand():
    values = torch.tensor([1.0, 90.0, 9.0, 0.0], dtype=torch.float64)
    kept = {0.5: 1, 0.9: 1, 0.91: 2, 0.99: 2, 0.995: 3, 1.0: 3}
    for threshold, k in kept.items():
        basis = leading_eigenvectors(torch.diag(values), threshold)
        assert basis.abs().tolist() == torch.eye(4)[:, [1, 2, 0][:k]].tolist(), threshold
    for _ in range(20):
        rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
        rotated = rotation @ torch.diag(values) @ rotation.T
        assert leading_eigenvectors(rotated, 0.99).shape == (4, 2)  # 99 of 100 is reached, whatever the rounding
        assert leading_eigenvectors(rotated, 1.0).shape == (4, 3)  # without the null space
    batch = leading_eigenvectors(torch.stack([torch.diag(values), torch.eye(4).double(), torch.zeros(4, 4)]), 0.9)
    assert [int(basis.norm(dim=0).round().sum()) for basis in batch] == [1, 4, 0]


def test_projection_ratio_by_hand():
    basis = torch.eye(3, dtype=torch.float64)[:, :1]
    assert projection_ratio([torch.tensor([[3.0, 4.0, 0.0]])], [basis]) == pytest.approx(0.6)
    assert projection_ratio([torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 4.0]])], [basis]) == pytest.approx(0.6)
    assert projection_ratio([torch.full((1, 3), 1e30)], [basis]) == pytest.approx(3**-0.5)  # no overflow
    assert projection_ratio([torch.zeros(2, 3)], [basis]) == 0.0
    assert projection_ratio([torch.ones(2, 3)], [basis[:, :0]]) == 0.0
