"""Seconds to move rows with their optimiser state from TorchRec's table into the hot rows and back."""

from __future__ import annotations

import time

import torch
from fae_training import BENCH_CONFIG
from harness import in_turns
from torchrec import EmbeddingBagConfig
from training_rate import one_rank

from recmill.artifacts import module_name
from recmill.artifacts.topology import Topology
from recmill.data.schema import Feature, Schema
from recmill.model.hot_embedding import HotEmbeddingCollection
from recmill.model.stores.interface import TableOptimiser
from recmill.planning.planner import default_plan
from recmill.training.rank.sharding import shard_model


def swap_seconds(num_rows: int, *, repeats: int, dim: int = 64) -> tuple[list[float], list[float]]:
    """(torch's index_select and index_copy_ on the same tensors, ours), in turns; both move the same values."""
    total = 4 * num_rows
    schema = Schema(features=(Feature(name="t", kind="sparse", num_rows=total, dim=dim),))
    rows = torch.randperm(total)[:num_rows]
    config = EmbeddingBagConfig(name=module_name("t"), num_embeddings=total, embedding_dim=dim, feature_names=["t"])
    with one_rank():
        model = shard_model(schema, BENCH_CONFIG, default_plan(schema, Topology.local(1)), torch.device("cpu"))
        hot = HotEmbeddingCollection([config], {"t": rows}, optimiser=TableOptimiser())
        state = model.table_states()[0]
        live = state["tables"]["t"].local_shards()[0].tensor
        momentum = state["table_optimiser"]["t"]["momentum1"].local_shards()[0].tensor
        held = hot.hot_rows["t"]  # in the order of the slots

        def ours() -> float:
            start = time.perf_counter()
            hot.enter(model.stores)
            hot.leave(model.stores)
            return time.perf_counter() - start

        def by_index() -> float:
            weights, own_momentum = hot.weights("t"), hot.optimiser_state("t")["momentum1"]
            start = time.perf_counter()
            torch.index_select(live, 0, held, out=weights)
            torch.index_select(momentum, 0, held, out=own_momentum)
            live.index_copy_(0, held, weights)
            momentum.index_copy_(0, held, own_momentum)
            return time.perf_counter() - start

        with torch.no_grad():
            before = live.clone()
            ours(), by_index()
            assert torch.equal(live, before)
            assert torch.equal(hot.weights("t"), before[held])
            theirs, mine = in_turns(by_index, ours, repeats=repeats)
        return theirs, mine
