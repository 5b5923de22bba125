"""The share of units that may be frozen, by epoch."""

import math
import re

import pytest

from ptlf.freezing.schedule import FreezeSchedule


def test_shapes_and_counts_by_hand():
    half = math.sqrt(0.5)
    for shape, expected in {
        "cosine": [0.1, 0.1 + 0.2 * (1 - half), 0.3, 0.1 + 0.2 * (1 + half), 0.5],
        "linear": [0.1, 0.2, 0.3, 0.4, 0.5],
        "constant": [0.5] * 5,
    }.items():
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
