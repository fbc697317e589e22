import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dedup_rows, distinct_rows
from tests.kernels.forced import forced

# The package re-exports the function under the folder's name; this is the folder.
module = importlib.import_module("kernels.dedup_rows")


def jagged(lists, dtype=torch.int64):
    values = torch.tensor([value for row in lists for value in row], dtype=dtype)
    offsets = torch.tensor([0, *(len(row) for row in lists)]).cumsum(0)
    return values, offsets


def assert_matches_reference(values, offsets, **options):
    unique_rows, inverse = dedup_rows(values, offsets, **options)
    expected_rows, expected_inverse = dedup_rows(values, offsets, kernel="reference")
    assert torch.equal(unique_rows, expected_rows)
    assert torch.equal(inverse, expected_inverse)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_group_repeats_only_where_all_its_lists_do(kernel):
    a, a_offsets = jagged([[7, 9], [7, 9], [4], [7, 9], [7, 9]])
    b, b_offsets = jagged([[1], [1], [], [2], [1]])
    unique_rows, inverse = dedup_rows([a, b], [a_offsets, b_offsets], kernel=kernel)
    assert unique_rows.tolist() == [0, 2, 3]
    assert inverse.tolist() == [0, 0, 1, 2, 0]


rows = st.lists(st.lists(st.integers(-1, 1), max_size=3), max_size=12)


@given(first=rows, seed=st.integers(0, 3), num_threads=st.integers(1, 3), mask=st.sampled_from([0, 1, 2**64 - 1]))
@settings(max_examples=150, deadline=None)
def test_any_lists_match_the_reference_even_if_all_hashes_collide(first, seed, num_threads, mask):
    generator = torch.Generator().manual_seed(seed)
    second = [row[: int(torch.randint(3, (), generator=generator))] for row in first]
    features = [jagged(first), jagged(second, torch.int32), jagged(second, torch.float32)]
    values, offsets = zip(*features, strict=True)
    expected = dedup_rows(values, offsets, kernel="reference")
    for is_portable in (True, False):
        with forced(is_portable=is_portable, hash_mask=mask):
            found = dedup_rows(values, offsets, num_threads=num_threads)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("length", [0, 1, 7, 15, 16, 17, 64, 65, 1001])
def test_every_list_length_and_width_matches_the_reference(length, dtype, num_threads):
    generator = torch.Generator().manual_seed(length)
    base = torch.randint(100, (5, length), generator=generator).to(dtype)
    values = base[torch.randint(5, (23,), generator=generator)]
    if length:
        values[11, -1] += 1  # differs from its like in the last value only
        values[12, 0] += 1
    assert_matches_reference([values.reshape(-1)], [torch.arange(24) * length], num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", ["equal", "distinct", "clustered", "shuffled", "permuted"])
def test_whole_batches_match_the_reference(shape, num_threads):
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(1000, (300, 32), generator=generator)
    picks = {
        "equal": torch.zeros(600, dtype=torch.int64),
        "distinct": torch.arange(300),
        "clustered": torch.arange(600) // 3,
        "shuffled": torch.randint(300, (600,), generator=generator),
        "permuted": torch.arange(300),
    }[shape]
    if shape == "permuted":  # the same ids in another order: a hash that only sums would not tell them apart
        base = torch.stack([base[0].roll(shift % 32) for shift in range(300)])
    values = base[picks].reshape(-1)
    assert_matches_reference([values], [torch.arange(len(picks) + 1) * 32], num_threads=num_threads)


def test_values_between_lists_are_not_read():
    values = torch.tensor([99, 1, 2, 1, 2, 99])
    unique_rows, inverse = dedup_rows([values], [torch.tensor([1, 3, 5])])
    assert unique_rows.tolist() == [0]
    assert inverse.tolist() == [0, 0]


def test_a_moved_boundary_is_another_row():
    a, a_offsets = jagged([[1, 2], [1]])
    b, b_offsets = jagged([[3], [2, 3]])
    assert dedup_rows([a, b], [a_offsets, b_offsets])[1].tolist() == [0, 1]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_floats_are_compared_by_their_bits(kernel):
    values, offsets = jagged([[0.0], [-0.0], [float("nan")], [float("nan")]], torch.float32)
    assert dedup_rows([values], [offsets], kernel=kernel)[1].tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_no_rows_give_no_rows(kernel):
    values, offsets = jagged([])
    unique_rows, inverse = dedup_rows([values], [offsets], kernel=kernel)
    assert unique_rows.tolist() == inverse.tolist() == []
    assert unique_rows.dtype == inverse.dtype == torch.int64


def test_bad_arguments_are_named():
    values, offsets = jagged([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"offsets of feature 0, row 1: expected ascending offsets in \[0, 3\]"):
        dedup_rows([values], [torch.tensor([0, 2, 1])])
    with pytest.raises(ValueError, match=r"feature 0, row 1: .* received 2 and 4"):
        dedup_rows([values], [torch.tensor([0, 2, 4])])
    with pytest.raises(ValueError, match=r"feature 0, row 0: .* received -1 and 2"):
        dedup_rows([values], [torch.tensor([-1, 2, 3])])
    with pytest.raises(ValueError, match="offsets of feature 1"):
        dedup_rows([values, values], [offsets, offsets[:-1]])
    with pytest.raises(ValueError, match=r"dtype is torch.int32, expected int64"):
        dedup_rows([values], [offsets.int()])
    with pytest.raises(ValueError, match="received 0 values"):
        dedup_rows([], [])
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        dedup_rows([values], [offsets], kernel="gpu")
    with pytest.raises(ValueError, match="values of feature 0: must be contiguous"):
        dedup_rows([torch.arange(6)[::2]], [offsets])


def test_rows_of_a_matrix_are_the_same_if_all_their_bits_are():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, -0.0], [2.0, 0.0], [1.0, 0.0]])
    unique_rows, inverse = distinct_rows(rows)
    assert unique_rows.tolist() == [0, 2, 3]
    assert inverse.tolist() == [0, 0, 1, 2, 0]
    assert distinct_rows(rows.T)[0].tolist() == [0, 1]  # not contiguous
