"""Rows found, gradients added up and rows stepped as the reference, FBGEMM and torch's own optimisers do."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import find_rows, sum_bags, update_rows
from tests.kernels.forced import forced

KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def make_state(optimiser: str, num_rows: int, width: int) -> torch.Tensor | None:
    shape = {"sgd": None, "adagrad": (num_rows, width), "rowwise_adagrad": (num_rows,)}[optimiser]
    return None if shape is None else torch.rand(shape)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_features_that_share_a_table_are_found_once(kernel, dtype):
    ids = torch.tensor([4, 0, 4, 0, 1], dtype=dtype)  # two features of a table at row 0, one of a table at row 5
    edges, bases = torch.tensor([0, 2, 3, 5]), torch.tensor([0, 0, 5])
    rows, inverse = find_rows(ids, edges, bases, num_rows=7, kernel=kernel)
    assert rows.dtype == inverse.dtype == torch.int32
    assert rows.tolist() == [0, 4, 5, 6]
    assert inverse.tolist() == [1, 0, 1, 2, 3]


@given(data=st.data(), num_bags=st.integers(0, 6), num_features=st.integers(1, 3), width=st.sampled_from([1, 4, 8, 20]))
@settings(max_examples=60, deadline=None)
def test_bags_are_added_up_as_the_reference_does_at_any_number_of_threads(data, num_bags, num_features, width):
    count = num_bags * num_features
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = data.draw(st.lists(st.integers(0, 4), min_size=sum(lengths), max_size=sum(lengths)))
    inverse = torch.tensor(ids, dtype=torch.int32)
    wide = torch.randn(num_bags, num_features * width)
    gradients = wide.split(width, dim=1)  # views with a step, as a joined tensor gives them
    for is_mean in (False, True):
        expected = torch.full((5, width), 7.0)
        sum_bags(gradients, offsets, inverse, out=expected, is_mean=is_mean, kernel="reference")
        found = [torch.full((5, width), 7.0) for _ in range(3)]
        for number, out in enumerate(found):
            with forced(threads=number + 1):
                sum_bags(gradients, offsets, inverse, out=out, is_mean=is_mean)
            assert torch.equal(out, found[0])
        torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_single_ids_needs_no_offsets_and_may_be_expanded():
    out = torch.empty(2, 4)
    sum_bags([torch.tensor(2.0).expand(3, 4)], None, torch.tensor([0, 1, 0], dtype=torch.int32), out=out)
    assert out.tolist() == [[4.0] * 4, [2.0] * 4]


@given(
    blocks=st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=3),
    width=st.sampled_from([1, 4, 8, 20, 64]),
    optimiser=st.sampled_from(sorted(KINDS)),
)
@settings(max_examples=60, deadline=None)
def test_a_step_is_the_reference_s_at_any_number_of_threads(blocks, width, optimiser):
    given_blocks = [(torch.tensor(rows, dtype=torch.int32), torch.randn(len(rows), width)) for rows in blocks]
    weights, state = torch.randn(9, width), make_state(optimiser, 9, width)
    results = []
    for kernel, num_threads in (("reference", 0), ("cpu", 1), ("cpu", 2), ("cpu", 3)):
        own, own_state = weights.clone(), None if state is None else state.clone()
        how = {"optimiser": optimiser, "lr": 0.1, "eps": 1e-8, "scale": 0.5, "kernel": kernel}
        with forced(threads=num_threads):
            update_rows(own, own_state, given_blocks, **how)
        results.append((own, own if own_state is None else own_state))
    for found in results[2:]:
        assert all(torch.equal(mine, first) for mine, first in zip(found, results[1], strict=True))
    for mine, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("optimiser", sorted(KINDS))
def test_a_step_is_that_of_fbgemm(optimiser):
    num_rows, width = 30, 16
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=KINDS[optimiser],
        learning_rate=0.1,
        eps=1e-6,
        device=torch.device("cpu"),
    )
    weights = module.split_embedding_weights()[0]
    weights.data.copy_(torch.randn(num_rows, width))
    mine, state = weights.detach().clone(), None
    if optimiser != "sgd":
        module.split_optimizer_states()[0][0].fill_(0.5)
        state = torch.full((num_rows,) if optimiser == "rowwise_adagrad" else (num_rows, width), 0.5)
    rows, gradient = torch.randint(0, num_rows, (40,)), torch.randn(40, width)
    module(rows, torch.arange(41)).backward(gradient)
    update_rows(mine, state, [(rows.int(), gradient)], optimiser=optimiser, lr=0.1, eps=1e-6)
    torch.testing.assert_close(mine, weights.detach(), rtol=1e-5, atol=1e-6)
    if state is not None:
        torch.testing.assert_close(state, module.split_optimizer_states()[0][0].view_as(state), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_row_are_added_in_the_order_given():
    weights = torch.zeros(1, 1)
    blocks = [(torch.zeros(1, dtype=torch.int32), torch.full((1, 1), value)) for value in (1e17, 1.0, -1e17)]
    update_rows(weights, None, blocks, optimiser="sgd", lr=1.0)
    assert weights.item() == 0.0  # 1 is lost beside 1e17, in double too; in another order it would stay


def test_wrong_arguments_are_named():
    rows, gradient = torch.tensor([0, 3], dtype=torch.int32), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"rows of block 0\[1\] is 3, expected a row in \[0, 3\)"):
        update_rows(torch.ones(3, 4), None, [(rows, gradient)], optimiser="sgd", lr=1.0)
    with pytest.raises(ValueError, match="optimiser is 'adam'"):
        update_rows(torch.ones(3, 4), None, [(rows, gradient)], optimiser="adam", lr=1.0)
    with pytest.raises(ValueError, match=r"state: shape is None, expected \(3,\) for rowwise_adagrad"):
        update_rows(torch.ones(3, 4), None, [(rows, gradient)], optimiser="rowwise_adagrad", lr=1.0)
    with pytest.raises(ValueError, match=r"ids\[1\] is -1, expected a row in \[0, 3\)"):
        find_rows(torch.tensor([0, -1]), torch.tensor([0, 2]), torch.tensor([0]), num_rows=3)
    with pytest.raises(ValueError, match="offsets: expected ascending numbers from 0 to 2"):
        sum_bags([gradient], torch.tensor([0, 3, 2]), rows, out=torch.empty(4, 4))
    with pytest.raises(ValueError, match=r"received 4 ends of bags, expected 1 \* 2 \+ 1"):
        sum_bags([gradient], torch.tensor([0, 1, 1, 2]), rows, out=torch.empty(4, 4))
