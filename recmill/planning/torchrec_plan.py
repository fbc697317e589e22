"""Plans by TorchRec's own planner, which uses no row statistics: whole tables, or unpooled tables split by rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
from recmill.artifacts.plan import FeatureDedup, Shard, TablePlan, Tier
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema, Table
from recmill.data.tables import bag_configs, logical_names, row_configs
from recmill.planning.dedup import choose_features
from recmill.planning.tiers.costs import STATE_BYTES_PER_ROW, TORCHREC_ID_BYTES, WEIGHT_BYTES
from recmill.planning.tiers.problem import table_bytes

MS_PER_S = 1e3  # TorchRec states bandwidth in bytes per millisecond and time in milliseconds


def plan_by_torchrec(
    profile: AccessProfile, schema: Schema, topology: Topology, memory_budget_bytes: int, batch_size: int
) -> ShardPlan:
    """Tables, bytes per rank and predicted seconds; the other choices of a plan are left open."""
    check_budget(schema, topology, memory_budget_bytes)
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
            rank_bytes[shard.rank] += shard.size[0] * (shard.size[1] * WEIGHT_BYTES + STATE_BYTES_PER_ROW)
        is_pooled = table.name not in schema.sequence_tables
        tier = Tier(
            kind="table_wise" if sharding == "table_wise" else "global",
            num_rows=table.num_rows,
            bytes=table_bytes(table),
            predicted_bytes_per_step=_sent_bytes(table, is_pooled, topology, batch_size, lengths, deduplicated),
            predicted_seconds_per_step=max(seconds),
        )
        tables[table.name] = TablePlan(
            collection="pooled" if is_pooled else "sequence",
            placement="torchrec",
            sharding=sharding,
            shards=shards,
            tiers=(tier,),
        )
    return ShardPlan(
        topology=topology,
        tables=tables,
        rank_bytes=tuple(rank_bytes),
        solver="torchrec",
        objective=float(rank_seconds.max()),
        bound=None,
        prediction=None,
        refresh=None,
        hot_set=None,
        shared=None,
    )


def check_budget(schema: Schema, topology: Topology, memory_budget_bytes: int) -> None:
    """Raise if the tables together, or one that must stay whole, exceed the memory of the ranks."""
    total = sum(table_bytes(table) for table in schema.tables)
    available = memory_budget_bytes * topology.world_size
    largest = sorted(schema.tables, key=table_bytes, reverse=True)[:3]
    named = ", ".join(f"{table.name} {table_bytes(table):,} B" for table in largest)
    if total > available:
        raise InputError(
            f"the tables need {total:,} B (rows and optimiser state), {topology.world_size} ranks with a budget of "
            f"{memory_budget_bytes:,} B each have {available:,} B: {total - available:,} B too little; largest: {named}"
        )
    for table in schema.tables:
        if table_bytes(table) > memory_budget_bytes and table.name not in schema.sequence_tables:
            raise InputError(
                f"table {table.name!r} needs {table_bytes(table):,} B on one rank, the budget is "
                f"{memory_budget_bytes:,} B: {table_bytes(table) - memory_budget_bytes:,} B too little"
            )


def _sent_bytes(
    table: Table,
    is_pooled: bool,
    topology: Topology,
    batch_size: int,
    lengths: Mapping[str, float],
    deduplicated: Mapping[str, FeatureDedup],
) -> float:
    """Bytes per step over all ranks: ids travel once, vectors forward and their gradients back."""
    lists = [(lengths.get(name, 1.0), deduplicated.get(name)) for name in table.features]
    ids = sum(length / (found.id_factor if found else 1.0) for length, found in lists) * batch_size
    bags = sum(1.0 / (found.factor if found else 1.0) for _, found in lists) * batch_size
    vectors = bags if is_pooled else ids
    away = (topology.world_size - 1) / topology.world_size
    return away * (ids * TORCHREC_ID_BYTES + 2 * vectors * table.dim * WEIGHT_BYTES)


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
