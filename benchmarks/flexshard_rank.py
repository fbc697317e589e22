"""One rank of the FlexShard benchmark: `flexshard_rank.py FOLDER`, started by benchmarks/flexshard.py on every rank.

All sides run in the same processes and train the same batches in turns: TorchRec row-wise and table-wise, our exchange
with every row global (row-wise + id dedup), and the plan's tiers; these two also with bfloat16 on the wire.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from shaped_network import read_counters, write_result
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardMetadata,
)

from recmill.artifacts import ShardPlan, module_name
from recmill.model.stores.interface import TableOptimiser
from recmill.model.stores.tiered.tier_map import TierMap
from recmill.model.tiered_embedding import TieredEmbeddingCollection
from recmill.training.processes import keep_freed_memory

OPTIMISER = TableOptimiser(kind="rowwise_adagrad", lr=0.01)

Lookup = Callable[[KeyedJaggedTensor], Mapping[str, Any]]


@dataclass
class Wire:
    """Counts the bytes of every all-to-all and, on request, times it from the moment all of its ranks are ready."""

    is_timed: bool = False
    sent: int = 0
    seconds: float = 0.0
    num_messages: int = 0
    plain: Any = field(default_factory=lambda: dist.all_to_all_single)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        splits = input_split_sizes or [len(input) // size] * size
        width = input.element_size() * int(np.prod(input.shape[1:]))
        self.sent += (sum(splits) - splits[rank]) * width
        self.num_messages += 1
        if not self.is_timed:
            return self.plain(output, input, output_split_sizes, input_split_sizes, group, async_op)
        dist.barrier(group)
        start = time.perf_counter()
        self.plain(output, input, output_split_sizes, input_split_sizes, group)
        self.seconds += time.perf_counter() - start
        return _Done(output) if async_op else None

    def take(self) -> dict[str, float]:
        taken = {"sent": self.sent, "seconds": self.seconds, "messages": self.num_messages}
        self.sent, self.seconds, self.num_messages = 0, 0.0, 0
        return taken


@dataclass
class _Done:
    """A collective that has already completed."""

    output: torch.Tensor

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def torchrec_side(configs: list[EmbeddingConfig], sharding: str) -> Lookup:
    world = dist.get_world_size()
    plan = EmbeddingModuleShardingPlan()
    for place, config in enumerate(configs):
        rows, dim = config.num_embeddings, config.embedding_dim
        if sharding == "row_wise":
            size = -(-rows // world)
            parts = [(rank, rank * size, max(min(size, rows - rank * size), 0)) for rank in range(world)]
        else:
            parts = [(place * 4 % world, 0, rows)]
        shards = [
            ShardMetadata(shard_offsets=[first, 0], shard_sizes=[count, dim], placement=f"rank:{rank}/cpu")
            for rank, first, count in parts
        ]
        plan[config.name] = ParameterSharding(
            sharding_type=sharding,
            compute_kernel="fused",
            ranks=[rank for rank, _, _ in parts],
            sharding_spec=EnumerableShardingSpec(shards),
        )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": OPTIMISER.lr, "eps": OPTIMISER.eps}
    module = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    sharded = EmbeddingCollectionSharder(fused_params=fused).shard(
        module, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    )
    return lambda ids: sharded(ids).wait()


def tiered_side(
    configs: list[EmbeddingConfig], plan: ShardPlan | None, ranks_per_node: int, *, wire: str = "float32"
) -> TieredEmbeddingCollection:
    shared = {"is_pooled": False, "optimiser": OPTIMISER, "process_group": dist.group.WORLD, "wire": wire}
    if plan is not None:
        return TieredEmbeddingCollection(configs, plan, **shared)
    maps = {config.name: TierMap.of(config.num_embeddings) for config in configs}
    return TieredEmbeddingCollection(configs, maps, ranks_per_node=ranks_per_node, **shared)


def load_batches(folder: Path, rank: int, features: list[str]) -> list[KeyedJaggedTensor]:
    arrays = np.load(folder / f"rank-{rank}.npz")
    num_steps = 1 + max(int(name.split("/")[0]) for name in arrays.files)
    batches = []
    for step in range(num_steps):
        ids = [torch.from_numpy(arrays[f"{step}/{name}/ids"].astype(np.int64)) for name in features]
        lengths = [torch.from_numpy(arrays[f"{step}/{name}/lengths"]) for name in features]
        batches.append(KeyedJaggedTensor(keys=features, values=torch.cat(ids), lengths=torch.cat(lengths)))
    return batches


def run_step(lookup: Lookup, ids: KeyedJaggedTensor) -> None:
    found = lookup(ids)
    loss = sum(found[name].values().sum() for name in found)
    loss.backward()
    if isinstance(lookup, TieredEmbeddingCollection):
        lookup.finish()


def measure(lookup: Lookup, ids: KeyedJaggedTensor, wire: Wire, *, is_timed: bool) -> dict[str, Any]:
    """One step: seconds, and this rank's bytes by our count and by the interfaces."""
    traffic = lookup.traffic() if isinstance(lookup, TieredEmbeddingCollection) else {}
    wire.is_timed = is_timed
    dist.barrier()
    before, _ = read_counters(), wire.take()
    start = time.perf_counter()
    run_step(lookup, ids)
    seconds = time.perf_counter() - start
    dist.barrier()
    after, taken = read_counters(), wire.take()
    wire.is_timed = False
    result: dict[str, Any] = {"step_seconds": seconds, "comm_seconds": taken["seconds"], **taken}
    if before and after:
        result["interface"] = {name: after[name] - before[name] for name in after}
    if isinstance(lookup, TieredEmbeddingCollection):
        result["phases"] = {name: count - traffic.get(name, 0) for name, count in lookup.traffic().items()}
    return result


def run_case(folder: Path, case: Mapping[str, Any], wire: Wire) -> dict[str, Any]:
    rank = dist.get_rank()
    plan = ShardPlan.load(folder / "plan")
    features = [table["name"] for table in case["tables"]]
    configs = [
        EmbeddingConfig(
            name=module_name(table["name"]),
            num_embeddings=table["num_rows"],
            embedding_dim=case["dim"],
            feature_names=[table["name"]],
        )
        for table in case["tables"]
    ]
    with quiet():
        sides: dict[str, Lookup] = {
            "row_wise": torchrec_side(configs, "row_wise"),
            "table_wise": torchrec_side(configs, "table_wise"),
            "dedup": tiered_side(configs, None, case["ranks_per_node"]),
            "tiers": tiered_side(configs, plan, case["ranks_per_node"]),
            "dedup_bf16": tiered_side(configs, None, case["ranks_per_node"], wire="bfloat16"),
            "tiers_bf16": tiered_side(configs, plan, case["ranks_per_node"], wire="bfloat16"),
        }
    batches = load_batches(folder, rank, features)
    results: dict[str, Any] = {name: [] for name in sides}
    for step, ids in enumerate(batches):
        print(f"step {step}", flush=True)  # a sign of life
        order = list(sides) if step % 2 == 0 else list(reversed(sides))
        for name in order:
            # Step 0 is not timed inside collectives (bytes, and a warm-up); the others start all ranks together.
            # Table-wise is the slowest and not compared with a target: one step is enough.
            if name != "table_wise" or step == 0:
                is_timed = step > 0 or name == "table_wise"
                results[name].append(measure(sides[name], ids, wire, is_timed=is_timed))
    results["memory_bytes"] = {
        name: side.size_in_bytes for name, side in sides.items() if isinstance(side, TieredEmbeddingCollection)
    }
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    wire = Wire()
    dist.all_to_all_single = wire.all_to_all_single
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    results = {name: run_case(folder / name, case, wire) for name, case in cases.items()}
    write_result(results)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
