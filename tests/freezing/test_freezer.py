import copy
import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing.freezer import Freezer
from ptlf.freezing.units import find_units
from ptlf.training.optimizers import LARS

pytestmark = pytest.mark.slow

SOME = ("stages.0.0.conv2", "stages.1.0.conv1", "stages.1.0.shortcut.0")


def small(seed: int = 0) -> ResNet:
    """Six units, with statistics other than the initial ones, so that folding matters."""
    torch.manual_seed(seed)
    return with_statistics(ResNet(BasicBlock, (1, 1), width=8))


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def images(batch: int = 4, size: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, size, size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(tensor: Tensor) -> Tensor:
    """A copy; of a shard, of the whole."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()  # type: ignore[operator]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {key: plain(value) for key, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


OPTIMIZERS: dict[str, Callable[[Iterable], torch.optim.Optimizer]] = {
    "plain sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
    "lars": lambda p: LARS(p, 0.05, momentum=0.9, weight_decay=0.01),
}


def test_a_frozen_weight_that_is_made_up_does_not_move():
    """In train mode, spectral norm updates its estimate in every forward."""
    model = nn.Sequential(spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    freezer = Freezer(model, example=images())
    freezer.freeze(["0"])
    before, weight = snapshot(model), model[0].weight.clone()
    for _ in range(3):
        model.train()(images())
    assert torch.equal(model[0].weight, weight)
    assert all(torch.equal(value, before[key]) for key, value in snapshot(model).items())
    freezer.thaw()
    model(images())
    assert not torch.equal(model[0].weight, weight)


def plainly_frozen(model: nn.Module, units: list, names: set[str]) -> None:
    """The reference: requires_grad=False, and norms in eval mode."""
    model.train().requires_grad_(True)
    for unit in units:
        if unit.name in names:
            for parameter in unit.parameters():
                parameter.requires_grad_(False)
            for norm in unit.norms:
                norm.eval()


def test_features_with_running_and_with_batch_statistics():
    x, trained = images(), small()(images())
    expected = small().eval()(x)
    for options in ({}, {"batch_statistics": True}, {"save_memory": False}):
        model = small()
        freezer = Freezer(model, **options)
        freezer.freeze(len(freezer.units))
        torch.testing.assert_close(model.eval()(x), expected)
        torch.testing.assert_close(model.train()(x), trained if "batch_statistics" in options else expected)
        freezer.thaw()
        model(x)
        assert model.stages[1][0].bn1.num_batches_tracked == 1


def test_state_dict_never_changes_and_once_thawed_it_trains_as_if_never_frozen():
    never, once = small(), small()
    for model in (never, once):
        model.stem.conv.weight.requires_grad_(False)
    before, freezer = snapshot(once), Freezer(once)
    freezer.freeze(["stem.conv", *SOME])
    assert equal(before, snapshot(once))
    freezer.thaw()
    assert equal(before, snapshot(once))
    assert [name for name, p in once.named_parameters() if not p.requires_grad] == ["stem.conv.weight"]
    for model in (never, once):
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for _ in range(3):
            gradients(model, images())
            optimizer.step()
    assert equal(snapshot(never), snapshot(once))


def test_freeze_adds_repeats_are_harmless_and_what_is_wrong_changes_nothing():
    freezer = Freezer(small())
    freezer.freeze(SOME[::-1])
    freezer.freeze([SOME[0]])
    with pytest.raises(ValueError, match=r"did you mean 'stages\.0\.0\.conv2'"):
        freezer.freeze(["stem.conv", "stages.0.0.conv22"])
    with pytest.raises(ValueError, match="unknown unit 'head'"):
        freezer.load_state_dict({"frozen": ["stem.conv", "head"]})
    assert freezer.frozen == SOME
    freezer.freeze("stem.conv")
    assert freezer.frozen == ("stem.conv", *SOME)
    freezer.thaw()
    freezer.thaw()
    assert freezer.frozen == ()
    some = Freezer(freezer.module, units=freezer.units[:2])
    assert some.freeze([freezer.units[1].name]) == [freezer.units[1].name]
    with pytest.raises(ValueError, match="unknown unit"):
        some.freeze([SOME[1]])


@pytest.mark.parametrize("options", [{}, {"save_memory": False}], ids=str)
@pytest.mark.parametrize("patched", [False, True])
def test_of_two_freezers_one_at_a_time_may_freeze(options, patched):
    """Also where freezing patches nothing. Else the second one's thaw would leave the first one's units frozen."""
    layer = nn.Conv2d(4, 4, 1) if patched else nn.Linear(4, 4)
    x = torch.zeros(2, 4, 4, 4)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2))
    first, second = Freezer(model, example=x, **options), Freezer(model, example=x, **options)
    first.freeze("0")
    assert ("forward" in model[0].__dict__) == (patched and options == {})
    for held in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="'0' is frozen by another Freezer"):
            Freezer(held, example=x, **options)
    with pytest.raises(ValueError, match="'0' is frozen by another Freezer"):
        second.freeze("2")
    twin, own = copy.deepcopy((model, first))
    own.freeze("2")
    own.thaw()
    assert all(parameter.requires_grad for parameter in twin.parameters())
    first.thaw()
    second.freeze("2")


def test_weights_loaded_into_a_frozen_module_count_and_it_pickles_and_takes_other_layouts():
    model, other, x = small(0), small(1).eval(), images()
    freezer = Freezer(model)
    freezer.freeze(SOME)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model.eval()(x), other(x))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    model, x = small().double(), images(dtype=torch.float64)
    Freezer(model).freeze(SOME)
    expected = gradients(model, x)
    same(gradients(model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)), expected)


def compare(
    model: nn.Module, freezer: Freezer, twin: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Features and gradients of the frozen module, run by `call`, against those of a copy that is plainly frozen."""
    plainly_frozen(twin, find_units(twin, x), set(freezer.frozen))
    twin.load_state_dict(model.state_dict())
    results = []
    for module, function in ((model, model if call is None else call), (twin, twin)):
        y = x.clone().requires_grad_(x.is_floating_point())
        module.zero_grad()
        output = function(y)
        if output.requires_grad:
            output.square().mean().backward()
        tensors = {"output": output.detach(), "input": y.grad}
        tensors |= {name: p.grad for name, p in module.named_parameters()}
        results.append({name: tensor for name, tensor in tensors.items() if tensor is not None})
    near = {"rtol": 1e-9, "atol": 1e-9} if output.dtype == torch.float64 else {}
    torch.testing.assert_close(*results, **near)


class Odd(nn.Module):
    """Norms that must not be folded: with an activation inside, with two input layers, with an input used elsewhere."""

    class ActiveNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.relu(super().forward(input))

    class Standardised(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, self.weight - self.weight.mean(), self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.active = nn.Conv2d(3, 4, 3), self.ActiveNorm(4)
        self.second, self.third, self.shared = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.fourth, self.beside = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.own, self.last = self.Standardised(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.active(self.first(x))
        x = self.shared(self.second(x)) * self.shared(self.third(x))
        y = self.fourth(x)
        return self.last(self.own(self.beside(y) + y))


def test_layers_and_norms_of_every_kind():
    """Among them norms that cannot be folded."""
    torch.manual_seed(0)
    linear = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()]
    convolutions = [
        nn.Conv2d(3, 8, 3, stride=2, bias=True), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2), nn.BatchNorm2d(8, affine=False), nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4, track_running_stats=False),
    ]  # fmt: skip
    for model, x, sets in (
        (with_statistics(nn.Sequential(*linear, nn.Linear(8, 4))), torch.randn(5, 6), ("0", "3", "6", "0 6")),
        (nn.Sequential(*convolutions), images(2, 12), ("0 3", "3 6", "6")),
        (with_statistics(Odd()), images(2, 8), ("first", "second", "third", "fourth own")),
    ):
        twin, freezer = copy.deepcopy(model.double().train()), Freezer(model, example=x.double())
        for names in (len(freezer.units), *map(str.split, sets)):
            freezer.freeze_only(names)
            compare(model, freezer, twin, x.double())


def test_compiles_without_a_graph_break():
    model, x = small(), images()
    Freezer(model).freeze(SOME)
    expected = gradients(model, x)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False), x)
    torch.testing.assert_close({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected)
