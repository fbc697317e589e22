import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import _cpu, merge_windows

windows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12)


def make_source(values, pairs):
    starts, lengths = ([pair[position] for pair in pairs] for position in range(2))
    return np.array(values, np.int64), np.array(starts, np.int64), np.array(lengths, np.int32)


def test_windows_are_merged_by_hand():
    merged, starts = merge_windows([make_source(range(10, 18), [(5, 2), (1, 3), (2, 3), (7, 0)])])
    assert merged.tolist() == [11, 12, 13, 14, 15, 16]
    assert starts.tolist() == [4, 0, 1, 0]


@given(st.lists(windows, max_size=3))
def test_merged_windows_hold_the_same_values_and_nothing_else(windows_of_sources):
    sources = [make_source([100 * s + 7 * i for i in range(40)], pairs) for s, pairs in enumerate(windows_of_sources)]
    merged, new_starts = merge_windows(sources)
    expected, expected_starts = merge_windows(sources, kernel="reference")
    assert merged.tolist() == expected.tolist()
    assert new_starts.tolist() == expected_starts.tolist()
    wanted = [
        values[start : start + length].tolist() for values, *own in sources for start, length in zip(*own, strict=True)
    ]
    lengths = [length for pairs in windows_of_sources for _, length in pairs]
    assert [merged[a : a + n].tolist() for a, n in zip(new_starts, lengths, strict=True)] == wanted


def test_windows_outside_of_the_values_are_refused():
    with pytest.raises(ValueError, match="lie outside"):
        merge_windows([make_source(range(4), [(2, 3)])])


def test_numbers_of_parts_that_overflow_are_refused():
    """Found by tests/fuzz: three times the number wrapped around to a small one."""
    parts, out = np.zeros(3, np.int64), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="more parts than there is room for"):
        _cpu.copy_parts([np.zeros(1, np.int64)], parts, 2**62 + 1, out)
