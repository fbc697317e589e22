"""Refreshes a plan for a changed profile: a row changes its tier only if that pays for the move.

Every table is cut into the rows that the older plan replicated, kept once per node, or spread. A move costs the bytes
of the missing copies, divided by the number of steps that the new plan is expected to serve; the tier problem weighs it
against what the move saves. Rows that stay in the replicated or node tier keep their slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recmill.artifacts import InputError, ShardPlan, join_path
from recmill.artifacts.topology import Topology
from recmill.planning.tiers.costs import held_bytes
from recmill.planning.tiers.problem import GLOBAL, Segment
from recmill.planning.tiers.reads import TableReads
from recmill.planning.tiers.row_files import keep_slots, most_read_rows, read_tier_rows

# C = classes of rows, K = kinds of tiers
DEFAULT_STEPS = 10_000


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Rows of a table that start from one tier, by falling count; None for all rows that no other origin lists."""

    table: int
    kind: str
    rows: np.ndarray | None


def copies_to_send(origin: str, topology: Topology) -> np.ndarray:
    """[K] copies of a row that must be sent when it changes from `origin` to each kind of tier, on average."""
    nodes, per_node, world = topology.nodes, topology.ranks_per_node, topology.world_size
    return np.array(
        {
            "replicated": (0.0, 0.0, 0.0),
            "node": (world - nodes, 0.0, 1 - 1 / per_node),
            "global": (world - 1, nodes - 1 / per_node, 0.0),
            "table_wise": (world - 1, nodes - 1 / per_node, 1 - 1 / world),
        }[origin]
    )


def check_previous(previous: ShardPlan, tables: Sequence[TableReads], topology: Topology) -> None:
    """Raise unless the older plan is about the same tables and ranks."""
    where = join_path(previous.path, previous.manifest_name)
    old = previous.topology
    if (old.nodes, old.ranks_per_node) != (topology.nodes, topology.ranks_per_node):
        raise InputError(
            f"{where}: made for {old.nodes} nodes with {old.ranks_per_node} ranks, the new plan is for "
            f"{topology.nodes} with {topology.ranks_per_node}: every row would move, so drop --from"
        )
    for table in tables:
        entry = previous.tables.get(table.name)
        if entry is None:
            raise InputError(f"{where}: has no table {table.name!r}; the profile has")
        num_rows = sum(tier.num_rows for tier in entry.tiers)
        if num_rows != table.num_rows:
            raise InputError(f"{where}: table {table.name!r} has {num_rows:,} rows, the profile {table.num_rows:,}")


def cut_by_origin(
    previous: ShardPlan, tables: Sequence[TableReads], folder: Path, topology: Topology, *, steps: int
) -> tuple[list[Segment], list[Origin]]:
    """The rows of every table by the tier they start from; the cost of a move is spread over `steps` steps."""
    segments: list[Segment] = []
    origins: list[Origin] = []
    level = "inter" if topology.nodes > 1 else "intra"
    per_byte = 1 / topology.link("all_to_all", level).bytes_per_s / topology.world_size / steps
    for t, table in enumerate(tables):
        held = held_bytes(table.dim)
        old = read_tier_rows(previous, table.name)
        is_whole = previous.tables[table.name].is_whole
        moved = {kind: rows for kind, rows in old.items() if len(rows)}
        counted = _counts_of(folder / "counts" / f"{table.name}.parquet", moved)
        left = dict(zip(table.reads_C.tolist(), table.rows_C.tolist(), strict=True))
        parts: list[tuple[Origin, np.ndarray, np.ndarray]] = []
        for kind, (rows, counts) in counted.items():
            values, number = np.unique(reads_of_counts(table, counts), return_counts=True)
            for value, taken in zip(values.tolist(), number.tolist(), strict=True):
                left[value] -= taken
            parts.append((Origin(table=t, kind=kind, rows=rows), number[::-1], values[::-1]))
        rest = [(rows, reads) for reads, rows in left.items() if rows]
        if rest:
            rows_C, reads_C = (np.array(column) for column in zip(*rest, strict=True))
            parts.append((Origin(table=t, kind="table_wise" if is_whole else "global", rows=None), rows_C, reads_C))
        for origin, rows_C, reads_C in parts:
            seconds = tuple((copies_to_send(origin.kind, topology) * (held * per_byte)).tolist())
            segments.append(Segment(table=t, rows_C=rows_C, reads_C=reads_C, move_seconds=seconds))
            origins.append(origin)
    return segments, origins


def _counts_of(path: Path, moved: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{kind: (rows, counts)} by falling count."""
    import pyarrow.dataset as ds  # loads pandas, if it is installed

    found = {}
    for kind, rows in moved.items():
        read = ds.dataset(path).to_table(filter=pc.field("row").isin(pa.array(rows)))
        counts, order = np.zeros(len(rows), np.int64), np.argsort(rows)
        counts[order[np.searchsorted(rows, read["row"].to_numpy(), sorter=order)]] = read["count"].to_numpy()
        falling = np.argsort(-counts, kind="stable")
        found[kind] = (rows[falling], counts[falling])
    return found


def reads_of_counts(table: TableReads, counts: np.ndarray) -> np.ndarray:
    """The reads of the classes that rows with these counts belong to."""
    position = np.searchsorted(-table.least_counts_C, -counts.astype(float), side="left")
    found: np.ndarray = table.reads_C[np.minimum(position, len(table.reads_C) - 1)]
    return found


def choose_rows(
    table: int, tables: Sequence[TableReads], origins: Sequence[Origin], placed: np.ndarray, folder: Path
) -> dict[str, np.ndarray]:
    """The rows of a table's replicated and node tiers: the most read of every origin, as many as the solution says."""
    path = folder / "counts" / f"{tables[table].name}.parquet"
    elsewhere = [origin.rows for origin in origins if origin.table == table and origin.rows is not None]
    chosen: dict[str, list[np.ndarray]] = {"replicated": [], "node": []}
    for origin, (replicated, node) in zip(origins, placed, strict=True):
        if origin.table != table:
            continue
        ranked = origin.rows
        if ranked is None:
            taken = np.concatenate([np.zeros(0, np.int64), *elsewhere])
            ranked = most_read_rows(path, int(replicated + node) + len(taken), below=tables[table].num_rows)
            ranked = ranked[~np.isin(ranked, taken)]
        chosen["replicated"].append(ranked[:replicated])
        chosen["node"].append(ranked[replicated : replicated + node])
    return {kind: np.concatenate([np.zeros(0, np.int64), *rows]) for kind, rows in chosen.items()}


def settle(rows: Mapping[str, np.ndarray], previous: ShardPlan, table: str) -> dict[str, np.ndarray]:
    """The rows by slot; rows that stay in their tier keep their slot."""
    old = read_tier_rows(previous, table)
    return {kind: keep_slots(wanted, old[kind]) for kind, wanted in rows.items()}


def count_moves(
    new: Mapping[str, Mapping[str, np.ndarray]],
    whole: Mapping[str, int],
    previous: ShardPlan,
    tables: Sequence[TableReads],
    topology: Topology,
) -> tuple[int, float]:
    """(rows that change their tier, bytes of the copies to send) from the previous plan to the new one.

    `new` holds the replicated and node rows of every table, `whole` the rank of every table kept whole.
    """
    num_rows, num_bytes = 0, 0.0
    for table in tables:
        entry = previous.tables[table.name]
        held = held_bytes(table.dim)
        if table.name in whole:
            if not entry.is_whole or entry.shards[0].rank != whole[table.name]:
                num_rows += table.num_rows
                num_bytes += table.num_rows * held * (1 - 1 / topology.world_size)
            continue
        old = read_tier_rows(previous, table.name)
        base = "table_wise" if entry.is_whole else "global"
        table_from = _origin_matrix(old, new[table.name], table.num_rows, base)
        for origin, split in table_from.items():
            copies = copies_to_send(origin, topology)
            stays = {"replicated": 0, "node": 1, "global": GLOBAL}.get(origin)
            num_rows += sum(rows for k, rows in enumerate(split) if k != stays)
            num_bytes += float(copies @ np.array(split)) * held
    return int(num_rows), num_bytes


def _origin_matrix(
    old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], num_rows: int, base: str
) -> dict[str, list[int]]:
    """{old tier: rows that go to each kind of tier}."""
    found: dict[str, list[int]] = {}
    for kind, rows in old.items():
        split = [int(np.isin(rows, new[wanted]).sum()) for wanted in ("replicated", "node")]
        found[kind] = [*split, len(rows) - sum(split)]
    arrived = [
        len(new[kind]) - sum(split[k] for split in found.values()) for k, kind in enumerate(("replicated", "node"))
    ]
    rest = num_rows - sum(len(rows) for rows in old.values())
    found[base] = [*arrived, rest - sum(arrived)]
    return found
