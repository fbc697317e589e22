import inspect

import pytest
import torch
from torch import nn

from recmill.artifacts import InputError
from recmill.model.stores.shared import SharedEmbeddingBag

ROWS, DIM = 50, 12


def make_pair(**options):
    """A shared bag, and the plain bag over the table it stands for."""
    bag = SharedEmbeddingBag(ROWS, DIM, compression=4, block_size=5, **options)
    plain = nn.EmbeddingBag(ROWS, DIM, **options)
    with torch.no_grad():
        plain.weight.copy_(bag.materialise())
    return bag, plain


def draw_ids(*shape):
    return torch.randint(ROWS, shape, generator=torch.Generator().manual_seed(1))


def slot_gradient(bag, table_gradient):
    """What the gradient of the whole logical table gives the array."""
    (gradient,) = torch.autograd.grad(bag.materialise(), bag.weight, table_gradient)
    return gradient


@pytest.mark.parametrize("name", ["__init__", "from_pretrained", "forward"])
def test_every_argument_of_a_plain_bag_stands_where_it_stands_there(name):
    own, plain = (inspect.signature(getattr(kind, name)).parameters for kind in (SharedEmbeddingBag, nn.EmbeddingBag))
    positional = [each for each in own if own[each].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(plain)
    assert [own[each].default for each in positional] == [each.default for each in plain.values()]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_it_answers_and_learns_as_a_plain_bag_over_the_same_table(mode, padding_idx, include_last_offset):
    bag, plain = make_pair(mode=mode, padding_idx=padding_idx, include_last_offset=include_last_offset)
    ids = draw_ids(30)
    ids[4] = ids[9] = 3
    offsets = torch.tensor([0, 3, 3, 10, 30] if include_last_offset else [0, 3, 3, 10])
    found, expected = bag(ids, offsets), plain(ids, offsets)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(bag.weight.grad, slot_gradient(bag, plain.weight.grad))


def test_weights_of_samples_and_bags_of_equal_length_work():
    bag, plain = make_pair(mode="sum")
    ids, weights = draw_ids(6, 4), torch.rand(6, 4)
    own, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    found, expected = bag(ids, per_sample_weights=own), plain(ids, per_sample_weights=theirs)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.grad, theirs.grad)
    torch.testing.assert_close(bag.weight.grad, slot_gradient(bag, plain.weight.grad))


def test_gradients_are_divided_by_how_often_an_id_occurs():
    # By hand: torch's own CPU kernel divides by the count of another id.
    bag = SharedEmbeddingBag(6, 1, mode="sum", scale_grad_by_freq=True, compression=1)
    ids = torch.tensor([[1, 1, 2], [1, 5, 2]])
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).requires_grad_()
    for given, expected in ((None, [0, 1, 1, 0, 0, 1]), (weights, [0, 7 / 3, 9 / 2, 0, 0, 5])):
        bag.weight.grad = None
        found = bag(ids, per_sample_weights=given)
        table = bag.materialise().detach()
        factors = torch.ones(2, 3) if given is None else given.detach()
        torch.testing.assert_close(found.detach(), (table[ids] * factors[:, :, None]).sum(1))
        found.sum().backward()
        torch.testing.assert_close(bag.weight.grad, slot_gradient(bag, torch.tensor(expected)[:, None].float()))
    torch.testing.assert_close(weights.grad, table[ids][:, :, 0])


def test_sparse_gradients_are_the_dense_ones():
    bag, dense = (SharedEmbeddingBag(ROWS, DIM, sparse=sparse, seed=4) for sparse in (True, False))
    for each in (bag, dense):
        each(torch.tensor([[1, 2]])).sum().backward()
    assert bag.weight.grad.is_sparse
    assert torch.equal(bag.weight.grad.to_dense(), dense.weight.grad)
    torch.optim.SGD(bag.parameters(), lr=0.1).step()


def test_what_cannot_work_is_refused_clearly():
    for options, message in (
        ({"max_norm": 1.0}, "cannot be renormalised"),
        ({"mode": "min"}, "mode is 'min'"),
        ({"mode": "max", "sparse": True}, "supports neither"),
        ({"padding_idx": ROWS}, "padding_idx is 50"),
        ({"compression": 0.5}, "at least 1"),
        ({"compression": 2, "memory_bytes": 100}, "expected only one of them"),
        ({"memory_bytes": 2}, "at least one weight"),
        ({"_weight": torch.ones(3)}, "_weight: shape is"),
        ({"exact_rows": [1, 1]}, "expected each row once"),
    ):
        with pytest.raises(InputError, match=message):
            SharedEmbeddingBag(ROWS, DIM, **options)
    bag = SharedEmbeddingBag(ROWS, DIM)
    with pytest.raises(NotImplementedError, match="mode 'sum'"):
        bag(torch.ones(1, 1).long(), per_sample_weights=torch.ones(1, 1))
    with pytest.raises(InputError, match="dtype is"):
        bag(torch.ones(1, 1))
    with pytest.raises(InputError, match="1-D one with 1-D offsets"):
        bag(torch.ones(1).long())
    with pytest.raises(InputError, match=r"offsets\[0\] is 1"):
        bag(torch.ones(2).long(), torch.tensor([1]))


def test_compression_and_bytes_size_the_array():
    assert SharedEmbeddingBag(1000, 16, compression=100).weight.numel() == 160
    assert SharedEmbeddingBag(1000, 16, memory_bytes=1000).weight.numel() == 250
    assert SharedEmbeddingBag(1000, 16).weight.numel() == 1600
    assert SharedEmbeddingBag(1000, 16, memory_bytes=1000, dtype=torch.float64).weight.numel() == 125


def test_a_table_of_more_rows_than_2_to_the_40_takes_any_id():
    bag = SharedEmbeddingBag(2**44, 64, memory_bytes=10_000)
    ids = torch.tensor([[0, 2**43, -1, 2**63 - 1, -(2**63)]])
    rows = bag.materialise(ids[0])
    assert torch.isfinite(bag(ids)).all()
    assert len({tuple(row.tolist()) for row in rows}) == 5


def test_initial_weights_keep_the_variance_of_the_logical_table():
    rows = SharedEmbeddingBag(100_000, 16, compression=50).materialise(range(20_000)).detach()
    assert abs(float(rows.std()) - 1) < 0.02
    assert abs(float(rows.mean())) < 0.02


def test_the_seed_decides_mapping_and_weights():
    one, same, other = (SharedEmbeddingBag(ROWS, DIM, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.materialise(), same.materialise())
    assert not torch.equal(one.materialise(), other.materialise())


def test_a_full_table_is_folded_into_the_array():
    table = torch.randn(ROWS, DIM)
    bag = SharedEmbeddingBag.from_pretrained(table, exact_rows=[7, 30], mode="sum", freeze=False)
    assert torch.equal(bag.materialise([7, 30]), table[[7, 30]])
    assert bag.weight.requires_grad


def test_exact_rows_are_nobody_elses():
    bag = SharedEmbeddingBag(ROWS, DIM, mode="sum", compression=10, exact_rows=[7, 30])
    before = bag.materialise().detach().clone()
    others = torch.tensor([[row for row in range(ROWS) if row not in (7, 30)]])
    bag(others).sum().backward()
    with torch.no_grad():
        bag.weight -= bag.weight.grad
    after = bag.materialise().detach()
    assert torch.equal(after[[7, 30]], before[[7, 30]])
    assert not torch.equal(after[0], before[0])


def test_exact_rows_may_own_fewer_weights_than_they_are_wide():
    bag = SharedEmbeddingBag(ROWS, DIM, mode="sum", memory_bytes=240, exact_rows=[7, 30], exact_width=3)
    assert bag.weight.numel() == 64 + 2 * 3
    rows = bag.materialise([7, 30]).detach()
    assert torch.equal(rows, bag.weight[64:].detach().view(2, 3).repeat(1, 4))
    bag(torch.tensor([[7, 7]])).sum().backward()
    assert bag.weight.grad.tolist() == [0.0] * 64 + [8.0] * 3 + [0.0] * 3
    with pytest.raises(InputError, match="exact_width"):
        SharedEmbeddingBag(ROWS, DIM, memory_bytes=240, exact_rows=[7, 30], exact_width=2).load_state_dict(
            {**bag.state_dict(), "array.weight": torch.zeros(68)}
        )
    with pytest.raises(InputError, match="exact_width is 0, expected at least 1"):
        SharedEmbeddingBag(ROWS, DIM, exact_rows=[7], exact_width=0)


def test_saving_and_loading_keeps_every_row(tmp_path):
    bag = SharedEmbeddingBag(ROWS, DIM, exact_rows=[3], seed=5)
    with torch.no_grad():
        bag.weight.mul_(2)
    torch.save(bag.state_dict(), tmp_path / "bag.pt")
    again = SharedEmbeddingBag(ROWS, DIM, exact_rows=[3], seed=5)
    again.load_state_dict(torch.load(tmp_path / "bag.pt"))
    assert torch.equal(again.materialise(), bag.materialise())
    with pytest.raises(InputError, match="seed 5 instead of 6"):
        SharedEmbeddingBag(ROWS, DIM, exact_rows=[3], seed=6).load_state_dict(torch.load(tmp_path / "bag.pt"))


def test_it_learns_a_table_ten_times_its_size():
    generator = torch.Generator().manual_seed(0)
    target = (torch.randn(200, 4, generator=generator) > 0).float()
    bag = SharedEmbeddingBag(200, 8, mode="sum", compression=10, block_size=2)
    head = nn.Linear(8, 4)
    optimiser = torch.optim.Adam([*bag.parameters(), *head.parameters()], lr=0.05)
    ids = torch.arange(200)[:, None]
    losses = []
    for _ in range(100):
        loss = nn.functional.binary_cross_entropy_with_logits(head(bag(ids)), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
