import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dedup_rows, take_rows, take_windows, window_rows


def jagged(lists, dtype=torch.int64):
    values = torch.tensor([value for row in lists for value in row], dtype=dtype)
    offsets = torch.tensor([0, *(len(row) for row in lists)]).cumsum(0)
    return values, offsets


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_lists_are_taken_feature_by_feature(kernel):
    a, a_offsets = jagged([[7, 9], [], [4]])
    b, b_offsets = jagged([[1], [2, 2], [3]])
    values, lengths = take_rows([a, b], [a_offsets, b_offsets], torch.tensor([2, 0, 2]), kernel=kernel)
    assert values.tolist() == [4, 7, 9, 4, 3, 1, 3]
    assert lengths.tolist() == [1, 2, 1, 1, 1, 1]


@given(
    lists=st.lists(st.lists(st.integers(0, 9), max_size=20), min_size=1, max_size=8),
    picks=st.lists(st.integers(0, 7), max_size=20),
    num_threads=st.integers(0, 2),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_any_choice_matches_the_lists(lists, picks, num_threads, dtype):
    rows = [pick % len(lists) for pick in picks]
    values, offsets = jagged(lists, dtype)
    for kernel in ("cpu", "reference"):
        taken, lengths = take_rows(
            [values], [offsets], torch.tensor(rows, dtype=torch.int64), kernel=kernel, num_threads=num_threads
        )
        assert taken.dtype == dtype
        assert taken.tolist() == [value for row in rows for value in lists[row]]
        assert lengths.tolist() == [len(lists[row]) for row in rows]


def test_vectors_are_taken_whole():
    values = torch.randn(5, 3)
    taken, _ = take_rows([values], [torch.tensor([0, 2, 5])], torch.tensor([1, 0]))
    assert torch.equal(taken, values[[2, 3, 4, 0, 1]])


def test_bad_rows_and_windows_are_named():
    values, offsets = jagged([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"rows\[1\] is 2, expected a row in \[0, 2\)"):
        take_rows([values], [offsets], torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="one dtype"):
        take_rows([values, values.int()], [offsets, offsets], torch.tensor([0]))
    with pytest.raises(ValueError, match="window 1 starts at 2 and has 2 values"):
        take_windows(values, torch.tensor([0, 2]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="the windows hold 1 values, received 3"):
        take_windows(values, torch.tensor([0]), torch.tensor([1]), num_values=3)
    with pytest.raises(ValueError, match="received starts of shape"):
        take_windows(values, torch.tensor([0]), torch.tensor([1, 2]))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_shifted_lists_become_windows_of_one_buffer(kernel):
    values, offsets = jagged([[1, 2, 3, 4], [2, 3, 4, 5], [9], []])
    buffer, weights, starts = window_rows(values, offsets, kernel=kernel)
    assert buffer.tolist() == [1, 2, 3, 4, 5, 9]
    assert starts.tolist() == [0, 1, 5, 6]
    assert weights is None


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_histories_that_grow_at_the_front_overlap_too(kernel):
    values, offsets = jagged([[4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]])
    buffer, _, starts = window_rows(values, offsets, kernel=kernel)
    assert buffer.tolist() == [6, 5, 4, 3, 2, 1]
    assert starts.tolist() == [2, 1, 0]


@given(
    lists=st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=8),
    with_weights=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
@settings(max_examples=150, deadline=None)
def test_windows_give_back_any_lists_and_match_the_reference(lists, with_weights, dtype):
    values, offsets = jagged(lists, dtype)
    weights = (torch.arange(len(values)) % 3).float() if with_weights else None
    buffer, buffer_weights, starts = window_rows(values, offsets, weights=weights)
    expected = window_rows(values, offsets, weights=weights, kernel="reference")
    assert torch.equal(buffer, expected[0])
    assert torch.equal(starts, expected[2])
    assert torch.equal(take_windows(buffer, starts, offsets.diff()), values)
    if with_weights:
        assert torch.equal(buffer_weights, expected[1])
        assert torch.equal(take_windows(buffer_weights, starts, offsets.diff()), weights)
    assert len(buffer) <= len(values)


def test_a_list_of_one_repeated_id_takes_linear_time():
    values = torch.zeros(4 * 50_000, dtype=torch.int64)
    values[49_999::50_000] = torch.arange(4)
    buffer, _, starts = window_rows(values, torch.arange(5) * 50_000)
    assert torch.equal(take_windows(buffer, starts, torch.full((4,), 50_000)), values)


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_numpy_arrays_give_numpy_arrays_with_the_values_of_tensors(kernel):
    values, offsets = jagged([[3, 4, 5, 6], [4, 5, 6, 7], [], [3, 4, 5, 6], [9, 3, 4, 5]])
    rows = torch.tensor([3, 0, 2])
    calls = [
        lambda v, o, r: dedup_rows([v], [o], kernel=kernel),
        lambda v, o, r: take_rows([v, v], [o, o], r, kernel=kernel),
        lambda v, o, r: (take_windows(v, o[:-1], o[1:] - o[:-1], kernel=kernel),),
        lambda v, o, r: window_rows(v, o, kernel=kernel)[::2],
        lambda v, o, r: window_rows(v, o, weights=v, kernel=kernel),
    ]
    frozen = [own.numpy().copy() for own in (values, offsets, rows)]
    for own in frozen:
        own.flags.writeable = False  # as Arrow's buffers are
    for call in calls:
        for found, expected in zip(call(*frozen), call(values, offsets, rows), strict=True):
            assert isinstance(found, np.ndarray)
            assert found.dtype == expected.numpy().dtype
            assert found.tolist() == expected.tolist()
