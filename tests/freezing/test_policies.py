from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import nn

from ptlf.freezing.cost import backward_flops
from ptlf.freezing.policies import POLICIES, Ascending, Context, Correlation, CostAware, CostAwareConfig, Never, Random
from ptlf.freezing.savings import BackwardSavings, Saving, measure_savings
from ptlf.freezing.units import Unit

UNITS = ["a", "b", "c", "d"]
RATIOS = {"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.7}


def cost_aware(sharpness: float) -> CostAware:
    return CostAware(CostAwareConfig(sharpness=sharpness))


def even(**changes: Saving) -> dict[str, Saving]:
    return {name: changes.get(name, Saving(1.0, 1.0, 1)) for name in UNITS}


def test_choices_by_hand():
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


def test_random_repeats_with_its_generator_and_reaches_every_order():
    def draws(seed: int, count: int) -> list[tuple[str, ...]]:
        context = Context(UNITS, generator=torch.Generator().manual_seed(seed))
        return [tuple(Random().choose(2, UNITS, [], context)) for _ in range(count)]

    state = torch.get_rng_state()
    assert draws(1, 20) == draws(1, 20) != draws(2, 20)
    assert set(draws(3, 400)) == set(itertools.permutations(UNITS, 2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_candidates_once_and_no_more_than_asked(name):
    context = Context(UNITS, RATIOS, even(), torch.Generator().manual_seed(0))
    for count in range(6):
        candidates = ["b", "c", "d"]
        chosen = POLICIES[name]().choose(count, candidates, ["a"], context)
        assert len(chosen) == len(set(chosen)) == (0 if name == "none" else min(count, 3))
        assert set(chosen) <= set(candidates) == {"b", "c", "d"}


def test_what_is_missing_is_named():
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
        assert BackwardSavings(savings, [index in frozen for index in range(4)]).current == pytest.approx(twice / 2), (
            frozen
        )
    assert BackwardSavings([Saving(0, 0, 0)], [True]).current == 0.0


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


def test_cost_aware_begins_a_prefix_that_pays_once_it_is_long_enough():
    # Alone a saves less than d; a, b and c together end the input gradients of b, c and d.
    savings = {"a": Saving(0, 1, 0), "b": Saving(2, 4, 0), "c": Saving(2, 10, 0), "d": Saving(6, 10, 0)}
    context = Context(UNITS, dict.fromkeys(UNITS, 0.9), savings)
    assert CostAware().choose(1, UNITS, [], context) == ["d"]
    context.remaining = 3
    assert CostAware().choose(1, UNITS, [], context) == ["a"]
    assert CostAware().choose(3, UNITS, [], context) == ["a", "b", "c"]
    context.ratios = {"a": 0.9, "b": 0.5, "c": 0.5, "d": 0.9}  # low ratios among them count against all
    assert CostAware().choose(1, UNITS, [], context) == ["d"]


def reference(savings: list[Saving], frozen: list[bool]) -> float:
    """`BackwardSavings.current`, summed anew."""
    first = frozen.index(False) if False in frozen else len(frozen)
    off = [saving for saving, is_frozen in zip(savings, frozen, strict=True) if is_frozen]
    inputs = [saving.input_cost for saving in savings]
    cost = sum(saving.weight_cost for saving in savings) + sum(inputs[1:])
    saved = sum(saving.weight_cost for saving in off) + sum(inputs[1 : first + 1])
    kept, freed = (sum(saving.bytes for saving in some) for some in (savings, off))
    return (saved / cost if cost else 0.0) / 2 + (freed / kept if kept else 0.0) / 2


def score(names: list[str], frozen: set[str], context: Context, sharpness: float) -> list[float]:
    """What the first, the first two, ... of these units save per unit, weighted with their ratios."""
    savings, now = [context.savings[name] for name in context.units], set(frozen)
    before, total, scores = reference(savings, [name in now for name in context.units]), 0.0, []
    for number, name in enumerate(names, start=1):
        now.add(name)
        after = reference(savings, [other in now for other in context.units])
        total += context.ratio(name, 1.0) ** sharpness * (after - before)
        before = after
        scores.append(round(total / number, 12))
    return scores


def reference_choice(count: int, candidates: list[str], frozen: list[str], context: Context, sharp: float) -> list[str]:
    chosen: list[str] = []
    for _ in range(min(count, len(candidates))):
        left = [name for name in candidates if name not in chosen]
        now, room = {*frozen, *chosen}, max(count, context.remaining) - len(chosen)
        scores = [(score([name], now, context, sharp)[0], name) for name in left]
        scores += [(one, left[0]) for one in score(left[:room], now, context, sharp)[1:]]
        chosen.append(max(scores, key=lambda scored: (scored[0], context.ratio(scored[1], 1.0)))[1])
    return chosen


@pytest.mark.parametrize("kind", ["flops", "seconds", "few values"])
def test_cost_aware_chooses_as_if_every_relief_were_summed_anew(kind):
    draw = random.Random(kind)
    for _ in range(60):
        units = [str(number) for number in range(draw.randint(1, 12))]
        cost = {
            "flops": lambda: draw.randint(10**8, 10**11),
            "seconds": lambda: draw.uniform(1e-5, 1e-2),
            "few values": lambda: draw.choice([0, 1, 2]),
        }[kind]
        savings = {name: Saving(cost(), cost(), draw.choice([0, 1, 1, 2**20, 10**9])) for name in units}
        ratios = {name: draw.choice([0.0, 0.5, 0.9, 1.0, draw.random()]) for name in units if draw.random() < 0.9}
        frozen = [name for name in units if draw.random() < 0.3]
        candidates = [name for name in units if name not in frozen]
        sharpness = draw.choice([0.0, 1.0, 8.0])
        context = Context(units, ratios, savings, remaining=draw.randint(1, 12))
        for count in (1, len(units) // 2, len(units)):
            expected = reference_choice(count, candidates, frozen, context, sharpness)
            assert cost_aware(sharpness).choose(count, candidates, frozen, context) == expected


def test_cost_aware_takes_time_that_grows_with_the_square_of_the_units():
    """Savings are read once per choice, not once per unit that might freeze."""
    reads = Counter()

    class Counted(Saving):
        def __getattribute__(self, name: str):
            reads[name] += 1
            return super().__getattribute__(name)

    units = [str(place) for place in range(60)]
    context = Context(units, dict.fromkeys(units, 0.9), {name: Counted(1.0, 1.0, 1) for name in units})
    assert CostAware().choose(60, units, [], context) == units
    assert reads["weight_cost"] <= 3 * 60**2


@pytest.mark.parametrize("room", [1, 2, 3])
def test_cost_aware_leaves_out_only_ratios_that_change_nothing(room):
    generator = torch.Generator().manual_seed(room)
    asked = 0
    for _ in range(100):
        numbers = torch.rand(4, 4, generator=generator, dtype=torch.float64).tolist()
        savings = {name: Saving(w, i, int(1000 * b)) for name, (w, i, b, _) in zip(UNITS, numbers, strict=True)}
        ratios = {name: 0.5 + row[3] / 2 for name, row in zip(UNITS, numbers, strict=True)}
        full, lazy = (Context(UNITS, given, savings, remaining=room) for given in (ratios, None))
        asks = lambda names, of=ratios: {name: of[name] for name in names}  # noqa: E731
        lazy.ratios = CostAware().ratios_needed(UNITS, [], lazy, asks)
        assert lazy.ratios.items() <= ratios.items()
        asked += len(lazy.ratios)
        frozen: list[str] = []
        while full.remaining:  # one after the other, as epochs go by
            candidates = [name for name in UNITS if name not in frozen]
            (chosen,) = CostAware().choose(1, candidates, frozen, full)
            assert CostAware().choose(1, candidates, frozen, lazy) == [chosen]
            frozen.append(chosen)
            full.remaining = lazy.remaining = full.remaining - 1
    assert 100 * room <= asked < 400


def test_cost_aware_takes_a_difference_by_rounding_for_a_tie():
    # (0.2 + 0.1) + 0.3 is larger than (0.3 + 0.2) + 0.1 in floating point, and would put e before b.
    units = ["a", "b", "c", "d", "e"]
    savings = {name: Saving(cost, 0.0, 0) for name, cost in zip(units, [0.1, 0.3, 0.2, 0.1, 0.3], strict=True)}
    context = Context(units, {"a": 0.0, "b": 1.0, "e": 1.0}, savings)
    assert CostAware().choose(1, ["a", "b", "e"], ["c", "d"], context) == ["b"]


def test_cost_aware_with_equal_savings_is_correlation():
    equal = dict.fromkeys(UNITS, Saving(1.0, 0.0, 1))
    for values in itertools.product([0.0, 0.9, 0.91], repeat=4):
        context = Context(UNITS, dict(zip(UNITS, values, strict=True)), equal)
        assert CostAware().choose(4, UNITS, [], context) == Correlation().choose(4, UNITS, [], context), values


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


def small() -> tuple[Small, list[Unit], torch.Tensor]:
    torch.manual_seed(0)
    module = Small()
    units = [Unit(name, module.get_submodule(name), None, None) for name in ("stem", "same", "down", "head")]
    return module, units, torch.randn(5, 3, 8, 8, requires_grad=True)


def test_flops_agree_with_those_of_a_real_backward():
    module, units, example = small()
    savings = measure_savings(module, units, example)
    assert sum(s.weight_cost + s.input_cost for s in savings.values()) == backward_flops(module(example).sum())
    assert savings["stem"] == Saving(2 * 5 * 64 * 8 * 27, 2 * 5 * 64 * 8 * 27, 5 * 3 * 64 * 4)
    assert savings["head"].bytes == 5 * 16 * 16 * 4
    normed = [Unit("stem", module.stem, module.norm, "norm"), *units[1:]]  # a norm keeps what the layer gives it
    assert measure_savings(module, normed, example)["stem"].bytes == (5 * 3 * 64 + 5 * 8 * 64) * 4


def test_flops_of_a_grouped_convolution_and_of_a_layer_called_twice():
    grouped = nn.Conv2d(8, 16, 3, padding=1, groups=4)
    savings = measure_savings(grouped, [Unit("conv", grouped, None, None)], torch.randn(2, 8, 5, 5))
    assert savings["conv"].weight_cost == 2 * (16 * 2 * 9) * (2 * 25)
    layer = nn.Linear(6, 6)
    twice = measure_savings(nn.Sequential(layer, layer), [Unit("layer", layer, None, None)], torch.randn(3, 6))
    assert twice["layer"] == Saving(2 * 2 * 36 * 3, 2 * 2 * 36 * 3, 2 * 3 * 6 * 4)


def test_measuring_leaves_everything_as_it_was():
    module, units, example = small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    measure_savings(module, units, example)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert module.training and module.norm.training
    assert not any(part._forward_hooks for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
