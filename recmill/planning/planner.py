"""Where every embedding table lives, decided from a profile, a topology and a memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import AccessProfile, InputError, ShardPlan, write_folder
from recmill.data.schema import Schema, Table
from recmill.planning.topology import Topology
from recmill.planning.torchrec_planner import plan_with_torchrec
from recmill.progress import Progress, no_progress

__all__ = ["ShardPlan", "Topology", "default_plan", "plan_shards"]

WEIGHT_BYTES = 4
STATE_BYTES_PER_ROW = 4  # row-wise Adagrad keeps one float a row
ID_BYTES = 8
ROW_BLOCK = 1_000_000


def plan_shards(
    profile: AccessProfile | str | Path,
    *,
    out: str | Path,
    topology: Topology,
    memory_budget_bytes: int,
    batch_size: int = 2048,
    progress: Progress = no_progress,
) -> ShardPlan:
    """Plan the tables of a profile with TorchRec's own planner and write a ShardPlan.

    `memory_budget_bytes` is what one rank may spend on rows and their optimiser state; `batch_size` is global.
    """
    if not isinstance(profile, AccessProfile):
        profile = AccessProfile.load(profile)
    schema = Schema.load(profile.path)
    check_budget(schema, topology, memory_budget_bytes)
    lengths = {
        name: float(entry["mean_length"])
        for name, entry in profile.body["duplication"].items()
        if "mean_length" in entry
    }
    placed = plan_with_torchrec(schema, topology, memory_budget_bytes, batch_size=batch_size, mean_lengths=lengths)
    tables = {
        table.name: {
            **placed[table.name],
            "tiers": [_whole_table_tier(schema, table, placed[table.name], topology, batch_size, lengths)],
        }
        for table in schema.tables
    }
    rank_seconds = np.zeros(topology.world_size)
    for placement in tables.values():
        for shard in placement["shards"]:
            rank_seconds[shard["rank"]] += shard["predicted_seconds"]
    body = {
        "topology": topology.to_json(),
        "memory_budget_bytes": memory_budget_bytes,
        "batch_size": batch_size,
        "tables": tables,
        "rank_bytes": _rank_bytes(tables, topology.world_size),
        "solver": "torchrec",
        "objective": float(rank_seconds.max()),
        "bound": None,
        "hot_set": None,
        "profile_hash": profile.content_hash,
    }
    with write_folder(out, manifest_name=ShardPlan.manifest_name) as folder:
        (folder / "rows").mkdir()
        for done, table in enumerate(schema.tables):
            _write_identity_rows(folder / "rows" / f"{table.name}.parquet", table.num_rows)
            progress("write rows of tables", done + 1, len(schema.tables))
        ShardPlan.seal(folder, body=body, inputs={"profile": profile.content_hash})
    return ShardPlan.load(out)


def default_plan(schema: Schema, topology: Topology) -> ShardPlan:
    """Whole tables on single ranks, the largest first to the emptiest rank: what runs when no plan is given."""
    load = [0] * topology.world_size
    tables: dict[str, Any] = {}
    for table in sorted(schema.tables, key=lambda table: (-table.num_rows * table.dim, table.name)):
        rank = load.index(min(load))
        load[rank] += table_bytes(table)
        tables[table.name] = {
            "collection": "sequence" if table.name in schema.sequence_tables else "pooled",
            "sharding": "table_wise",
            "shards": [
                {
                    "rank": rank,
                    "local_rank": rank % topology.ranks_per_node,
                    "offset": [0, 0],
                    "size": [table.num_rows, table.dim],
                }
            ],
        }
    body = {"topology": topology.to_json(), "tables": tables, "solver": "largest first", "objective": None}
    return ShardPlan(path="", body=body)


def table_bytes(table: Table) -> int:
    """Rows and optimiser state."""
    return table.num_rows * (table.dim * WEIGHT_BYTES + STATE_BYTES_PER_ROW)


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
    schema: Schema,
    table: Table,
    placed: Mapping[str, Any],
    topology: Topology,
    batch_size: int,
    lengths: Mapping[str, float],
) -> dict[str, Any]:
    """The one tier of a table that is placed as a whole, with the all-to-all bytes a step it will cause."""
    is_pooled = placed["collection"] == "pooled"
    ids = sum(lengths.get(name, 1.0) for name in table.features) * batch_size
    vectors = len(table.features) * batch_size if is_pooled else ids
    away = (topology.world_size - 1) / topology.world_size
    # ids travel once; vectors forward and their gradients back
    moved = away * (ids * ID_BYTES + 2 * vectors * table.dim * WEIGHT_BYTES)
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


def _write_identity_rows(path: Path, num_rows: int) -> None:
    """`row, tier, slot` of a table with one tier: slot = row. Delta encoding makes it a few bytes a million rows."""
    schema = pa.schema([("row", pa.int64()), ("tier", pa.int32()), ("slot", pa.int64())])
    encoding = dict.fromkeys(("row", "tier", "slot"), "DELTA_BINARY_PACKED")
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, column_encoding=encoding) as writer:
        for start in range(0, num_rows, ROW_BLOCK):
            rows = np.arange(start, min(start + ROW_BLOCK, num_rows))
            tiers = np.zeros(len(rows), dtype=np.int32)
            writer.write_table(pa.table({"row": rows, "tier": tiers, "slot": rows}, schema=schema))
