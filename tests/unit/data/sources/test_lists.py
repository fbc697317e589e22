import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.data.sources.lists import (
    Jagged,
    gather_windows,
    numbers_of,
    offsets_of,
    position_in_run,
    space_out,
    starts_of_runs,
    window_column,
)

VALUES = np.arange(100, 130)
WINDOWS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=20)


@given(WINDOWS)
def test_windows_are_slices_of_the_values(windows):
    starts = np.array([start for start, _ in windows], dtype=np.int64)
    lengths = np.array([length for _, length in windows], dtype=np.int64)
    expected = [VALUES[start : start + length].tolist() for start, length in windows]
    assert gather_windows(VALUES, starts, lengths).tolist() == [value for part in expected for value in part]
    assert window_column(VALUES, starts, lengths).to_pylist() == expected


def test_windows_of_one_length_may_overlap():
    assert gather_windows(VALUES, np.array([0, 1, 27]), np.array([3, 3, 3])).tolist() == [
        *(100, 101, 102),
        *(101, 102, 103),
        *(127, 128, 129),
    ]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
def test_select_and_concat_keep_lists(lists, data):
    lengths = np.array([len(entry) for entry in lists])
    jagged = Jagged(values=np.array([v for entry in lists for v in entry], dtype=np.int64), offsets=offsets_of(lengths))
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=8))
    picked = Jagged.concat([jagged.select(np.array(rows, dtype=np.int64)), jagged])
    bounds = zip(picked.offsets[:-1], picked.offsets[1:], strict=True)
    assert [picked.values[a:b].tolist() for a, b in bounds] == [*(lists[row] for row in rows), *lists]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=6), st.integers(1, 4))
def test_spaced_timestamps_are_the_earliest_that_keep_the_distance(sessions, spacing):
    sessions = [sorted(session) for session in sessions]
    keys = np.repeat(np.arange(len(sessions)), [len(session) for session in sessions])
    spaced = space_out(np.concatenate([np.array(s) for s in sessions]), starts_of_runs(keys), spacing=spacing)
    expected = []
    for session in sessions:
        for position, time in enumerate(session):
            expected.append(time if position == 0 else max(time, expected[-1] + spacing))
    assert spaced.tolist() == expected


def test_positions_restart_with_every_run():
    assert position_in_run(starts_of_runs(np.array([4, 4, 2, 4, 4, 4]))).tolist() == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int64", [3, -1, 7, 2, 5]),
        ("int8", [3, -1, 7, 2, 5]),
        ("uint32", [3, 1, 7, 2, 5]),
        ("float64", [0.5, None, float("nan"), 2.0, None]),
        ("float32", [0.5, 1.5, 2.5, 2.0, 0.0]),
        ("bool", [True, False, True, True, False] * 5),
        ("int64", [3, None, 7]),
        ("string", ["a", None, "c"]),
        ("int64", []),
    ],
)
def test_numbers_of_a_column_are_those_of_arrow(kind, values):
    whole = pa.array(values, kind)
    for column in (
        whole,
        whole[1:],
        whole[2:4],
        pa.chunked_array([whole[:2], whole[2:], whole]),
        pa.chunked_array([], kind),
    ):
        found, expected = numbers_of(column), column.to_numpy(zero_copy_only=False)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == (expected.dtype if len(expected) else found.dtype)
