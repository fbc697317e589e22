"""A plan by TorchRec's own planner: whole tables, or unpooled ones split by rows. No row statistics enter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recmill.artifacts import AccessProfile, InputError
from recmill.data.schema import Schema, Table
from recmill.planning.dedup import FeatureDedup, choose_features
from recmill.planning.tiers.costs import STATE_BYTES_PER_ROW, TORCHREC_ID_BYTES, WEIGHT_BYTES
from recmill.planning.topology import Topology
from recmill.planning.torchrec_planner import plan_with_torchrec


def table_bytes(table: Table) -> int:
    """Rows and optimiser state."""
    return table.num_rows * (table.dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW)


def torchrec_body(
    profile: AccessProfile, schema: Schema, topology: Topology, memory_budget_bytes: int, batch_size: int
) -> dict[str, Any]:
    """tables, rank_bytes, solver, objective and bound for plan.json."""
    check_budget(schema, topology, memory_budget_bytes)
    lengths = {name: entry.mean_length for name, entry in profile.duplication.items()}
    features = choose_features(profile, schema, batch_size=batch_size)
    deduplicated = {name: found for name, found in features.items() if found.is_deduplicated}
    placed = plan_with_torchrec(schema, topology, memory_budget_bytes, batch_size=batch_size, mean_lengths=lengths)
    tables = {
        table.name: {
            **placed[table.name],
            "placement": "torchrec",
            "tiers": [_whole_table_tier(table, placed[table.name], topology, batch_size, lengths, deduplicated)],
        }
        for table in schema.tables
    }
    rank_seconds = np.zeros(topology.world_size)
    for placement in tables.values():
        for shard in placement["shards"]:
            rank_seconds[shard["rank"]] += shard["predicted_seconds"]
    return {
        "tables": tables,
        "rank_bytes": _rank_bytes(tables, topology.world_size),
        "solver": "torchrec",
        "objective": float(rank_seconds.max()),
        "bound": None,
    }


def check_budget(schema: Schema, topology: Topology, memory_budget_bytes: int) -> None:
    """Raise if the tables cannot fit into the ranks' memory together, or one cannot be placed whole."""
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


def _whole_table_tier(
    table: Table,
    placed: Mapping[str, Any],
    topology: Topology,
    batch_size: int,
    lengths: Mapping[str, float],
    deduplicated: Mapping[str, FeatureDedup],
) -> dict[str, Any]:
    """The one tier of a table that is placed as a whole, with the all-to-all bytes a step it will cause."""
    is_pooled = placed["collection"] == "pooled"
    lists = [(lengths.get(name, 1.0), deduplicated.get(name)) for name in table.features]
    ids = sum(length / (found.id_factor if found else 1.0) for length, found in lists) * batch_size
    bags = sum(1.0 / (found.factor if found else 1.0) for _, found in lists) * batch_size
    vectors = bags if is_pooled else ids
    away = (topology.world_size - 1) / topology.world_size
    # ids travel once; vectors forward and their gradients back
    moved = away * (ids * TORCHREC_ID_BYTES + 2 * vectors * table.dim * WEIGHT_BYTES)
    return {
        "kind": "table_wise" if placed["sharding"] == "table_wise" else "global",
        "num_rows": table.num_rows,
        "bytes": table_bytes(table),
        "predicted_bytes_per_step": moved,
        "predicted_seconds_per_step": max(shard["predicted_seconds"] for shard in placed["shards"]),
    }


def _rank_bytes(tables: Mapping[str, Any], world_size: int) -> list[int]:
    rank_bytes = [0] * world_size
    for table in tables.values():
        for shard in table["shards"]:
            num_rows, width = shard["size"]
            rank_bytes[shard["rank"]] += num_rows * (width * WEIGHT_BYTES + STATE_BYTES_PER_ROW)
    return rank_bytes
