import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recmill.report.drawing.scales import Scale, linear_ticks, log_ticks, padded_range

finite = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def test_ends_of_the_data_meet_the_ends_of_the_axis() -> None:
    scale = Scale(low=10, high=20, start=100, end=300)
    assert (scale(10), scale(15), scale(20)) == (100, 200, 300)


def test_an_upward_axis_runs_from_bottom_to_top() -> None:
    scale = Scale(low=0, high=1, start=250, end=50)
    assert scale(0.25) == 200


def test_a_logarithmic_axis_gives_each_decade_the_same_length() -> None:
    scale = Scale(low=1, high=1000, start=0, end=300, is_log=True)
    assert [scale(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])


def test_values_below_a_logarithmic_axis_stay_on_it() -> None:
    assert Scale(low=1, high=1000, start=0, end=300, is_log=True)(0) == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 400_000, [0, 100_000, 200_000, 300_000, 400_000]),
        (0.733, 0.818, [0.74, 0.76, 0.78, 0.8]),
        (-3, 7, [-2, 0, 2, 4, 6]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert linear_ticks(low, high, 5) == expected


def test_logarithmic_ticks_are_powers_of_ten() -> None:
    assert log_ticks(1, 200_000, 6) == [1, 10, 100, 1_000, 10_000, 100_000]
    assert log_ticks(1, 10**12, 6) == [1, 10**2, 10**4, 10**6, 10**8, 10**10, 10**12]


def test_a_short_logarithmic_axis_gets_ticks_between_the_powers() -> None:
    assert log_ticks(1, 50, 5) == [1, 2, 5, 10, 20, 50]


@given(low=finite, width=st.floats(min_value=1e-6, max_value=1e9))
def test_ticks_lie_inside_the_axis_and_are_a_handful(low: float, width: float) -> None:
    high = low + width
    assume(high - low > 1e-6 * abs(low))
    ticks = linear_ticks(low, high, 5)
    slack = width * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert 1 <= len(ticks) <= 6


@given(values=st.lists(finite, max_size=20))
def test_the_padded_range_holds_all_values_and_is_never_empty(values: list[float]) -> None:
    low, high = padded_range(values)
    assert low < high
    assert all(low <= value <= high for value in values)
    assert math.isfinite(low)
