import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from ptlf.encoders.resnet import BasicBlock, ResNet
from ptlf.freezing.units import find_units, trace


def test_units_norms_and_relus_of_resnets():
    units = find_units(ResNet(BasicBlock, (2, 2, 2, 2)))
    assert len(units) == 20
    assert [unit.name for unit in units[:3]] == ["stem.conv", "stages.0.0.conv1", "stages.0.0.conv2"]
    assert [unit.name for unit in units[5:8]] == ["stages.1.0.conv1", "stages.1.0.conv2", "stages.1.0.shortcut.0"]
    assert [unit.norm_name for unit in units[5:8]] == ["stages.1.0.bn1", "stages.1.0.bn2", "stages.1.0.shortcut.1"]
    assert all(isinstance(unit.norm, nn.BatchNorm2d) for unit in units)
    assert len(units[0].parameters()) == 3
    model = ResNet(BasicBlock, (1, 1), width=8)
    seen = trace(model)
    assert seen.foldable == {unit.name for unit in seen.units}
    names = {module: name for name, module in model.named_modules()}
    keepers = {names[relu]: units for relu, units in seen.relus.items()}
    assert keepers["stem.relu"] == {"stages.0.0.conv1"}
    assert keepers["stages.0.0.relu1"] == {"stages.0.0.conv2"}
    assert keepers["stages.0.0.relu2"] == {"stages.1.0.conv1", "stages.1.0.shortcut.0"}
    assert keepers["stages.1.0.relu2"] == set()  # the average pool saves nothing
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU())
    assert list(trace(model).relus) == [model[4]]  # the first one's output is kept by the pool


class Backwards(nn.Module):
    """Of sequences of seven. Its layers are defined in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.never = nn.Linear(6, 2), nn.Linear(4, 6), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1:] == (7, 4), "not seven"
        return self.last(self.first(x))


def test_order_and_norms_are_those_of_the_data():
    x = torch.zeros(1, 7, 4)
    for example in (x, (x,), {"x": x}):
        assert [unit.name for unit in find_units(Backwards(), example)] == ["first", "last"]
    with pytest.raises(ValueError, match="example="):
        find_units(Backwards())
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2))
    assert [unit.norm_name for unit in find_units(model)] == ["1", None]
    changed = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6))
    assert find_units(changed)[0].norm is None, "changed in place before the norm"


@dataclasses.dataclass
class Output:
    states: dict[str, tuple[Tensor, ...]]


class Used(nn.Module):
    """A layer whose output is also used elsewhere: with or without a gradient, or only in train mode; or by its norm
    alone, whose output is in a dataclass or goes to the layer once more."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.conv, self.norm = use, nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.drop = nn.Dropout2d() if use == "dropout" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor | Output:
        y = self.drop(self.conv(x))
        if self.use == "detached":
            return self.norm(y) * y.detach().sigmoid()
        if self.use == "always" or (self.use == "training" and self.training):
            return self.norm(y) + y.mean()
        if self.use == "fails" and self.training:
            raise RuntimeError("needs targets")
        if self.use == "once more":
            return self.norm(self.conv(self.norm(y)))
        return Output({"last": (self.norm(y),)}) if self.use == "wrapped" else self.norm(y)


def test_a_layer_does_not_fold_if_its_output_may_be_used_elsewhere():
    for use in ("always", "dropout", "detached", "training", "fails", "nowhere", "wrapped", "once more"):
        model = Used(use).train()
        seen = trace(model)
        assert [(unit.name, unit.norm_name) for unit in seen.units] == [("conv", "norm")], use
        assert seen.foldable == ({"conv"} if use in ("nowhere", "wrapped", "once more") else set()), use
        assert model.training
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert trace(model, torch.zeros(2, 4)).foldable == {"0"}
    assert trace(model, torch.zeros(2, 6, 4)).foldable == set(), "of sequences, the norm's channels are the tokens"


class Restless(nn.Module):
    """Changes and replaces buffers, and draws random numbers, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = torch.rand(())
        return self.block(x)


def test_the_module_is_left_exactly_as_it_was():
    model = Restless()
    model.block[1].eval()
    before, (count, last) = copy.deepcopy(model.state_dict()), (model.count, model.last)
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    find_units(model)
    with pytest.raises(RuntimeError):
        find_units(model, torch.zeros(2, 5, 8, 8))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.count is count and model.last is last
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    # Nothing of a forward stays alive.
    alive: list[weakref.ref] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    seen = trace(model)
    gc.collect()
    assert seen.units and alive and all(reference() is None for reference in alive)
