"""Triton's dedup_rows, expand_rows and expand_jagged against their references; test_triton.py runs this file."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dedup_rows, expand_jagged, expand_rows
from kernels.expand_rows import reference

triton_dedup = importlib.import_module("kernels.dedup_rows.triton_impl")


def jagged(lists, dtype=torch.int64):
    values = torch.tensor([value for row in lists for value in row], dtype=dtype)
    offsets = torch.tensor([0, *(len(row) for row in lists)]).cumsum(0)
    return values, offsets


@given(lists=st.lists(st.lists(st.integers(-2, 2**40), max_size=3), max_size=6), mask=st.sampled_from([0, 1, -1]))
@settings(max_examples=15, deadline=None)
def test_dedup_matches_the_reference_even_if_hashes_collide(lists, mask):
    lists = lists + lists[::-1]
    values, offsets = zip(jagged(lists), jagged([row[:1] for row in lists], torch.float32), strict=True)
    expected = dedup_rows(values, offsets, kernel="reference")
    found = triton_dedup.dedup_rows(values, offsets, hash_mask=mask)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("length", [0, 1, 64, 129])
def test_dedup_matches_the_reference_at_every_width(length, dtype):
    base = torch.randint(100, (4, length), generator=torch.Generator().manual_seed(0)).to(dtype)
    values = base[torch.tensor([0, 1, 1, 3, 0, 2, 3])].reshape(-1)
    offsets = torch.arange(8) * length
    expected = dedup_rows([values], [offsets], kernel="reference")
    found = dedup_rows([values], [offsets], kernel="triton")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [(), (3,), (300,)])
def test_dense_expansion_matches_the_reference(width, dtype):
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(4, *width, generator=generator).to(dtype).requires_grad_()
    inverse = torch.randint(4, (7,), generator=generator)
    expanded = expand_rows(distinct, inverse, kernel="triton")
    assert torch.equal(expanded, reference.expand_rows(distinct, inverse))
    gradient = torch.randn(expanded.shape, generator=generator).to(dtype)
    expanded.backward(gradient)
    assert torch.equal(distinct.grad, reference.sum_rows(gradient, inverse, 4))


@pytest.mark.parametrize("width", [(), (5,)])
def test_jagged_expansion_matches_the_reference(width):
    generator = torch.Generator().manual_seed(0)
    offsets, inverse = torch.tensor([0, 2, 2, 150]), torch.tensor([2, 0, 0, 1, 2])
    values = torch.randn(150, *width, generator=generator).requires_grad_()
    expanded, expanded_offsets = expand_jagged(values, offsets, inverse, kernel="triton")
    expected, expected_offsets = expand_jagged(values, offsets, inverse, kernel="reference")
    assert torch.equal(expanded, expected)
    assert torch.equal(expanded_offsets, expected_offsets)
    gradient = torch.randn(expanded.shape, generator=generator)
    expanded.backward(gradient)
    sources, _ = expand_jagged(torch.arange(150), offsets, inverse, kernel="reference")
    assert torch.equal(values.grad, reference.sum_rows(gradient, sources, 150))
