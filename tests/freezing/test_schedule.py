from __future__ import annotations

import math

import pytest

from ptlf.freezing.schedule import SHAPES, FreezeSchedule


def test_cosine_rises_from_initial_to_final():
    schedule = FreezeSchedule(0.0, 0.4, epochs=5)
    by_hand = [0.0, 0.2 * (1 - math.sqrt(0.5)), 0.2, 0.2 * (1 + math.sqrt(0.5)), 0.4]
    assert [schedule(epoch) for epoch in range(5)] == pytest.approx(by_hand, abs=1e-12)
    assert [schedule.count(epoch, 20) for epoch in range(5)] == [0, 1, 4, 6, 8]


def test_linear_and_constant_by_hand():
    def values(shape: str) -> list[float]:
        schedule = FreezeSchedule(0.1, 0.5, epochs=3, shape=shape)
        return [schedule(epoch) for epoch in range(3)]

    assert values("linear") == pytest.approx([0.1, 0.3, 0.5])
    assert values("constant") == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize(("initial", "final"), [(0.1, 0.7), (0.3, 0.9), (0.0, 1.0), (0.4, 0.4)])
def test_rising_shapes_are_exact_at_both_ends_and_never_fall(shape, initial, final):
    schedule = FreezeSchedule(initial, final, epochs=200, shape=shape)
    ratios = [schedule(epoch) for epoch in range(200)]
    assert ratios[0] == initial
    assert ratios[-1] == final
    counts = [schedule.count(epoch, 20) for epoch in range(200)]
    assert counts == sorted(counts)
    assert counts[-1] == round(20 * final)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_epoch_is_the_last(shape):
    assert FreezeSchedule(0.1, 0.4, epochs=1, shape=shape)(0) == 0.4


def test_count_rounds_down_but_not_through_floating_point():
    assert FreezeSchedule(0, 0.29, epochs=1).count(0, 100) == 29  # 0.29 * 100 < 29 in floating point
    assert FreezeSchedule(0, 0.39, epochs=1).count(0, 20) == 7  # 7.8
    assert FreezeSchedule(0, 1.0, epochs=1).count(0, 20) == 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial": -0.1}, "initial freeze ratio must lie in"),
        ({"final": 1.5}, r"final freeze ratio must lie in \[0, 1\], not 1.5"),
        ({"final": math.nan}, "not nan"),
        ({"initial": 0.5, "final": 0.4}, "final 0.4 is below initial 0.5"),
        ({"epochs": 0}, "at least 1 epoch, not 0"),
        ({"shape": "cosin"}, "did you mean 'cosine'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FreezeSchedule(**{"epochs": 10, **settings})


def test_falling_shapes_may_start_above_final():
    assert FreezeSchedule(0.5, 0.4, epochs=2, shape="constant")(0) == 0.4


@pytest.mark.parametrize("epoch", [-1, 10])
def test_epochs_outside_the_schedule_are_refused(epoch):
    with pytest.raises(ValueError, match=rf"epoch {epoch} is outside .* 0\.\.9"):
        FreezeSchedule(epochs=10)(epoch)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_most_is_what_the_whole_task_comes_to(shape):
    schedule = FreezeSchedule(0.1, 0.4, 30, shape)
    assert schedule.most(20) == max(schedule.count(epoch, 20) for epoch in range(30)) == 8
