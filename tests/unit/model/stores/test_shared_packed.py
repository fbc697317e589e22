"""Shared parameters in bytes: what differs from floats, and what must not."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from kernels.shared_lookup import packing
from recmill.artifacts import InputError
from recmill.model.servable import SharedRows
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.shared import SharedArray, SharedEmbeddingBag, SharedEmbeddingBagCollection, SharedTable
from tests.kernels.forced import forced

CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=400, embedding_dim=16, feature_names=["f"]),
    EmbeddingBagConfig(name="b", num_embeddings=300, embedding_dim=8, feature_names=["g"]),
]


def make(kind="rowwise_adagrad", *, dtype=torch.int8, lr=0.05, **options):
    size = {} if "memory_bytes" in options else {"compression": 4}
    options = {**size, "block_size": 8, "exact_rows": {"a": torch.arange(5, 15)}, **options}
    made = SharedEmbeddingBagCollection(CONFIGS, optimiser=TableOptimiser(kind=kind, lr=lr), dtype=dtype, **options)
    made.array.std = 0.3
    made.array.reset_parameters()
    return made


def make_batch(seed, *, num_samples=64):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(300, (2 * num_samples,), generator=generator)
    return KeyedJaggedTensor(keys=["f", "g"], values=values, lengths=torch.ones(2 * num_samples, dtype=torch.int64))


def loss_of(collection, batch):
    target = torch.sin(batch.values().view(2, -1).float()).sum(0)
    return (collection(batch).values().sum(1) - target).square().mean()


def train(collection, steps, *, first=0):
    for step in range(first, first + steps):
        loss_of(collection, make_batch(step)).backward()


def test_bytes_follow_floats_to_a_few_units():
    packed, plain = make(), make(dtype=torch.float32)
    plain.array.take(packed.array.values())
    for step in range(5):
        for collection in (packed, plain):
            loss_of(collection, make_batch(step)).backward()
    units = torch.exp2(packed.array.exponents.float()).repeat_interleave(16)[: packed.array.num_slots]
    assert ((packed.array.values() - plain.array.values()).abs() < 6 * units).all()
    torch.testing.assert_close(packed.step.momentum, plain.step.momentum, rtol=0.2, atol=1e-3)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_it_learns_as_floats_do(kind):
    def measure(collection):
        with torch.no_grad():
            return float(torch.stack([loss_of(collection, make_batch(seed)) for seed in range(5)]).mean())

    packed, plain = (make(kind, dtype=dtype) for dtype in (torch.int8, torch.float32))
    before = measure(packed)
    train(packed, 100)
    train(plain, 100)
    assert measure(packed) < 1.1 * measure(plain) + 0.01
    assert measure(packed) < before / 2


def test_a_slot_takes_one_byte_and_a_sixteenth():
    packed, plain = make(memory_bytes=17_000), make(dtype=torch.float32, memory_bytes=17_000)
    assert packed.array.layout.size == 16_000
    assert plain.array.layout.size == 4_250
    assert packed.array.num_bytes == 17_000 + 160 + 10 + 10 * 8  # exact rows, their exponents, their ids
    assert packed.step.momentum.nbytes == 4 * (1_000 + 10)


def test_same_bits_on_one_and_three_threads():
    one, three = make(), make()
    for threads, collection in ((1, one), (3, three)):
        with forced(threads=threads):
            train(collection, 5)
    assert torch.equal(one.array.weight, three.array.weight)
    assert torch.equal(one.array.exponents, three.array.exponents)


def test_a_run_that_was_saved_goes_on_as_if_it_had_not_stopped():
    whole, first, second = make(), make(), make(seed=0)
    train(whole, 6)
    train(first, 3)
    second.absorb({"shared": first.state()["shared"]})
    train(second, 3, first=3)
    assert torch.equal(whole.array.weight, second.array.weight)
    assert torch.equal(whole.array.exponents, second.array.exponents)
    with pytest.raises(InputError, match=r"has dtype torch\.int8, expected torch\.float32"):
        make(dtype=torch.float32).absorb(first.state())


def test_a_start_and_rows_put_back_are_kept_to_half_a_unit():
    packed = make()
    packed.start(lambda table, start, stop: torch.arange(start, stop)[:, None].float() / 100 + torch.zeros(16))
    rows = torch.arange(5, 15)
    torch.testing.assert_close(packed.array.materialise("a", rows)[:, 0], rows / 100, atol=1e-3, rtol=0)
    weights, state = packed.gather_rows("a", rows)
    packed.put_rows("a", rows, weights * 2, state)
    torch.testing.assert_close(packed.gather_rows("a", rows)[0], weights * 2, atol=1e-3, rtol=0)
    assert not packed.step.num_steps.any()


def test_the_server_reads_bytes_as_lookups_do():
    packed = make()
    train(packed, 2)
    served, ids = SharedRows(packed.array), torch.arange(0, 40).view(4, 10)
    assert served.array.dtype == torch.int8
    assert torch.equal(served(ids, "a").flatten(0, 1), packed.array.materialise("a", ids.flatten()))


def test_saving_and_loading_an_array_keeps_every_row():
    tables = [SharedTable(name="t", num_rows=1_000, dim=8)]
    one, other = (SharedArray(tables, compression=4, seed=1, std=std, dtype=torch.int8) for std in (1.0, 3.0))
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.materialise("t", range(100)), one.materialise("t", range(100)))
    plain = SharedArray(tables, compression=4, seed=1)
    with pytest.raises(InputError, match="is_packed True instead of False"):
        plain.load_state_dict(one.state_dict(), strict=False)
    torch.testing.assert_close(one.values(), packing.unpack(one.weight.data, one.exponents))


def test_a_bag_that_autograd_trains_refuses_bytes():
    with pytest.raises(InputError, match="which has no gradient"):
        SharedEmbeddingBag(100, 8, dtype=torch.int8)


def _train_rank(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for sync in ("dense", "sparse"):
        collection = make()
        collection.step.sync = sync
        for step in range(3):
            (loss_of(collection, make_batch(10 * step + rank)) * 2).backward()
        torch.save(collection.state(), f"{folder}/{sync}-{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_stay_bitwise_equal(tmp_path):
    mp.start_processes(_train_rank, (34_000 + os.getpid() % 5_000, str(tmp_path)), nprocs=2, start_method="spawn")
    for sync in ("dense", "sparse"):
        one, other = (torch.load(tmp_path / f"{sync}-{rank}.pt")["shared"] for rank in range(2))
        for name in ("array", "exponents", "momentum", "num_steps"):
            assert torch.equal(one[name], other[name])
