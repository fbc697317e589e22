"""Plans by TorchRec's own planner, which uses no row statistics: whole tables, or unpooled tables split by rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingType

from recmill.artifacts import AccessProfile, InputError, ShardPlan, module_name
from recmill.artifacts.plan import Shard, TablePlan, Tier
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema
from recmill.data.tables import bag_configs, logical_names, row_configs
from recmill.planning.dedup import choose_features
from recmill.planning.tiers.costs import held_bytes, torchrec_bytes
from recmill.planning.tiers.entries import empty_plan
from recmill.planning.tiers.problem import check_total, table_bytes

MS_PER_S = 1e3  # TorchRec states bandwidth in bytes per millisecond and time in milliseconds


def plan_by_torchrec(
    profile: AccessProfile, schema: Schema, topology: Topology, memory_budget_bytes: int, batch_size: int
) -> ShardPlan:
    """Tables, bytes per rank and predicted seconds; the other choices of a plan are left open."""
    check_total(schema.tables, topology, memory_budget_bytes)
    for table in schema.tables:
        if table_bytes(table) > memory_budget_bytes and table.name not in schema.sequence_tables:
            raise InputError(
                f"table {table.name!r} needs {table_bytes(table):,} B on one rank, the budget is "
                f"{memory_budget_bytes:,} B: {table_bytes(table) - memory_budget_bytes:,} B too little"
            )
    lengths = {name: entry.mean_length for name, entry in profile.duplication.items()}
    features = choose_features(profile, schema, batch_size=batch_size)
    deduplicated = {name: found for name, found in features.items() if found.is_deduplicated}
    placed = plan_with_torchrec(schema, topology, memory_budget_bytes, batch_size=batch_size, mean_lengths=lengths)
    tables: dict[str, TablePlan] = {}
    rank_seconds, rank_bytes = np.zeros(topology.world_size), [0] * topology.world_size
    for table in schema.tables:
        sharding, shards = placed[table.name]
        seconds = [shard.predicted_seconds or 0.0 for shard in shards]
        for shard, own in zip(shards, seconds, strict=True):
            rank_seconds[shard.rank] += own
            rank_bytes[shard.rank] += shard.size[0] * held_bytes(shard.size[1])
        tier = Tier(
            kind="table_wise" if sharding == "table_wise" else "global",
            num_rows=table.num_rows,
            bytes=table_bytes(table),
            predicted_bytes_per_step=torchrec_bytes(table, schema, topology, batch_size, lengths, deduplicated),
            predicted_seconds_per_step=max(seconds),
        )
        tables[table.name] = TablePlan(
            collection="sequence" if table.name in schema.sequence_tables else "pooled",
            placement="torchrec",
            sharding=sharding,
            shards=shards,
            tiers=(tier,),
        )
    slowest_s = float(rank_seconds.max())
    plan = replace(empty_plan(topology), solver="torchrec", objective=slowest_s, bound=None, gap=None)
    return replace(plan, tables=tables, rank_bytes=tuple(rank_bytes))


def without_tiers(plan: ShardPlan, schema: Schema, *, batch_size: int) -> ShardPlan:
    """The plan with its tables placed by TorchRec's planner, as a run without tiers trains them.

    Tables that share parameters stay where they are. So does every other table if TorchRec finds no room for them.
    """
    if not any(table.placement == "tiered" for table in plan.tables.values()):
        return plan
    lengths = {name: found.mean_length for name, found in plan.dedup.features.items()} if plan.dedup else {}
    how: dict[str, Any] = {"batch_size": batch_size, "mean_lengths": lengths}
    try:
        placed = plan_with_torchrec(schema, plan.topology, plan.memory_budget_bytes or 2**40, **how)
    except InputError:
        return plan
    tables = dict(plan.tables)
    for name, (sharding, shards) in placed.items():
        if tables[name].placement != "shared":
            tables[name] = replace(tables[name], placement="torchrec", sharding=sharding, shards=shards)
    return replace(plan, tables=tables)


class _Collections(nn.Module):
    """The two collections under the path that plans name, on the meta device."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embeddings = nn.Module()
        meta = torch.device("meta")
        if bags := bag_configs(schema):
            self.embeddings.pooled = EmbeddingBagCollection(tables=bags, device=meta)
        if rows := row_configs(schema):
            self.embeddings.sequence = EmbeddingCollection(tables=rows, device=meta)


def plan_with_torchrec(
    schema: Schema,
    topology: Topology,
    memory_budget_bytes: int,
    *,
    batch_size: int,
    mean_lengths: Mapping[str, float],
) -> dict[str, tuple[str, tuple[Shard, ...]]]:
    """(sharding, shards) of every table as TorchRec's planner places them.

    Pooled tables stay whole (TorchRec's row-wise bags do not plan on a CPU); sequence tables may be split by rows.
    """
    constraints = {
        module_name(table.name): ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value]
            + ([ShardingType.ROW_WISE.value] if table.name in schema.sequence_tables else []),
            compute_kernels=["fused"],
            pooling_factors=[max(mean_lengths.get(name, 1.0), 0.01) for name in table.features],
        )
        for table in schema.tables
    }
    cap = {"hbm_cap" if topology.device == "cuda" else "ddr_cap": memory_budget_bytes}
    planner = EmbeddingShardingPlanner(
        topology=TorchRecTopology(
            world_size=topology.world_size,
            local_world_size=topology.ranks_per_node,
            compute_device=topology.device,
            intra_host_bw=topology.intra_node_bytes_per_s / MS_PER_S,
            inter_host_bw=topology.inter_node_bytes_per_s / MS_PER_S,
            **cap,
        ),
        batch_size=max(batch_size // topology.world_size, 1),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner.plan(_Collections(schema), sharders)
    except PlannerError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"TorchRec's planner finds no placement within {memory_budget_bytes:,} B per rank on {topology.world_size} "
            f"ranks (it counts activations of {batch_size} samples too): {reason}"
        ) from error
    names = logical_names(schema)
    return {
        names[option.name]: (option.sharding_type, tuple(_shard(shard, topology) for shard in option.shards))
        for option in planner._best_plan
    }


def _shard(shard: Any, topology: Topology) -> Shard:
    return Shard(
        rank=shard.rank,
        local_rank=shard.rank % topology.ranks_per_node,
        offset=tuple(shard.offset),
        size=tuple(shard.size),
        predicted_seconds=shard.perf.total / MS_PER_S,
    )
