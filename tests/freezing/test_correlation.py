import contextlib
import copy
import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from ptlf.freezing import subspace
from ptlf.freezing.correlation import TaskCorrelation, correlation_ratios
from ptlf.freezing.subspace import Inputs, empty_gram, leading_eigenvectors, passes, projection_ratio
from ptlf.freezing.units import Unit


def gram(layer: nn.Module, *batches: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    inputs = Inputs(layer, dtype)
    for batch in batches:
        inputs.add(batch)
    assert inputs.gram is not None
    return inputs.gram


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


def units_of(module: nn.Module, names: list[str]) -> list[Unit]:
    return [Unit(name, module.get_submodule(name)) for name in names]


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


def naive_columns(layer: nn.Module, inputs: torch.Tensor, group: int = 0) -> np.ndarray:
    """R (m x n), patch by patch; of convolutions of one, two and three dimensions."""
    x = inputs.detach().double().numpy()
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1]).T
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same":
        padding = [(size // 2, size - size // 2) for size in reach]
    else:
        padding = [(p, p) for p in ([0] * len(reach) if layer.padding == "valid" else layer.padding)]
    x = np.pad(x, ((0, 0), (0, 0), *padding), mode=NUMPY_PADDING[layer.padding_mode])
    places = [range(0, size - r, s) for size, r, s in zip(x.shape[2:], reach, layer.stride, strict=True)]
    size, patches = x.shape[1] // layer.groups, []
    for image, *corner in itertools.product(x[:, group * size : (group + 1) * size], *places):
        spans = (slice(at, at + r + 1, d) for at, r, d in zip(corner, reach, layer.dilation, strict=True))
        patches.append(image[:, *spans].ravel())
    return np.array(patches).T


def svd_ratio(products: list[tuple[np.ndarray, np.ndarray]], threshold: float) -> float:
    """||G B B^T|| / ||G|| by numpy's SVD, from the gradient (C_out, m) and the inputs (m, n) of each product."""
    kept = 0.0
    for gradient, inputs in products:
        u, s, _ = np.linalg.svd(inputs, full_matrices=False)
        energy = np.cumsum(s**2)
        kept += np.linalg.norm(gradient @ u[:, : 1 + np.argmax(energy >= threshold * energy[-1])]) ** 2
    return float(np.sqrt(kept / sum(np.linalg.norm(gradient) ** 2 for gradient, _ in products)))


def reference_ratio(layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, threshold: float) -> float:
    groups = getattr(layer, "groups", 1)
    parts = gradient.double().flatten(1).chunk(groups)
    return svd_ratio([(g.numpy(), naive_columns(layer, inputs, n)) for n, g in enumerate(parts)], threshold)


@pytest.mark.parametrize(("images", "threshold"), [(1, 0.6), (1, 0.99), (40, 0.95)])
def test_ratios_agree_with_numpy_on_every_kind_of_layer(network, images, threshold):
    """Gradients are taken in the mode found, here train mode, and inputs in eval mode."""
    replay = torch.randn(images, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    network.drop.p = 0.0  # the reference runs the losses once more
    options = {"batches": 3, "units": units_of(network, NAMES), "chunk": 7}
    ratios = correlation_ratios(network, replay, task_loss(network), threshold, **options)
    twin = copy.deepcopy(network)
    loss = task_loss(twin)
    sum(loss() for _ in range(3)).backward()
    with torch.no_grad():
        seen = network.eval().inputs(replay)
    m_less_than_n = []
    for name in NAMES:
        layer = network.get_submodule(name)
        gradient = twin.get_submodule(name).weight.grad / 3
        assert ratios[name] == pytest.approx(reference_ratio(layer, seen[name], gradient, threshold), abs=1e-5), name
        m, n = naive_columns(layer, seen[name]).shape
        m_less_than_n.append(m < n)
    assert all(m_less_than_n) if images == 40 else m_less_than_n.count(False) >= 3
    assert len({round(ratio, 6) for ratio in ratios.values()}) == len(NAMES)  # nine different ratios
    units = units_of(network, ["strided"])
    in_eval = correlation_ratios(network, replay, task_loss(network), threshold, batches=3, units=units)
    assert in_eval["strided"] != pytest.approx(ratios["strided"], abs=1e-3)


def test_splitting_changes_nothing(network, monkeypatch):
    replay, units = torch.randn(20, 3, 8, 8), units_of(network, NAMES)
    network.eval()

    def ratios(replay, chunk):
        return correlation_ratios(network, replay, task_loss(network), batches=2, units=units, chunk=chunk)

    whole = ratios(replay, 20)
    sizes, columns = [], subspace.columns

    def watched(layer, batch, slides=False):
        sizes.append(8 * (made := columns(layer, batch, slides)).numel())
        return made

    monkeypatch.setattr(subspace, "columns", watched)
    monkeypatch.setattr(subspace, "COLUMN_BYTES", 2**16)
    assert ratios(replay, 20) == pytest.approx(whole, abs=1e-6)
    assert len(sizes) > 2 * len(NAMES) and max(sizes) <= 2**16
    assert ratios(list(replay.split(6)), 4) == pytest.approx(whole, abs=1e-6)
    assert ratios(iter(replay.split(6)), 4) == pytest.approx(whole, abs=1e-6)


def test_grams_alive_fit_into_their_share_of_memory(network, monkeypatch):
    units = units_of(network, NAMES)
    made: list[weakref.ref] = []

    def alive() -> int:
        return sum(gram.nbytes for reference in made if (gram := reference()) is not None)

    def watched(layer: nn.Module) -> torch.Tensor:
        gram = empty_gram(layer)
        made.append(weakref.ref(gram))
        assert alive() <= largest
        return gram

    largest = max(empty_gram(unit.layer).nbytes for unit in units)
    assert len(list(passes(units))) == 1
    monkeypatch.setattr(subspace, "GRAM_BYTES", largest)
    monkeypatch.setattr(subspace, "empty_gram", watched)
    correlation_ratios(network, torch.randn(4, 3, 8, 8), task_loss(network), batches=1, units=units)
    assert made and alive() == 0
    assert [name for together in passes(units) for name in together] == units
    assert 1 < len(list(passes(units))) < len(units)
    gpu = [SimpleNamespace(device=torch.device("cuda", 0))]  # which may have room for all
    grams = sum(empty_gram(unit.layer).nbytes for unit in units)
    units = [SimpleNamespace(layer=unit.layer, weights=gpu) for unit in units]
    for free, count in {grams * 7: 2, grams * 8: 1}.items():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**15))
        assert len(list(passes(units))) == count
    assert list(passes([])) == []


def test_ratios_asked_for_one_by_one_are_those_of_all_at_once(network):
    replay, units = torch.randn(20, 3, 8, 8), units_of(network, NAMES)
    network.drop.p = 0.0
    whole = correlation_ratios(network, replay, task_loss(network), batches=2, units=units)
    some = TaskCorrelation(network, replay, task_loss(network), units=units, batches=2)
    for name in reversed(NAMES):
        assert some([name]) == pytest.approx({name: whole[name]}, abs=1e-12)
    assert some([]) == {}
    assert set(some.directions) == set(NAMES)


def state(module: nn.Module) -> dict[str, object]:
    named = [*module.state_dict().items(), *((name, p.grad) for name, p in module.named_parameters())]
    return {
        "tensors": {name: value.tolist() for name, value in named if value is not None},
        "identities": [id(value) for value in (*module.parameters(), *module.buffers())],
        "modes": [part.training for part in module.modules()],
        "requires": [p.requires_grad for p in module.parameters()],
        "hooks": [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules()],
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize(("fails", "reached"), [("never", 3), ("in the loss", 2), ("in the replay", 3)])
def test_everything_is_left_as_it_was(network, fails, reached):
    head = nn.BatchNorm1d(10)
    head.register_buffer("queue", torch.zeros(3))
    head.momentum_weight = nn.Parameter(torch.ones(3), requires_grad=False)
    (network(torch.randn(4, 3, 8, 8)).sum() * 0.1).backward()
    network.train().dilated.eval()
    network.stem.bias.requires_grad_(False)
    calls = []

    def loss() -> torch.Tensor:
        calls.append(network.training)
        head.queue = head.queue + torch.randn(3)  # replaced, not written to
        head.momentum_weight.mul_(0.9)
        if fails == "in the loss" and len(calls) == 2:
            raise ArithmeticError("as planned")
        return head(network(torch.randn(6, 3, 8, 8))).pow(3).sum()

    before = state(network), state(head)
    replay = torch.randn(5, 3 if fails != "in the replay" else 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with contextlib.nullcontext() if fails == "never" else pytest.raises((ArithmeticError, RuntimeError)):
        correlation_ratios(network, replay, loss, batches=3, units=units_of(network, NAMES), keep=[head])
    assert (state(network), state(head)) == before
    assert calls == [True] * reached


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(input=self.layer(x).relu())


def test_a_layer_called_twice_sums_inputs_and_gradients_also_once_compiled():
    torch.manual_seed(0)
    module, replay, new = Twice(), torch.randn(3, 6), torch.randn(5, 6)
    layer, traced = module.layer, []

    def ratio() -> float:
        units = units_of(module, ["layer"])
        loss = lambda: module(new).pow(2).sum()  # noqa: E731
        return correlation_ratios(module, replay, loss, 0.9, batches=1, units=units)["layer"]

    eager = ratio()
    module(new).pow(2).sum().backward()
    both = torch.cat([replay, layer(replay).relu()])
    assert eager == pytest.approx(reference_ratio(layer, both, layer.weight.grad, 0.9), abs=1e-5)
    assert eager != pytest.approx(reference_ratio(layer, replay, layer.weight.grad, 0.9), abs=1e-3)
    module.compile(backend=lambda graph, inputs: (traced.append(graph), graph)[1])
    module(new)  # traced without hooks
    count = len(traced)
    assert ratio() == pytest.approx(eager, abs=1e-6)
    assert len(traced) == count > 0  # the hooks cost no new trace


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
    ratios, same = (correlation_ratios(m, x, lambda m=m: m(x).square().sum()) for m in (plain, made_up))
    assert ratios["0"] > 0.5
    assert same == pytest.approx(ratios, rel=1e-4)


def test_errors_name_the_unit_and_the_way_out(network):
    units, replay, loss = units_of(network, ["stem", "head"]), torch.randn(2, 3, 8, 8), task_loss(network)
    for wrong, error, message in (
        ((replay, lambda: network(replay * float("nan")).sum()), ValueError, "gradient for unit 'stem' is not finite"),
        ((replay * float("inf"), loss), ValueError, "inputs to unit 'stem' are not finite"),
        ((replay, loss, 0), ValueError, r"threshold .* not 0"),
        ((replay, loss, 2), ValueError, "threshold"),
        ((replay[:0], loss), ValueError, "replay is empty"),
        (([], loss), ValueError, "replay is empty"),
        (([(replay, None)], loss), TypeError, "the replay must hold tensors of inputs, not a tuple"),
        ((replay, lambda: 3), TypeError, "loss_fn must return the loss, a tensor, and returned a int"),
    ):
        with pytest.raises(error, match=message):
            correlation_ratios(network, *wrong, units=units)
    network.head.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        correlation_ratios(network, replay, loss, units=units)
    assert "head" not in correlation_ratios(network, replay, loss, batches=1), "by default all that train"
    pruned = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prune.random_unstructured(pruned[2], "weight", amount=0.5)
    with pytest.raises(ValueError, match="the weight of unit '2' is computed by a hook"):
        correlation_ratios(pruned, replay, lambda: pruned(replay).square().sum())


def test_low_precision_inputs_are_summed_in_float64_and_an_unbatched_image_is_one(network):
    layer = network.strided
    x = torch.randn(50, 8, 8, 8).bfloat16()
    exact = naive_columns(layer, x) @ naive_columns(layer, x).T
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = gram(layer, x)
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found[0].numpy(), exact, rtol=1e-10, atol=1e-9)
    one = [gram(layer, image, image) for image in (x[0], x[:1])]
    assert torch.equal(*one)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
def test_products_of_sliding_windows_are_those_of_all_patches(network, monkeypatch, dtype, tolerance):
    """A few images at a time, and rows of the kernel that are apart, as in a dilated one."""
    monkeypatch.setattr(subspace, "COLUMN_BYTES", 2**17)
    for name in CONVOLUTIONS:
        layer = network.get_submodule(name)
        x = torch.randn(40, layer.in_channels, 8, 7, generator=torch.Generator().manual_seed(1))
        found = gram(layer, x[:30], x[30:], dtype=dtype)
        for group in range(layer.groups):
            r = naive_columns(layer, x, group)
            np.testing.assert_allclose(found[group], r @ r.T, atol=tolerance * np.square(r).sum(), rtol=0, err_msg=name)


def test_float32_on_a_cpu_changes_a_ratio_by_less_than_1e_4(network, monkeypatch):
    replay, units = torch.randn(40, 3, 8, 8), units_of(network, NAMES)
    network.drop.p = 0.0

    def ratios(threshold):
        return correlation_ratios(network, replay, task_loss(network), threshold, batches=2, units=units)

    quick = {threshold: ratios(threshold) for threshold in (0.9, 0.99, 0.999)}
    assert subspace.product_dtype(network.stem, 0.999) == torch.float32
    for exact in (subspace.product_dtype(network.stem, 0.9999), subspace.product_dtype(nn.Linear(2, 2).double(), 0.9)):
        assert exact == torch.float64
    monkeypatch.setattr(subspace, "product_dtype", lambda part, threshold: torch.float64)
    for threshold, found in quick.items():
        assert found == pytest.approx(ratios(threshold), abs=1e-4)


def test_eigenvectors_and_the_ratio_by_hand():
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
    basis = torch.eye(3, dtype=torch.float64)[:, :1]
    assert projection_ratio([torch.tensor([[3.0, 4.0, 0.0]])], [basis]) == pytest.approx(0.6)
    assert projection_ratio([torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 4.0]])], [basis]) == pytest.approx(0.6)
    assert projection_ratio([torch.full((1, 3), 1e30)], [basis]) == pytest.approx(3**-0.5)  # no overflow
    assert projection_ratio([torch.zeros(2, 3)], [basis]) == 0.0
    assert projection_ratio([torch.ones(2, 3)], [basis[:, :0]]) == 0.0
