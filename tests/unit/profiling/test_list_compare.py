"""Comparing whole columns of lists agrees with comparing the lists one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from recmill.profiling.list_compare import ListColumn, shifted_by_one, spans_equal

columns = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30)


def as_lists(rows: list[list[int]]) -> ListColumn:
    # Sliced, because a chunk of a table rarely starts at the beginning of its buffers.
    return ListColumn.from_arrow(pa.chunked_array([pa.array([[9, 9], *rows], pa.list_(pa.int64()))]).slice(1))


@given(columns)
def test_same_as_previous(rows: list[list[int]]) -> None:
    expected = [i > 0 and rows[i] == rows[i - 1] for i in range(len(rows))]
    assert as_lists(rows).same_as_previous_N.tolist() == expected


def is_shift(before: list[int], now: list[int]) -> bool:
    if len(now) < 2 or len(now) - len(before) not in (0, 1):
        return False
    kept = len(now) - 1
    return now[:-1] == before[len(before) - kept :] or now[1:] == before[:kept]


@given(columns)
def test_shifted_by_one(rows: list[list[int]]) -> None:
    candidates = np.arange(1, max(1, len(rows)))
    expected = sum(is_shift(rows[i - 1], rows[i]) for i in range(1, len(rows)))
    assert shifted_by_one(as_lists(rows), candidates) == expected


@given(columns, st.integers(1, 7))
def test_distinct_lists_a_group(rows: list[list[int]], size: int) -> None:
    lists, group = as_lists(rows), np.arange(len(rows)) // size
    expected = len({(i // size, tuple(row)) for i, row in enumerate(rows)})
    assert lists.count_distinct(group, np.arange(len(rows))) == expected


@given(st.lists(st.integers(0, 1), min_size=8, max_size=20), st.data())
def test_spans_equal(values: list[int], data: st.DataObject) -> None:
    spans = [
        (data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))) for _ in range(5)
    ]
    left, right, lengths = (np.array(column) for column in zip(*spans, strict=True))
    expected = [values[a : a + n] == values[b : b + n] for a, b, n in spans]
    assert spans_equal(np.array(values), left, right, lengths).tolist() == expected


def test_floats_are_compared_by_their_bits() -> None:
    lists = ListColumn.from_arrow(pa.chunked_array([pa.array([0.0, 0.0, -0.0, 1.5], pa.float32())]))
    assert lists.same_as_previous_N.tolist() == [False, True, False, False]
