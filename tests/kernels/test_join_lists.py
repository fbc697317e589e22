from __future__ import annotations

import numpy as np
import pytest

from kernels.join_lists import ListBlock, join_lists, scan_lists

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


@pytest.mark.parametrize("cuts", [[(0, 0, 0)], [(0, 3, 40)], [(0, 0, 50), (1, 49, 50), (0, 10, 10), (1, 0, 33)]])
def test_rows_of_several_blocks_join_as_in_the_reference(cuts):
    blocks = [make_block(50, seed=1), make_block(50, seed=2)]
    pieces = [(blocks[index], start, stop) for index, start, stop in cuts]
    num_values = sum(int(np.diff(scan_lists(block)[0][[start, stop]])[0]) for block, start, stop in pieces)
    for found, expected in zip(
        join_lists(pieces, num_values=num_values), join_lists(pieces, num_values=0, kernel="reference"), strict=True
    ):
        assert np.array_equal(found, expected)


def test_a_block_without_features_joins():
    values, lengths, counts = join_lists([(ListBlock(values=(), offsets=(), num_rows=4), 1, 3)], num_values=0)
    assert (len(values), lengths.shape, counts) == (0, (0, 2), [])


def test_what_does_not_fit_is_refused():
    block = make_block(20, seed=4)
    with pytest.raises(ValueError, match="rows 3 to 21 of 20"):
        join_lists([(block, 3, 21)], num_values=0)
    with pytest.raises(ValueError, match="more ids than 3"):
        join_lists([(block, 0, 20)], num_values=3)
    with pytest.raises(ValueError, match="expected 1000"):
        join_lists([(block, 0, 20)], num_values=1000)
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
