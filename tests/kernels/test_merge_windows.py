import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import merge_windows, take_windows

windows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12)


def test_windows_are_merged_by_hand():
    values = torch.arange(8) + 10
    merged, starts = merge_windows(values, torch.tensor([5, 1, 2, 7]), torch.tensor([2, 3, 3, 0]))
    assert merged.tolist() == [11, 12, 13, 14, 15, 16]
    assert starts.tolist() == [4, 0, 1, 0]


@given(windows)
def test_merged_windows_hold_the_same_values_and_nothing_else(pairs):
    values = torch.arange(40) * 7
    starts = torch.tensor([start for start, _ in pairs], dtype=torch.int64)
    lengths = torch.tensor([length for _, length in pairs], dtype=torch.int64)
    merged, new_starts = merge_windows(values, starts, lengths)
    expected, expected_starts = merge_windows(values, starts, lengths, kernel="reference")
    assert torch.equal(merged, expected)
    assert torch.equal(new_starts, expected_starts)
    assert torch.equal(take_windows(merged, new_starts, lengths), take_windows(values, starts, lengths))


def test_windows_outside_of_the_values_are_refused():
    with pytest.raises(ValueError, match="lie outside"):
        merge_windows(torch.arange(4), torch.tensor([2]), torch.tensor([3]))
