import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import expand_jagged, expand_rows
from kernels.expand_rows import ops, reference
from tests.kernels.forced import forced

FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def make_case(num_distinct, num_rows, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randn(num_distinct, *width, generator=generator).to(dtype)
    inverse = torch.randint(max(num_distinct, 1), (num_rows,), generator=generator)
    gradient = torch.randn(num_rows, *width, generator=generator).to(dtype)
    return distinct, inverse, gradient


def test_rows_are_expanded_and_their_gradients_summed_by_hand():
    distinct = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    expanded = expand_rows(distinct, torch.tensor([1, 0, 1]))
    assert expanded.tolist() == [[3, 4], [1, 2], [3, 4]]
    expanded.backward(torch.tensor([[1.0, 0.0], [0.0, 1.0], [10.0, 100.0]]))
    assert distinct.grad.tolist() == [[0, 1], [11, 100]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [(), (1,), (7,), (64,), (200,), (3, 5), (0,)])
@pytest.mark.parametrize(("num_distinct", "num_rows"), [(1, 1), (1, 33), (5, 0), (5, 17), (40, 100), (0, 0)])
def test_forward_and_backward_match_the_reference_bit_for_bit(num_distinct, num_rows, width, dtype):
    distinct, inverse, gradient = make_case(num_distinct, num_rows, width, dtype)
    expected = reference.sum_rows(gradient, inverse, num_distinct)
    for num_threads in (1, 2, 3):
        leaf = distinct.clone().requires_grad_()
        with forced(threads=num_threads):
            expanded = expand_rows(leaf, inverse)
            expanded.backward(gradient)
        assert torch.equal(expanded, reference.expand_rows(distinct, inverse))
        assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16, torch.uint8])
def test_any_dtype_can_be_expanded(dtype):
    distinct = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    inverse = torch.tensor([1, 1, 0], dtype=torch.int32)
    assert torch.equal(expand_rows(distinct, inverse), distinct[[1, 1, 0]])


def test_gradients_that_are_not_contiguous_are_summed():
    distinct = torch.ones(2, 3, requires_grad=True)
    expand_rows(distinct, torch.tensor([0, 0, 1])).sum().backward()  # an expanded scalar
    assert distinct.grad.tolist() == [[2, 2, 2], [1, 1, 1]]


def test_bfloat16_sums_are_rounded_once():
    gradient = torch.full((1000, 1), 1.0, dtype=torch.bfloat16)  # summed in bfloat16 this stops at 256
    assert ops.sum_rows(gradient, torch.zeros(1000, dtype=torch.int64), 1, "cpu").item() == 1000


def test_bfloat16_keeps_infinities_and_nans():
    gradient = torch.tensor([float("inf"), float("nan"), -float("inf"), 3.4e38], dtype=torch.bfloat16)
    summed = ops.sum_rows(gradient, torch.arange(4), 4, "cpu")
    assert torch.equal(summed.nan_to_num(7), gradient.nan_to_num(7))


def jagged_case(lengths, picks, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(int(offsets[-1]), *width, generator=generator).to(dtype)
    return values, offsets, torch.tensor([pick % len(lengths) for pick in picks], dtype=torch.int64)


def test_lists_are_expanded_by_hand():
    values, offsets = expand_jagged(torch.tensor([7, 9, 4]), torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 1, 0]))
    assert values.tolist() == [7, 9, 4, 7, 9]
    assert offsets.tolist() == [0, 2, 3, 3, 5]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    picks=st.lists(st.integers(0, 5), max_size=10),
    width=st.sampled_from([(), (3,), (2, 2), (100,)]),
    dtype=st.sampled_from(FLOATS),
    num_threads=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_jagged_forward_and_backward_match_the_reference(lengths, picks, width, dtype, num_threads):
    values, offsets, inverse = jagged_case(lengths, picks, width, dtype)
    leaf = values.clone().requires_grad_()
    expected, expected_offsets = expand_jagged(values, offsets, inverse, kernel="reference")
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with forced(threads=num_threads):
        plain, _ = expand_jagged(values, offsets, inverse)
        expanded, expanded_offsets = expand_jagged(leaf, offsets, inverse)
        expanded.backward(gradient)
    assert torch.equal(plain, expected)
    assert torch.equal(expanded, expected)
    assert torch.equal(expanded_offsets, expected_offsets)
    sources, _ = expand_jagged(torch.arange(len(values)), offsets, inverse, kernel="reference")
    assert torch.equal(leaf.grad, reference.sum_rows(gradient, sources, len(values)))


def test_values_outside_all_lists_get_no_gradient():
    values = torch.ones(5, requires_grad=True)
    expanded, _ = expand_jagged(values, torch.tensor([1, 3, 4]), torch.tensor([0, 1, 1]))
    expanded.sum().backward()
    assert values.grad.tolist() == [0, 1, 1, 2, 0]


def test_gradients_of_both_orders_are_right():
    distinct, inverse, _ = make_case(4, 7, (3,), torch.float64)
    distinct.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: expand_rows(x, inverse), distinct)
    assert torch.autograd.gradgradcheck(lambda x: expand_rows(x, inverse), distinct)
    values, offsets, lists = jagged_case([2, 0, 3], [2, 0, 0, 1, 2], (2,), torch.float64)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: expand_jagged(x, offsets, lists)[0], values)
    assert torch.autograd.gradgradcheck(lambda x: expand_jagged(x, offsets, lists)[0], values)


def test_the_ops_keep_the_rules_of_torch_library():
    distinct, inverse, gradient = make_case(4, 7, (3,), torch.float32)
    torch.library.opcheck(ops.expand_rows.traced, (distinct.requires_grad_(), inverse, "cpu"))
    torch.library.opcheck(ops.sum_rows.traced, (gradient.requires_grad_(), inverse, 4, "cpu"))


def test_both_stay_in_one_graph_when_compiled():
    distinct, inverse, _ = make_case(4, 7, (3,), torch.float32)
    values, offsets, lists = jagged_case([2, 0, 3], [2, 0, 0, 2], (3,), torch.float32)

    def run(distinct, values):
        expanded, ends = expand_jagged(values, offsets, lists, num_values=10)
        return expand_rows(distinct, inverse).sin().sum() + expanded.cos().sum() + ends.sum()

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [distinct.clone().requires_grad_(), values.clone().requires_grad_()]
        loss = function(*leaves)
        loss.backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*results, strict=True))


def test_bad_arguments_are_named():
    distinct = torch.ones(2, 3)
    for inverse in (torch.tensor([0, 2]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match=r"inverse\[1\] is -?\d, expected a row in \[0, 2\)"):
            expand_rows(distinct, inverse)
    with pytest.raises(ValueError, match=r"inverse\[0\] is 5"):
        ops.sum_rows(distinct, torch.tensor([5, 0]), 2, "cpu")
    with pytest.raises(ValueError, match="the windows hold 2 values, received 9"):
        expand_jagged(torch.ones(3), torch.tensor([0, 2, 3]), torch.tensor([0]), num_values=9)
    with pytest.raises(ValueError, match="dtype is float16"):
        ops.sum_rows(distinct.half(), torch.tensor([0, 1]), 2, "cpu")
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        expand_rows(distinct, torch.tensor([0]), kernel="gpu")


def test_the_package_gives_the_function_and_the_folder_its_parts():
    assert importlib.import_module("kernels").expand_rows is expand_rows
    assert ops.expand_rows is not expand_rows
