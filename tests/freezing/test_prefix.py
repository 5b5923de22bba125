"""Two models with the same frozen prefix share one forward through it."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from architectures import HUGGING, OWN, hugging, own
from torch import Tensor, nn

from ptlf.freezing import Freezer
from ptlf.freezing.prefix import find_prefix


class Skip(nn.Module):
    """A block whose input is also its shortcut, computed by functions between the submodules."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.norm(self.conv1(x)))))


def network(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*(Skip(4) for _ in range(blocks))), nn.Flatten())


def freeze(module: nn.Module, example: Tensor, share: float) -> Freezer:
    """The first units, and the parameters that belong to none."""
    freezer = Freezer(module, example=example)
    freezer.freeze([unit.name for unit in freezer.units[: round(share * len(freezer.units))]])
    return freezer


def test_the_cut_is_the_last_frozen_module_that_alone_decides_the_rest() -> None:
    module, images = network(), torch.randn(2, 3, 8, 8)
    assert find_prefix(module.train(), images) is None
    module[0].requires_grad_(False)
    assert find_prefix(module, images).cut == "0"  # type: ignore[union-attr]
    module[1][0].requires_grad_(False)
    module[1][1].conv1.requires_grad_(False)  # its block's shortcut needs the block's input too
    module[1][0].norm.eval()
    assert find_prefix(module, images).cut == "1.0"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OWN + HUGGING)
def test_output_and_gradients_are_those_of_the_whole_module(name: str) -> None:
    module, images = own(name) if name in OWN else hugging(name)
    module.train()
    freeze(module, images, share=0.6)
    prefix = find_prefix(module, images[:2])
    assert prefix is not None
    weights = [p for p in module.parameters() if p.requires_grad]
    whole, parts = module(images), prefix.rest(module, prefix(images))
    assert torch.equal(whole, parts)
    found, wanted = (torch.autograd.grad(y.sin().sum(), weights, allow_unused=True) for y in (parts, whole))
    for left, right in zip(found, wanted, strict=True):
        assert left is right is None or torch.allclose(left, right, atol=1e-7)


def test_a_copy_continues_from_the_shared_output_without_running_the_prefix() -> None:
    module, images = network(), torch.randn(4, 3, 8, 8)
    other = deepcopy(module).eval()
    freeze(module.train(), images, share=0.5)
    with torch.no_grad():
        for p in other[1][2].parameters():
            p.add_(0.1)
    prefix, calls = find_prefix(module, images[:2]), list[str]()
    for name, part in other.named_modules():
        part.register_forward_hook(lambda part, args, output, name=name: calls.append(name))
    h = prefix(images)  # type: ignore[misc]
    assert not h.requires_grad
    assert torch.allclose(prefix.rest(other, h), other(images), atol=1e-6)  # type: ignore[union-attr]
    assert all(part._compiled_call_impl is None for part in (*module.modules(), *other.modules()))
    calls.clear()
    prefix.rest(other, h)  # type: ignore[union-attr]
    assert "0" not in calls
    assert "1.0.conv1" not in calls
    assert "1.2.conv1" in calls


def test_randomness_and_running_statistics_end_the_prefix() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 4, 3), nn.Flatten())
    images = torch.ones(2, 3, 8, 8)
    module[:3].requires_grad_(False)
    module.append(nn.Linear(64, 2))
    assert find_prefix(module.train(), images).cut == "0"  # type: ignore[union-attr]
    assert find_prefix(module.eval(), images).cut == "3"  # type: ignore[union-attr]
    norm = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).train()
    norm[:2].requires_grad_(False)
    before = deepcopy(norm.state_dict())
    find_prefix(norm, images)
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())
