"""Days that stand out."""

from __future__ import annotations

import pyarrow as pa

from recmill.data.checks.days import check_days

DAY = 20_000  # 2024-10-04


def days(num: list[int], positive: list[int], day: list[int] | None = None) -> pa.Table:
    return pa.table({"day": day or [DAY + n for n in range(len(num))], "num_events": num, "label_0": positive})


def test_steady_days_are_no_finding() -> None:
    found, listed = check_days(days([1000, 900, 1100], [100, 95, 104]), {"label_0": "click"})
    assert found == []
    assert listed[0] == {"day": "2024-10-04", "num_events": 1000, "click": 0.1}


def test_a_day_without_labels_stands_out() -> None:
    found, _ = check_days(days([1000] * 6, [100, 100, 100, 0, 100, 100]), {"label_0": "click"})
    (finding,) = found
    assert "1 day has an unusual rate of 'click': 0.00% on 2024-10-07" in finding.message
    assert finding.examples == ({"day": "2024-10-07", "events": 1000, "click": 0.0},)


def test_chance_on_a_small_day_does_not_stand_out() -> None:
    found, _ = check_days(days([1000, 1000, 20], [100, 100, 6]), {"label_0": "click"})
    assert found == []


def test_empty_and_nearly_empty_days_are_named() -> None:
    day = [DAY, *range(DAY + 5, DAY + 9)]
    found, _ = check_days(days([3, 1000, 2, 1000, 1000], [0] * 5, day), {})
    empty, small = found
    assert "4 of 9 days have no events, the first from 2024-10-05" in empty.message
    assert small.examples == ({"day": "2024-10-10", "events": 2},)  # the first day may be cut
