"""Which units are frozen when, in several tasks one after the other."""

import copy
import itertools
import math
import re

import pytest
import torch
from torch import nn

from ptlf.core.errors import UserError
from ptlf.freezing import POLICIES, Freezer, FreezeSchedule, ProgressiveFreezing
from ptlf.freezing.cost import Saving
from ptlf.freezing.policies import CostAware
from ptlf.run.config import from_dict

EPOCHS = 3
NEEDED = {"final": 0.5, "thaw": "needed"}
RATIOS = [  # by task, from the second on
    {"0": 0.9, "1": 0.8, "2": 0.1, "3": 0.2},
    {"0": 0.9, "1": 0.1, "2": 0.8, "3": 0.7},
    {"0": 0.1, "1": 0.2, "2": 0.3, "3": 0.9},
]


def freezing(policy: str | CostAware, savings=None, initial=0.0, final=0.4, thaw="all") -> ProgressiveFreezing:
    """Of four linear layers."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    freezer = Freezer(model, torch.optim.SGD(model.parameters(), 0.1), example=torch.zeros(1, 2))
    made = POLICIES[policy]() if isinstance(policy, str) else policy
    schedule = FreezeSchedule(initial, final, EPOCHS, "linear")
    return ProgressiveFreezing(freezer, made, schedule, thaw=thaw, savings=savings)


def begin_epoch(plan: ProgressiveFreezing, epoch: int, of: dict[str, float] | None = None) -> None:
    plan.begin_epoch(epoch, (lambda names: {name: of[name] for name in names}) if plan.needs_ratios(epoch) else None)


def frozen_by_epoch(plan: ProgressiveFreezing, task: int, ratios: dict[str, float] | None = None) -> list[str]:
    """The frozen units in each epoch of the task (from 0), as one word each."""
    plan.begin_task(task)
    found = []
    for epoch in range(EPOCHS):
        begin_epoch(plan, epoch, ratios)
        found.append("".join(plan.freezer.frozen))
    return found


@pytest.mark.parametrize("thaw", ["all", "needed"])
def test_units_that_freeze_again_stay_frozen(thaw):
    plan = freezing("correlation", final=0.5, thaw=thaw)
    assert plan.context.sizes == dict.fromkeys("0123", 2 * 2 + 2)  # weight and bias
    found = [frozen_by_epoch(plan, task, RATIOS[task - 1]) for task in range(4)]
    second = [["", "", ""], ["", "0", "01"]]
    if thaw == "all":
        assert found == [*second, ["", "0", "02"], ["", "3", "23"]]
        return
    # Of 0 and 1, task 3 would freeze 0 and 2: 0 stays. Of those, task 4 would freeze 2 and 3: 2 stays.
    assert found == [*second, ["0", "0", "02"], ["2", "2", "23"]]
    assert [entry["events"] for entry in plan.log[1:]] == [
        [{"epoch": 1, "frozen": ["0"]}, {"epoch": 3, "frozen": ["2"]}],
        [{"epoch": 1, "frozen": ["2"]}, {"epoch": 3, "frozen": ["3"]}],
    ]
    assert [entry["order"] for entry in plan.log[1:]] == [["0", "2"], ["2", "3"]]


def test_units_stay_as_the_share_grows_and_freeze_with_those_they_are_tied_to():
    plan = freezing("correlation", initial=0.25, final=0.75, thaw="needed")
    assert frozen_by_epoch(plan, 1, RATIOS[0]) == ["0", "01", "013"]
    # Task 3 would freeze 0, 2 and 3: the last two of 0, 1 and 3 that stay are more than the one of the first epoch.
    assert frozen_by_epoch(plan, 2, RATIOS[1]) == ["03", "03", "023"]
    plan = freezing("ascending", final=0.5, thaw="needed")
    assert [frozen_by_epoch(plan, task) for task in range(3)] == [["", "", ""], ["", "0", "01"], ["01", "01", "01"]]
    plan.schedule = FreezeSchedule(0, 1.0, EPOCHS, "linear")
    assert frozen_by_epoch(plan, 3) == ["01", "01", "0123"]
    plan = freezing("ascending", final=0.25)
    plan.freezer.module[2].weight = plan.freezer.module[0].weight
    assert frozen_by_epoch(plan, 1) == ["", "", "02"]
    assert plan.log == [{"task": 2, "ratios": {}, "order": ["0", "2"], "events": [{"epoch": 3, "frozen": ["0", "2"]}]}]


def test_cost_aware_needs_no_other_ratios_where_units_stay():
    class Everything(CostAware):
        """Looks at all ratios, whether they can matter or not."""

        def ratios_needed(self, candidates, frozen, context, ratios):
            return ratios(candidates)

    generator, asked = torch.Generator().manual_seed(0), [0, 0]
    for _ in range(20):
        costs = torch.rand(4, 3, generator=generator).tolist()
        savings = {name: Saving(w, i, int(1000 * b)) for name, (w, i, b) in zip("0123", costs, strict=True)}
        plans = [freezing(policy, savings, final=0.5, thaw="needed") for policy in (CostAware(), Everything())]
        for task in range(4):
            values = (torch.rand(4, generator=generator, dtype=torch.float64) / 2 + 0.5).tolist()
            found = [frozen_by_epoch(plan, task, dict(zip("0123", values, strict=True))) for plan in plans]
            assert found[0] == found[1]
        asked = [n + sum(len(entry["ratios"]) for entry in plan.log) for n, plan in zip(asked, plans, strict=True)]
    assert asked[0] < asked[1]


def test_states_in_the_middle_of_a_task_keep_its_schedule():
    whole = freezing("correlation", **NEEDED)
    expected = [frozen_by_epoch(whole, task, RATIOS[task - 1]) for task in range(4)]
    for task, epoch in itertools.product((1, 2, 3), range(EPOCHS)):
        first, second = (freezing("correlation", **NEEDED) for _ in range(2))
        for before in range(task):
            frozen_by_epoch(first, before, RATIOS[before - 1])
        first.begin_task(task)
        for done in range(epoch + 1):
            begin_epoch(first, done, RATIOS[task - 1])
        second.load_state_dict(first.state_dict())
        found = ["".join(second.freezer.frozen)]
        for later in range(epoch + 1, EPOCHS):
            begin_epoch(second, later, RATIOS[task - 1])
            found.append("".join(second.freezer.frozen))
        assert found == expected[task][epoch:]
        assert second.log == whole.log[:task]
    first, second = (freezing("correlation", **NEEDED) for _ in range(2))
    for task in range(2):
        frozen_by_epoch(first, task, RATIOS[0])
    first.begin_task(2)  # what was frozen may stay so, and is thawed until the first epoch
    state = first.state_dict()
    expected = copy.deepcopy(state)
    second.load_state_dict(state)
    for plan in (first, second):
        begin_epoch(plan, 0, RATIOS[0])
    assert second.freezer.frozen == first.freezer.frozen == ("0", "1")
    assert second.log == first.log != expected["log"]
    assert state == expected


def test_freezing_settings_that_are_no_more_are_refused():
    for name, value in {"ratios": "needed", "stream_final": 0.9, "shape": "printed"}.items():
        with pytest.raises(UserError, match=rf"freezing\.{name}"):
            from_dict({"freezing": {name: value}})


def test_shapes_and_counts_by_hand():
    half = math.sqrt(0.5)
    shapes = {"linear": [0.1, 0.2, 0.3, 0.4, 0.5], "constant": [0.5] * 5}
    shapes["cosine"] = [0.1, 0.1 + 0.2 * (1 - half), 0.3, 0.1 + 0.2 * (1 + half), 0.5]
    for shape, expected in shapes.items():
        schedule = FreezeSchedule(0.1, 0.5, epochs=5, shape=shape)
        assert [schedule(epoch) for epoch in range(5)] == pytest.approx(expected, abs=1e-12), shape
        assert FreezeSchedule(0.1, 0.4, epochs=1, shape=shape)(0) == 0.4, shape  # a single epoch is the last
    assert [FreezeSchedule(0.0, 0.4, epochs=5).count(epoch, 20) for epoch in range(5)] == [0, 1, 4, 6, 8]
    assert FreezeSchedule(0.1, 0.7, epochs=200)(199) == 0.7 and FreezeSchedule(0.0, 0.4, epochs=5).most(20) == 8
    assert FreezeSchedule(0.5, 0.4, epochs=2, shape="constant")(0) == 0.4
    for final, units, count in [(0.29, 100, 29), (0.39, 20, 7), (1.0, 20, 20)]:  # 0.29 * 100 < 29; 7.8
        assert FreezeSchedule(0, final, epochs=1).count(0, units) == count


def test_bad_settings_are_named():
    for settings, message in [
        ({"initial": -0.1}, "initial freeze ratio must lie in"),
        ({"final": 1.5}, "final freeze ratio must lie in [0, 1], not 1.5"),
        ({"final": math.nan}, "not nan"),
        ({"initial": 0.5, "final": 0.4}, "final 0.4 is below initial 0.5"),
        ({"epochs": 0}, "at least 1 epoch, not 0"),
        ({"shape": "cosin"}, "one of cosine, linear, constant, not 'cosin'"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            FreezeSchedule(**{"epochs": 10, **settings})
    for epoch in (-1, 10):
        with pytest.raises(ValueError, match=rf"epoch {epoch} is outside .* 0\.\.9"):
            FreezeSchedule(epochs=10)(epoch)
