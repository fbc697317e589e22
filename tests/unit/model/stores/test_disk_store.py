"""Tables on disk train as tables in memory do, to the last bit, with and without reading ahead."""

import os

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

from recmill.artifacts import module_name
from recmill.artifacts.topology import Topology
from recmill.data.schema import Feature, Schema
from recmill.model.hot_embedding import HotEmbeddingCollection
from recmill.model.stores.disk import store as disk_store
from recmill.model.stores.disk.rows import DiskRows, hashed_rows
from recmill.model.stores.disk.store import DiskStore
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.uvm_caching import cache_tables
from recmill.planning.planner import default_plan
from recmill.training.tensors.storage import TensorIndex, load_tensors, save_tensors

ROWS = {"a": 200, "b": 90}


def configs(*, is_pooled: bool):
    features = {"a": ["a1", "a2"], "b": ["b1"]}
    if is_pooled:
        return [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=features[name], pooling=PoolingType.SUM
            )
            for name, rows in ROWS.items()
        ]
    return [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=features[name])
        for name, rows in ROWS.items()
    ]


def batches(count: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(0, 4, (3 * 6,), generator=generator)
        counts = lengths.view(3, 6).sum(1).tolist()
        limits = (200, 200, 90)
        values = [torch.randint(0, high, (n,), generator=generator) for high, n in zip(limits, counts, strict=True)]
        made.append(KeyedJaggedTensor(keys=["a1", "a2", "b1"], values=torch.cat(values), lengths=lengths))
    return made


def loss_of(found, *, is_pooled: bool) -> torch.Tensor:
    parts = [found.to_dict()[key] if is_pooled else found[key].values() for key in ("a1", "a2", "b1")]
    return sum(torch.sin(own * (place + 1)).sum() for place, own in enumerate(parts))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rows_on_disk_train_as_rows_in_memory(kind, is_pooled, ahead, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "CAPACITY", 8)  # so that it has to grow
    optimiser = TableOptimiser(kind=kind, lr=0.1)
    hot = {"a": torch.tensor([3, 150, 7]), "b": torch.tensor([80])}
    store = DiskStore(configs(is_pooled=is_pooled), folder=tmp_path, optimiser=optimiser, hot_rows=hot, scale=0.5)
    everything = {name: torch.arange(rows) for name, rows in ROWS.items()}
    memory = HotEmbeddingCollection(configs(is_pooled=is_pooled), everything, optimiser=optimiser)
    memory.enter([store])
    stream = batches(8)
    for ids in stream[:ahead]:
        store.prefetch(ids)
    for place, ids in enumerate(stream):
        if ahead and place + ahead < len(stream):
            store.prefetch(stream[place + ahead])
        found, expected = store(ids), memory(ids)
        loss_of(found, is_pooled=is_pooled).backward()
        loss_of(expected, is_pooled=is_pooled).backward()
    for name, rows in everything.items():
        weights, state = store.gather_rows(name, rows)
        assert torch.equal(weights, memory.weights(name))
        assert set(state) == set(optimiser.state_names)
        for key, own in state.items():
            assert torch.equal(own, memory.optimiser_state(name)[key])
            assert float(own.sum()) > 0
    store.close()


def test_a_table_of_50_gb_takes_only_what_is_touched(tmp_path):
    optimiser = TableOptimiser()
    num_rows = 50_000_000_000 // (4 * 65)
    config = EmbeddingBagConfig(name="t", num_embeddings=num_rows, embedding_dim=64, feature_names=["f"])
    store = DiskStore([config], folder=tmp_path, optimiser=optimiser)
    ids = torch.randint(0, num_rows, (100,))
    kjt = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(100, dtype=torch.int64))
    store(kjt).to_dict()["f"].sum().backward()
    store.flush()
    found = os.stat(tmp_path / "t.rows")
    assert found.st_size == num_rows * 4 * 65
    assert found.st_blocks * 512 < 2_000_000
    _, state = store.gather_rows("t", ids[:3])
    assert float(state["momentum1"].min()) > 0
    store.close()


def test_a_store_starts_saves_and_takes_over(tmp_path):
    optimiser = TableOptimiser(kind="rowwise_adagrad", lr=0.1)

    def initial(table, start, stop):
        return torch.arange(start, stop, dtype=torch.float32)[:, None].expand(-1, 8) + len(table)

    store = DiskStore(
        configs(is_pooled=True), folder=tmp_path / "one", optimiser=optimiser, hot_rows={"a": torch.tensor([5])}
    )
    store.start(initial)
    weights, state = store.gather_rows("a", torch.tensor([5, 9]))
    assert weights[:, 0].tolist() == [6, 10]
    assert state["momentum1"].tolist() == [0, 0]
    for ids in batches(2):
        loss_of(store(ids), is_pooled=True).backward()
    saved = store.state()
    assert saved["tables"]["a"].shape == (200, 8)
    assert saved["table_optimiser"]["a"]["momentum1"].shape == (200,)
    other = DiskStore(
        configs(is_pooled=True), folder=tmp_path / "two", optimiser=optimiser, hot_rows={"b": torch.tensor([1])}
    )
    other.absorb(saved)
    for ids in batches(3)[2:]:
        with torch.no_grad():
            assert torch.equal(store(ids).to_dict()["b1"], other(ids).to_dict()["b1"])
    rows = torch.arange(90)
    assert torch.equal(store.gather_rows("b", rows)[0], other.gather_rows("b", rows)[0])


def test_rows_that_are_written_while_they_are_read_ahead_are_read_again(tmp_path):
    store = DiskStore(configs(is_pooled=True), folder=tmp_path, optimiser=TableOptimiser(kind="sgd"))
    ids = batches(1)[0]
    store.prefetch(ids)
    store.put_rows("a", torch.arange(200), torch.ones(200, 8), {})
    with torch.no_grad():
        found = store(ids).to_dict()["a1"]
    assert torch.equal(found, ids["a1"].lengths()[:, None].float().expand(-1, 8))


def test_hashed_rows_are_uniform_and_belong_to_their_row():
    drawn = hashed_rows(np.arange(4000), 16, scale=0.5, seed=3)
    assert float(drawn.min()) >= -0.5
    assert float(drawn.max()) < 0.5
    assert abs(float(drawn.mean())) < 0.005
    assert float(drawn.std()) == pytest.approx(1 / 12**0.5, rel=0.01)
    assert torch.equal(hashed_rows(np.array([17, 5]), 16, scale=0.5, seed=3), drawn[[17, 5]])
    assert abs(float(torch.corrcoef(drawn.T)[0, 1])) < 0.06


def test_released_pages_are_still_there(tmp_path):
    rows = DiskRows(tmp_path / "r", num_rows=1000, dim=4, state_width=1, scale=1.0, seed=0, resident_bytes=4096)
    values = torch.rand(1000, 5)
    for start in range(0, 1000, 100):
        rows.write(np.arange(start, start + 100), values[start : start + 100])
    assert torch.equal(rows.read(np.arange(1000)), values)
    rows.clear()
    assert torch.equal(rows.read(np.arange(3))[:, :4], hashed_rows(np.arange(3), 4, scale=1.0, seed=0))
    rows.close()


def test_a_checkpoint_is_written_and_read_a_block_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("recmill.model.stores.disk.rows.BLOCK_ROWS", 64)
    optimiser = TableOptimiser(kind="rowwise_adagrad", lr=0.1)
    stores = [
        DiskStore(
            configs(is_pooled=True), folder=tmp_path / name, optimiser=optimiser, hot_rows={"a": torch.tensor([5])}
        )
        for name in ("one", "two")
    ]
    for ids in batches(2):
        loss_of(stores[0](ids), is_pooled=True).backward()
    (tmp_path / "saved").mkdir()
    save_tensors(stores[0].state(), tmp_path / "saved", no_dist=True)
    parts = TensorIndex.load(tmp_path / "saved").tensors["tables.a"].parts
    assert [part.shape for part in parts] == [(64, 8), (64, 8), (64, 8), (8, 8)]
    empty = stores[1].state()
    load_tensors(empty, tmp_path / "saved", no_dist=True)
    stores[1].absorb(empty)
    for table, rows in (("a", torch.arange(200)), ("b", torch.arange(90))):
        (weights, state), (found, found_state) = (store.gather_rows(table, rows) for store in stores)
        assert torch.equal(weights, found)
        assert torch.equal(state["momentum1"], found_state["momentum1"])
    whole = {"tables": {"a": torch.zeros(200, 8)}}
    load_tensors(whole, tmp_path / "saved", no_dist=True)
    assert torch.equal(whole["tables"]["a"], stores[0].gather_rows("a", torch.arange(200))[0])


def test_tables_beyond_a_gpu_are_cached_there_and_others_stay_as_planned():
    features = tuple(Feature(name=name, kind="sparse", num_rows=100, dim=8) for name in ("large", "small"))
    plan = default_plan(Schema(features=features), Topology.local(1)).to_torchrec("cuda")
    cache_tables(plan, ["large"], load_factor=0.25)
    placed = plan.plan["embeddings.pooled"]
    assert placed[module_name("large")].compute_kernel == "fused_uvm_caching"
    assert placed[module_name("large")].cache_params.load_factor == 0.25
    assert placed[module_name("small")].compute_kernel == "fused"
    assert placed[module_name("small")].cache_params is None
