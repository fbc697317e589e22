import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from recmill.artifacts import InputError, module_name
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection, logical_name

CONFIGS = [
    EmbeddingBagConfig(name=module_name("a_b"), num_embeddings=40, embedding_dim=8, feature_names=["f", "g"]),
    EmbeddingBagConfig(
        name=module_name("c"), num_embeddings=30, embedding_dim=4, feature_names=["h"], pooling=PoolingType.MEAN
    ),
]
SGD = TableOptimiser(kind="sgd", lr=0.5)


def make(kind="sgd", *, configs=CONFIGS, **options):
    options = {"compression": 5, "block_size": 4, "optimiser": TableOptimiser(kind=kind, lr=0.5), **options}
    return SharedEmbeddingBagCollection(configs, **options)


def make_batch(keys=("f", "g", "h"), *, num_samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * num_samples,), generator=generator)
    values = torch.randint(30, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths)


def loss_of(answer):
    return sum(((place + 1) * vectors).square().sum() for place, vectors in enumerate(answer.to_dict().values()))


def dense_gradient(collection, batch):
    """The gradient of the array as autograd finds it through materialised tables."""
    array = collection.array
    plain = EmbeddingBagCollection(tables=CONFIGS)
    tables = {
        config.name: array.materialise(logical_name(config.name), range(config.num_embeddings)) for config in CONFIGS
    }
    with torch.no_grad():
        for name, bag in plain.embedding_bags.items():
            bag.weight.copy_(tables[name])
    loss_of(plain(batch)).backward()
    total = torch.zeros_like(array.weight)
    for name, bag in plain.embedding_bags.items():
        total += torch.autograd.grad(tables[name], array.weight, bag.weight.grad)[0]
    return total


@pytest.mark.parametrize("keys", [("f", "g", "h"), ("h", "x", "g", "f")])
def test_it_answers_as_torchrec_over_the_same_tables(keys):
    shared, plain = make(exact_rows={"a_b": torch.tensor([3, 7])}), EmbeddingBagCollection(tables=CONFIGS)
    with torch.no_grad():
        for config in CONFIGS:
            rows = shared.array.materialise(logical_name(config.name), range(config.num_embeddings))
            plain.embedding_bags[config.name].weight.copy_(rows)
    batch = make_batch(keys)
    found, expected = shared(batch), plain(batch)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values().detach(), expected.values().detach())


def test_rows_come_unpooled_as_from_an_embedding_collection():
    configs = [EmbeddingConfig(name="a", num_embeddings=40, embedding_dim=8, feature_names=["f", "g"])]
    shared = make(configs=configs, is_pooled=False)
    batch = make_batch(("g", "f"))
    answer = shared(batch)
    for name, jagged in batch.to_dict().items():
        assert torch.equal(answer[name].lengths(), jagged.lengths())
        assert torch.equal(answer[name].values().detach(), shared.array.materialise("a", jagged.values()))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_backward_steps_the_array_as_the_optimiser_says(kind):
    shared, batch = make(kind, exact_rows={"c": torch.tensor([2])}), make_batch()
    before, gradient = shared.step.slots.clone(), dense_gradient(shared, batch)
    for _ in range(2):
        shared.step.slots.copy_(before)
        loss_of(shared(batch)).backward()
    if kind == "sgd":
        expected = before - 0.5 * gradient
    elif kind == "adagrad":
        expected = before - 0.5 * gradient / (2 * gradient.square()).sqrt().clamp(min=1e-8)
    else:
        lines = torch.nn.functional.pad(gradient, (0, -len(gradient) % 16)).view(-1, 16)
        sizes = torch.full((len(lines),), 16).index_fill(
            0, torch.tensor([len(lines) - 1]), (len(gradient) - 1) % 16 + 1
        )
        means = (2 * lines.square().sum(1) / sizes).repeat_interleave(16)[: len(gradient)]
        expected = before - 0.5 * gradient / means.sqrt().clamp(min=1e-8)
    torch.testing.assert_close(shared.step.slots, expected, rtol=1e-4, atol=1e-5)


def test_two_lookups_of_one_backward_pass_make_one_step():
    shared, first, second = make("adagrad"), make_batch(), make_batch(seed=1, num_samples=7)
    before = shared.step.slots.clone()
    gradient = dense_gradient(shared, first) + dense_gradient(shared, second)
    (loss_of(shared(first)) + loss_of(shared(second))).backward()
    touched = gradient != 0
    moved = torch.where(touched, gradient.sign(), 0) * 0.5
    torch.testing.assert_close(before - shared.step.slots, moved, atol=1e-3, rtol=1e-3)


def test_collections_of_both_kinds_share_one_array():
    row_config = EmbeddingConfig(name="s", num_embeddings=50, embedding_dim=8, feature_names=["s"])
    every = [*CONFIGS, row_config]
    bags = make(all_tables=every)
    rows = make(configs=[row_config], is_pooled=False, all_tables=every, shared=bags)
    assert rows.array is bags.array
    before = bags.step.slots.clone()
    rows(make_batch(("s",)))["s"].values().sum().backward()
    assert not torch.equal(bags.step.slots, before)


def test_nothing_is_a_parameter_or_in_the_state_dict():
    shared = make()
    assert not list(shared.parameters())
    assert not shared.state_dict()


def test_evaluation_changes_nothing():
    shared = make()
    before = shared.step.slots.clone()
    with torch.no_grad():
        shared(make_batch())
    assert torch.equal(shared.step.slots, before)


def fresh_rows(table, start, stop):
    width = {"a_b": 8, "c": 4}[table]
    return torch.arange(start, stop)[:, None].float() + torch.arange(width) / 10


def test_a_start_keeps_exact_rows_and_the_spread():
    shared = make("adagrad", exact_rows={"a_b": torch.tensor([31, 5])})
    loss_of(shared(make_batch())).backward()
    shared.start(fresh_rows)
    assert torch.equal(shared.array.materialise("a_b", [5, 31]), fresh_rows("a_b", 0, 40)[[5, 31]])
    assert not shared.step.momentum.any()
    spread = (fresh_rows("a_b", 0, 40).square().sum() + fresh_rows("c", 0, 30).square().sum()) / (320 + 120)
    assert shared.array.std == pytest.approx(float(spread) ** 0.5)


def test_narrow_exact_rows_start_with_the_first_weights_and_train():
    shared, batch = make("sgd", exact_rows={"a_b": torch.tensor([31, 5])}, exact_width=3), make_batch()
    shared.start(fresh_rows)
    assert torch.equal(
        shared.array.materialise("a_b", [5, 31]), fresh_rows("a_b", 0, 40)[[5, 31], :3].repeat(1, 3)[:, :8]
    )
    gradient, before = dense_gradient(shared, batch), shared.step.slots.clone()
    loss_of(shared(batch)).backward()
    torch.testing.assert_close(shared.step.slots, before - 0.5 * gradient)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_state_moves_to_another_collection(kind):
    exact = {"a_b": torch.tensor([5, 9])}
    one, other = make(kind, exact_rows=exact), make(kind, exact_rows=exact)
    loss_of(one(make_batch())).backward()
    assert set(one.state()) == {"tables", "table_optimiser", "shared"}
    other.absorb(one.state())
    assert torch.equal(other.step.slots, one.step.slots)
    assert torch.equal(other.step.momentum, one.step.momentum)
    with pytest.raises(InputError, match="laid out as"):
        make(kind, exact_rows=exact, seed=3).absorb(one.state())
    with pytest.raises(InputError, match="different rows exactly"):
        make(kind, exact_rows={"a_b": torch.tensor([5, 8])}).absorb(one.state())


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_exact_rows_are_read_back_as_they_were_put(kind):
    shared = make(kind, exact_rows={"a_b": torch.tensor([5, 9])})
    loss_of(shared(make_batch())).backward()
    rows = torch.tensor([9, 5])
    weights, state = shared.gather_rows("a_b", rows)
    assert torch.equal(weights, shared.array.materialise("a_b", rows))
    shared.put_rows("a_b", rows, weights + 1, {name: value + 2 for name, value in state.items()})
    again, stated = shared.gather_rows("a_b", rows)
    assert torch.equal(again, weights + 1)
    assert set(stated) == set(state)
    if kind == "adagrad":
        assert torch.equal(stated["momentum1"], state["momentum1"] + 2)


def test_wrong_arguments_are_named():
    with pytest.raises(InputError, match="exact_rows names table 'x'"):
        make(exact_rows={"x": torch.tensor([1])})
    with pytest.raises(InputError, match="no feature 'g'"):
        make()(make_batch(("f", "h")))
    with pytest.raises(InputError, match="expected sgd, adagrad or rowwise_adagrad"):
        make("adam")
    with pytest.raises(InputError, match="device is cuda:0: the fused step runs on the CPU; use SharedEmbeddingBag"):
        make(device=torch.device("cuda:0"))


def test_names_are_told_from_module_names():
    for name in ("a", "a_b", "a.b", "_d", "a__d.x_", "items"):
        assert logical_name(module_name(name)) == name
    assert logical_name("t_1") == "t_1"


def _train(rank, world_size, port, kind, sync, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    shared = make(kind, exact_rows={"c": torch.tensor([2])})
    shared.step.sync = sync
    for step in range(3):
        own = make_batch(seed=10 * step + rank, num_samples=3 + rank)
        (loss_of(shared(own)) * world_size).backward()
    torch.save(shared.state(), f"{folder}/{sync}-{kind}-{rank}.pt")
    dist.destroy_process_group()


def _join(batches):
    """The batches of several ranks as one."""
    lists = {key: [batch[key] for batch in batches] for key in batches[0].keys()}  # noqa: SIM118
    values = [jagged.values() for own in lists.values() for jagged in own]
    lengths = [jagged.lengths() for own in lists.values() for jagged in own]
    return KeyedJaggedTensor(keys=list(lists), values=torch.cat(values), lengths=torch.cat(lengths))


@pytest.mark.parametrize("sync", ["dense", "sparse"])
def test_two_ranks_train_as_one_and_stay_bitwise_equal(tmp_path, sync):
    kind = "rowwise_adagrad"
    port = 29_000 + os.getpid() % 5_000 + (sync == "dense")
    mp.start_processes(_train, (2, port, kind, sync, str(tmp_path)), nprocs=2, start_method="spawn")
    states = [torch.load(tmp_path / f"{sync}-{kind}-{rank}.pt")["shared"] for rank in range(2)]
    for name in ("array", "momentum"):
        assert torch.equal(states[0][name], states[1][name])
    single = make(kind, exact_rows={"c": torch.tensor([2])})
    for step in range(3):
        whole = _join([make_batch(seed=10 * step + rank, num_samples=3 + rank) for rank in range(2)])
        loss_of(single(whole)).backward()
    torch.testing.assert_close(states[0]["array"], single.step.slots, rtol=1e-5, atol=1e-6)
    if sync == "sparse":
        assert torch.equal(states[0]["array"], single.step.slots)
