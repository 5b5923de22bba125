import itertools

import pytest
import torch
from torch import nn

from ptlf.freezing.cost import BackwardSavings, Saving, backward_flops, measure_savings
from ptlf.freezing.policies import POLICIES, Ascending, Context, Correlation, CostAware, CostAwareConfig, Never, Random
from ptlf.freezing.units import Unit

UNITS = ["a", "b", "c", "d"]
RATIOS = {"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.7}


def cost_aware(sharpness: float) -> CostAware:
    return CostAware(CostAwareConfig(sharpness=sharpness))


def even(**changes: Saving) -> dict[str, Saving]:
    return {name: changes.get(name, Saving(1.0, 1.0, 1)) for name in UNITS}


def test_choices_by_hand_and_at_random():
    """Correlation takes the highest ratios and breaks ties by depth, ascending begins at the input."""
    context = Context(UNITS, ratios=RATIOS)
    for policy, count, candidates, frozen, expected in (
        (Correlation(), 4, UNITS, [], ["b", "d", "a", "c"]),
        (Correlation(), 2, ["a", "c", "d"], ["b"], ["d", "a"]),
        (Correlation(), 9, ["c"], ["a", "b", "d"], ["c"]),
        (Correlation(), 0, UNITS, [], []),
        (Ascending(), 2, ["a", "c", "d"], ["b"], ["a", "c"]),
        (Never(), 4, UNITS, [], []),
    ):
        assert policy.choose(count, candidates, frozen, context) == expected, (policy, count)

    def draws(seed: int, count: int) -> list[tuple[str, ...]]:
        context = Context(UNITS, generator=torch.Generator().manual_seed(seed))
        return [tuple(Random().choose(2, UNITS, [], context)) for _ in range(count)]

    assert draws(1, 20) == draws(1, 20) != draws(2, 20)
    assert set(draws(3, 400)) == set(itertools.permutations(UNITS, 2))


def test_every_policy_chooses_candidates_once_and_names_what_it_lacks():
    sizes = dict(zip(UNITS, (30, 10, 20, 40), strict=True))
    context = Context(UNITS, RATIOS, even(), torch.Generator().manual_seed(0), sizes=sizes)
    for (name, policy), count in itertools.product(POLICIES.items(), range(6)):
        chosen = policy().choose(count, ["b", "c", "d"], ["a"], context)
        assert len(chosen) == len(set(chosen)) == (0 if name == "none" else min(count, 3)), name
        assert set(chosen) <= {"b", "c", "d"}, name
    equal = dict.fromkeys(UNITS, Saving(1.0, 0.0, 1))
    for values in itertools.product([0.0, 0.9, 0.91], repeat=4):
        context = Context(UNITS, dict(zip(UNITS, values, strict=True)), equal)
        assert CostAware().choose(4, UNITS, [], context) == Correlation().choose(4, UNITS, [], context), values
    for policy, count, given, message in (
        (Correlation(), 2, {"ratios": {"a": 1.0}}, "ratio of unit 'b'"),
        (Correlation(), 1, {}, "ratio of unit 'a'"),
        (CostAware(), 1, {"ratios": RATIOS}, "measure_savings"),
        (CostAware(), 1, {"savings": even()}, "ratio of unit 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.choose(count, UNITS, [], Context(UNITS, **given))
    with pytest.raises(KeyError):  # asked for, and not given
        CostAware().ratios_needed(UNITS, [], Context(UNITS, savings=even()), lambda names: {})


def test_relief_by_hand():
    savings = [Saving(1, 100, 10), Saving(2, 20, 20), Saving(3, 30, 30), Saving(4, 40, 40)]
    # All that can be saved: weights 1 + 2 + 3 + 4 and inputs 20 + 30 + 40; the first unit's input is the data.
    cases = {
        (): 0.0,
        (2,): 3 / 100 + 30 / 100,
        (1, 2): 5 / 100 + 50 / 100,
        (0,): (1 + 20) / 100 + 10 / 100,  # the second unit's input gradient has no user left
        (0, 1): (3 + 20 + 30) / 100 + 30 / 100,
        (0, 2): (4 + 20) / 100 + 40 / 100,
        (0, 1, 2, 3): 1 + 1,
    }
    for frozen, twice in cases.items():
        assert BackwardSavings(savings).share(frozen) == pytest.approx(twice / 2), frozen
    assert BackwardSavings([Saving(0, 0, 0)]).share([0]) == 0.0


def test_cost_aware_by_hand():
    equal, weighed = dict.fromkeys(UNITS, 0.9), even(d=Saving(3.0, 1.0, 3))
    gap, later = {"a": 0.8, "d": 0.9}, {"a": 0.0, "b": 0.0, "c": 0.9, "d": 0.91}
    mixed = {"a": 0.1, "b": 0.9, "c": 0.1, "d": 0.8}
    for sharpness, ratios, savings, candidates, frozen, expected in (
        (8, equal, even(), UNITS, [], ["a", "b", "c"]),  # with equal ratios, the prefix
        (8, equal, even(), ["b", "c"], ["a", "d"], ["b", "c"]),
        # With b and c frozen, a ends the input gradients of b, c and d; d itself saves its weight gradient only.
        (1, gap, even(), ["a", "d"], ["b", "c"], ["a"]),
        # With a and b frozen, c lengthens the prefix and outweighs d's higher ratio; with nothing frozen it does not.
        (8, later, even(), ["c", "d"], ["a", "b"], ["c"]),
        (8, later, even(), UNITS, [], ["d"]),
        # Sharpness weighs ratios against savings.
        (0, mixed, weighed, UNITS, [], ["d"]),
        (1, mixed, weighed, UNITS, [], ["d"]),
        (20, mixed, weighed, UNITS, [], ["b"]),
    ):
        found = cost_aware(sharpness).choose(len(expected), candidates, frozen, Context(UNITS, ratios, savings))
        assert found == expected, (sharpness, ratios, frozen)
    # Alone a saves less than d; a, b and c together end the input gradients of b, c and d.
    savings = {"a": Saving(0, 1, 0), "b": Saving(2, 4, 0), "c": Saving(2, 10, 0), "d": Saving(6, 10, 0)}
    context = Context(UNITS, dict.fromkeys(UNITS, 0.9), savings)
    assert CostAware().choose(1, UNITS, [], context) == ["d"]
    context.remaining = 3
    assert CostAware().choose(1, UNITS, [], context) == ["a"]
    assert CostAware().choose(3, UNITS, [], context) == ["a", "b", "c"]
    context.ratios = {"a": 0.9, "b": 0.5, "c": 0.5, "d": 0.9}  # low ratios among them count against all
    assert CostAware().choose(1, UNITS, [], context) == ["d"]
    # (0.2 + 0.1) + 0.3 is larger than (0.3 + 0.2) + 0.1 in floating point, and would put e before b.
    units = ["a", "b", "c", "d", "e"]
    savings = {name: Saving(cost, 0.0, 0) for name, cost in zip(units, [0.1, 0.3, 0.2, 0.1, 0.3], strict=True)}
    context = Context(units, {"a": 0.0, "b": 1.0, "e": 1.0}, savings)
    assert CostAware().choose(1, ["a", "b", "e"], ["c", "d"], context) == ["b"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.same = nn.Conv2d(8, 8, 3, padding="same", dilation=2, padding_mode="circular", groups=2)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.same(self.norm(self.stem(x)).relu()))
        return self.head(x.flatten(2).mT)  # (B, 16 positions, 4)


def test_savings_agree_with_a_real_backward():
    torch.manual_seed(0)
    module, example = Small(), torch.randn(5, 3, 8, 8, requires_grad=True)
    units = [Unit(name, module.get_submodule(name)) for name in ("stem", "same", "down", "head")]
    savings = measure_savings(module, units, example)
    assert sum(s.weight_cost + s.input_cost for s in savings.values()) == backward_flops(module(example).sum())
    assert savings["stem"] == Saving(2 * 5 * 64 * 8 * 27, 2 * 5 * 64 * 8 * 27, 5 * 3 * 64 * 4)
    assert savings["head"].bytes == 5 * 16 * 16 * 4
    assert module.training and not any(part._forward_hooks for part in module.modules())
    normed = [Unit("stem", module.stem, module.norm, "norm"), *units[1:]]  # a norm keeps what the layer gives it
    assert measure_savings(module, normed, example)["stem"].bytes == (5 * 3 * 64 + 5 * 8 * 64) * 4
    layer = nn.Linear(6, 6)
    twice = measure_savings(nn.Sequential(layer, layer), [Unit("layer", layer)], torch.randn(3, 6))
    assert twice["layer"] == Saving(2 * 2 * 36 * 3, 2 * 2 * 36 * 3, 2 * 3 * 6 * 4)
