from __future__ import annotations

import numpy as np
import pytest

from kernels.join_lists import Joined, ListBlock, join_lists, pack_lists, scan_lists

BOUNDS = (10, 1000, 2**40)


def make_block(num_rows: int, *, seed: int) -> ListBlock:
    """Three features; the last one has wide offsets, and ids before its first row as a slice of a column has."""
    rng = np.random.default_rng(seed)
    values, offsets = [], []
    for bound, first, dtype in zip(BOUNDS, (0, 0, 5), (np.int32, np.int32, np.int64), strict=True):
        lengths = rng.integers(0, 5, num_rows)
        offsets.append(np.concatenate([[first], first + np.cumsum(lengths)]).astype(dtype))
        values.append(rng.integers(0, bound, offsets[-1][-1] + 2))
    return ListBlock(values=tuple(values), offsets=tuple(offsets), num_rows=num_rows)


def make_numbers(num_rows: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(size=(num_rows, *shape)).astype(np.float32)


def assert_same(found: Joined, expected: Joined) -> None:
    assert found.counts == expected.counts
    own = (found.values_N, found.lengths_KB, *found.numbers)
    for array, other in zip(own, (expected.values_N, expected.lengths_KB, *expected.numbers), strict=True):
        assert np.array_equal(array, other)
        assert (array.shape, array.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 500])
def test_scanning_counts_ids_as_the_reference(num_rows):
    block = make_block(num_rows, seed=num_rows)
    for bounds in (None, BOUNDS):
        ends, wrong = scan_lists(block, bounds)
        expected, _ = scan_lists(block, bounds, kernel="reference")
        assert ends.tolist() == expected.tolist()
        assert wrong is None


@pytest.mark.parametrize("wrong", [-1, -(2**63), BOUNDS[1], 2**63 - 1])
def test_scanning_finds_the_first_feature_with_an_id_out_of_range(wrong):
    block = make_block(50, seed=0)
    block.values[1][block.offsets[1][20]] = wrong
    block.values[2][5] = -3
    block.values[2][2] = -4  # of no row
    assert scan_lists(block, BOUNDS)[1] == scan_lists(block, BOUNDS, kernel="reference")[1] == 1
    assert scan_lists(block)[1] is None


@pytest.mark.parametrize("num_rows", [0, 1, 7, 500])
def test_packed_lists_hold_the_same_ids(num_rows):
    block, bounds = make_block(num_rows, seed=num_rows), (10, 1000, 2**31)
    block.values[2][:] %= 2**31
    for kernel in (None, "reference"):
        found = pack_lists(block, bounds, kernel=kernel)
        assert found is not None
        packed, ends = found
        assert ends.tolist() == scan_lists(block, kernel="reference")[0].tolist()
        pieces = [(packed, num_rows // 3, num_rows)]
        num_values = int(ends[num_rows] - ends[num_rows // 3])
        assert_same(
            join_lists(pieces, num_values=num_values),
            join_lists([(block, num_rows // 3, num_rows)], num_values=0, kernel="reference"),
        )


@pytest.mark.parametrize("wrong", [-1, -(2**63), BOUNDS[1], 2**32 + 1, 2**63 - 1])
def test_lists_with_an_id_out_of_range_are_not_packed(wrong):
    block, bounds = make_block(50, seed=0), (10, 1000, 2**31)
    block.values[2][:] %= 2**31
    block.values[2][2] = wrong  # of no row
    assert pack_lists(block, bounds) is not None
    block.values[1][block.offsets[1][20]] = wrong
    for kernel in (None, "reference"):
        assert pack_lists(block, bounds, kernel=kernel) is None


@pytest.mark.parametrize("cuts", [[(0, 0, 0)], [(0, 3, 40)], [(0, 0, 50), (1, 49, 50), (0, 10, 10), (1, 0, 33)]])
def test_rows_of_several_blocks_join_as_in_the_reference(cuts):
    blocks = [make_block(50, seed=1), make_block(50, seed=2)]
    pieces = [(blocks[index], start, stop) for index, start, stop in cuts]
    num_values = sum(int(np.diff(scan_lists(block)[0][[start, stop]])[0]) for block, start, stop in pieces)
    numbers = [[make_numbers(50, shape) for _ in pieces] for shape in ((3,), (), (0,))]
    found = join_lists(pieces, num_values=num_values, numbers=numbers)
    expected = join_lists(pieces, num_values=0, numbers=numbers, kernel="reference")
    assert_same(found, expected)


def test_a_block_without_features_joins():
    found = join_lists([(ListBlock(values=(), offsets=(), num_rows=4), 1, 3)], num_values=0)
    assert (len(found.values_N), found.lengths_KB.shape, found.counts) == (0, (0, 2), [])


def test_what_does_not_fit_is_refused():
    block = make_block(20, seed=4)
    with pytest.raises(ValueError, match="rows 3 to 21 of 20"):
        join_lists([(block, 3, 21)], num_values=0)
    with pytest.raises(ValueError, match="more ids than 3"):
        join_lists([(block, 0, 20)], num_values=3)
    with pytest.raises(ValueError, match="expected 1000"):
        join_lists([(block, 0, 20)], num_values=1000)
    num_values = int(scan_lists(block)[0][20])
    for rows, width, match in ((19, 3, "block 0 has 19 rows of 12 bytes"), (20, 2, "block 1 has 20 rows of 8 bytes")):
        numbers = [[make_numbers(rows, (3,)), make_numbers(20, (width,))]]
        with pytest.raises(ValueError, match=match):
            join_lists([(block, 0, 20), (block, 3, 3)], num_values=num_values, numbers=numbers)
    with pytest.raises(ValueError, match="expected a matrix per block"):
        join_lists([(block, 0, 20)], num_values=num_values, numbers=[[make_numbers(20, ())] * 2])
    block.offsets[1][20] = 10**6
    with pytest.raises(ValueError, match="feature 1: its lists are the ids 0 to 1000000"):
        scan_lists(block)
    with pytest.raises(ValueError, match="bounds: has 2 elements, expected 3"):
        scan_lists(block, [1, 2])
    wide = ListBlock(values=(np.zeros(3, np.int32),), offsets=(np.zeros(2, np.int32),), num_rows=1)
    with pytest.raises(ValueError, match="values of feature 0: dtype is int32"):
        scan_lists(wide)
    with pytest.raises(ValueError, match="offsets of feature 0: has 2 elements, expected 3"):
        scan_lists(ListBlock(values=(np.zeros(3, np.int64),), offsets=(np.zeros(2, np.int32),), num_rows=2))
    for num_rows in (-1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"num_rows: is {num_rows}"):
            _ = ListBlock(values=(), offsets=(), num_rows=num_rows).compiled
