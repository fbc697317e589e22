"""Rows moved and compared as the reference does, whatever the widths, steps and rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import find_changed, move_rows
from tests.kernels.forced import forced


@given(
    data=st.data(),
    width=st.sampled_from([None, 1, 3, 64]),
    num_moved=st.integers(0, 20),
    threads=st.integers(1, 3),
    has_source_rows=st.booleans(),
    has_target_rows=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_arrive_where_the_reference_puts_them(data, width, num_moved, threads, has_source_rows, has_target_rows):
    shape = () if width is None else (width + 2,)
    source, target = torch.rand(30, *shape), torch.rand(20, *shape)
    if width is not None:  # rows with a step, as records on disk have
        source, target = source[:, :width], target[:, 1 : width + 1]
    draw = st.lists(st.integers(0, 29), min_size=num_moved, max_size=num_moved)
    source_rows = torch.tensor(data.draw(draw), dtype=torch.int64) if has_source_rows else None
    places = data.draw(st.permutations(range(20)))[:num_moved]
    target_rows = torch.tensor(places, dtype=torch.int64) if has_target_rows else None
    if source_rows is None and target_rows is None:
        source = source[:num_moved]
    expected = target.clone()
    rows = {"source_rows_N": source_rows, "target_rows_N": target_rows}
    move_rows(source, expected, **rows, kernel="reference")
    with forced(threads=threads):
        move_rows(source, target, **rows)
    assert torch.equal(target, expected)


@given(data=st.data(), num_rows=st.integers(0, 20), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_changed_rows_are_those_that_differ_in_a_bit_of_weights_or_state(data, num_rows, threads):
    live = [torch.rand(30, 5), torch.rand(30), torch.rand(30, 2)]
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, 29), min_size=num_rows, max_size=num_rows)), dtype=torch.int64
    )
    held = [part[rows] for part in live]
    changed = data.draw(st.sets(st.integers(0, num_rows - 1))) if num_rows else set()
    for place in changed:
        part = held[place % 3]
        part.view(torch.int32).view(num_rows, -1)[place, -1] ^= 1
    for kernel in ("cpu", "reference"):
        with forced(threads=threads):
            found = find_changed(held, live, live_rows_N=rows, kernel=kernel)
        assert found.tolist() == sorted(changed)
    backwards = torch.arange(num_rows).flip(0)
    with forced(threads=threads):
        found = find_changed(held, live, held_rows_N=backwards, live_rows_N=rows.flip(0))
    assert found.tolist() == sorted(num_rows - 1 - place for place in changed)


def test_zero_and_minus_zero_differ():
    assert find_changed([torch.tensor([0.0, 1.0])], [torch.tensor([-0.0, 1.0])]).tolist() == [0]


def test_wrong_arguments_are_named():
    matrix = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"source_rows\[1\] is 3, expected a row in \[0, 3\)"):
        move_rows(matrix, torch.zeros(2, 4), source_rows_N=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="has 2 rows, expected 3 or more"):
        move_rows(matrix, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="one number of rows on both sides"):
        move_rows(matrix, matrix, source_rows_N=torch.tensor([0]), target_rows_N=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="one dtype of 4 bytes and one width"):
        find_changed([matrix], [torch.zeros(3, 5)])
    with pytest.raises(ValueError, match="elements of a row follow one another"):
        move_rows(torch.zeros(4, 4).t(), matrix, source_rows_N=torch.tensor([0]), target_rows_N=torch.tensor([0]))
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        move_rows(matrix, matrix, kernel="gpu")
