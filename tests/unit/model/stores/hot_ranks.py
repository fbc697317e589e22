"""What one of two ranks does in test_hot_embedding.py: train TorchRec's tables, and the same batches with hot rows.

python hot_ranks.py RANK WORLD_SIZE STORE_FILE OUT_FILE
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recmill.model.hot_embedding import HotEmbeddingCollection
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.torchrec import TorchRecStore

ROWS = {"a": 60, "b": 40, "c": 30}
FEATURES = {"a": ["a1", "a2"], "b": ["b1"], "c": ["c1"]}
LR, EPS, NUM_STEPS = 0.05, 1e-8, 4
CPU = torch.device("cpu")


def configs(*, is_pooled: bool, dim: int = 8) -> list[Any]:
    if not is_pooled:
        return [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=FEATURES[name])
            for name, rows in ROWS.items()
        ]
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=FEATURES[name],
            pooling=PoolingType.MEAN if name == "c" else PoolingType.SUM,
        )
        for name, rows in ROWS.items()
    ]


def hot_rows(seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randperm(rows, generator=generator)[: rows // 2] for name, rows in ROWS.items()}


def batch(step: int, rank: int, chosen: dict[str, Tensor] | None) -> KeyedJaggedTensor:
    """A batch of ids of any row, of another size on every rank; with `chosen` it holds slots of hot rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    num_samples = 5 + 2 * rank + step
    keys = [name for names in FEATURES.values() for name in names]
    lengths = torch.randint(0, 4, (len(keys) * num_samples,), generator=generator)
    values = []
    for position, key in enumerate(keys):
        table = key[0]
        high = ROWS[table] if chosen is None else len(chosen[table])
        count = int(lengths[position * num_samples : (position + 1) * num_samples].sum())
        values.append(torch.randint(0, high, (count,), generator=generator))
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths)


def as_rows(slots: KeyedJaggedTensor, chosen: dict[str, Tensor]) -> KeyedJaggedTensor:
    """The same batch with ids of rows instead of slots."""
    values = [chosen[key[0]][own.values()] for key, own in slots.to_dict().items()]
    return KeyedJaggedTensor(keys=slots.keys(), values=torch.cat(values), lengths=slots.lengths())


def sharded(optimiser: str, *, is_pooled: bool, sharding: str = "table_wise") -> Any:
    torch.manual_seed(0)
    kind = EmbeddingBagCollection if is_pooled else EmbeddingCollection
    model = torch.nn.Sequential(kind(tables=configs(is_pooled=is_pooled), device=torch.device("meta")))
    classes = {"sgd": torch.optim.SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    arguments = {"lr": LR} if optimiser == "sgd" else {"lr": LR, "eps": EPS}
    apply_optimizer_in_backward(classes[optimiser], model.parameters(), arguments)
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    limits = {name: ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"), constraints=limits
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    module = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    for name, weight in store_of(module)._weights.items():
        for shard in weight.local_shards():
            generator = torch.Generator().manual_seed(len(name) + ord(name[0]))
            whole = torch.rand(ROWS[name], 8, generator=generator)
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.data.copy_(whole[first : first + rows])
    return module


def store_of(module: Any, optimiser: str = "rowwise_adagrad") -> TorchRecStore:
    weights = {path.split(".")[-2]: value for path, value in module.state_dict().items()}
    state = {
        path.split(".")[-2]: {key.split(".")[-1]: value for key, value in entry.items()}
        for path, entry in module.fused_optimizer.state_dict()["state"].items()
    }
    return TorchRecStore(weights, state, state_names=TableOptimiser(kind=optimiser).state_names)


def loss_of(found: Any, *, is_pooled: bool) -> Tensor:
    """Some function of everything that was looked up, different for each feature."""
    parts = [(found.to_dict()[key] if is_pooled else found[key].values()) for key in ("a1", "a2", "b1", "c1")]
    return sum((torch.sin(own * (place + 1)).sum() for place, own in enumerate(parts)), torch.zeros(()))


def snapshot(store: TorchRecStore) -> list[Tensor]:
    found = []
    for table in store.tables:
        weights, state = store.gather_rows(table, torch.arange(ROWS[table]))
        found += [weights, *state.values()]
    return found


def largest_difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Of any number, relative to its size where that is above 1: state of up to 124 has units of 7.6e-6 in float32."""
    pairs = zip(expected, found, strict=True)
    return max(float(((own - theirs).abs() / own.abs().clamp(min=1)).max()) for own, theirs in pairs)


def compare(optimiser: str, *, is_pooled: bool, sync: str, sharding: str = "table_wise") -> float:
    """The largest difference in any weight or state after the same batches with and without the hot tier."""
    chosen, rank = hot_rows(), dist.get_rank()
    plain, ours = (sharded(optimiser, is_pooled=is_pooled, sharding=sharding) for _ in range(2))
    store = store_of(ours, optimiser)
    settings = TableOptimiser(kind=optimiser, lr=LR, eps=EPS)
    hot = HotEmbeddingCollection(configs(is_pooled=is_pooled), chosen, optimiser=settings, sync=sync)
    for step in range(NUM_STEPS):
        is_hot = step % 2 == 1
        slots = batch(step, rank, chosen if is_hot else None)
        ids = as_rows(slots, chosen) if is_hot else slots
        loss_of(plain(ids), is_pooled=is_pooled).backward()
        if is_hot:
            hot.enter([store])
            loss_of(hot(slots), is_pooled=is_pooled).backward()
            hot.leave([store])
        else:
            loss_of(ours(slots), is_pooled=is_pooled).backward()
    expected, found = snapshot(store_of(plain, optimiser)), snapshot(store)
    for own, theirs in zip(expected, found, strict=True):
        assert own.shape == theirs.shape
        assert float(own.abs().sum()) > 0
    return largest_difference(expected, found)


def two_lookups_then_two_backwards() -> float:
    """The largest difference between both ways to sync, if a second lookup comes before the gradients of the first."""
    chosen, rank, found = hot_rows(), dist.get_rank(), dict[str, list[Tensor]]()
    for sync in ("raw", "reduced"):
        settings = TableOptimiser(kind="sgd", lr=LR, eps=EPS)
        hot = HotEmbeddingCollection(configs(is_pooled=False), chosen, optimiser=settings, sync=sync)
        for number, table in enumerate(hot.tables):
            hot.weights(table).copy_(torch.linspace(-1, 1 + number, hot.weights(table).numel()).view(-1, 8))
        losses = [loss_of(hot(batch(step, rank, chosen)), is_pooled=False) for step in (1, 3)]
        for loss in losses:
            loss.backward()
        found[sync] = [hot.weights(table).clone() for table in hot.tables]
    return largest_difference(found["raw"], found["reduced"])


def main() -> None:
    rank, world_size, store, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    found: dict[str, float] = {}
    for optimiser in ("sgd", "rowwise_adagrad", "adagrad"):
        for is_pooled in (True, False):
            for sync in ("raw", "reduced"):
                name = f"{optimiser} {'pooled' if is_pooled else 'rows'} {sync}"
                found[name] = compare(optimiser, is_pooled=is_pooled, sync=sync)
    found["row_wise shards"] = compare("rowwise_adagrad", is_pooled=False, sync="raw", sharding="row_wise")
    found["two lookups"] = two_lookups_then_two_backwards()
    if rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
