"""Plans by TorchRec's own planner, which uses no row statistics: whole tables, or unpooled tables split by rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recmill.artifacts import AccessProfile, InputError, ShardPlan
from recmill.artifacts.plan import FeatureDedup, TablePlan, Tier
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema, Table
from recmill.planning.dedup import choose_features
from recmill.planning.tiers.costs import STATE_BYTES_PER_ROW, TORCHREC_ID_BYTES, WEIGHT_BYTES
from recmill.planning.tiers.entries import table_bytes
from recmill.planning.torchrec_planner import plan_with_torchrec


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
