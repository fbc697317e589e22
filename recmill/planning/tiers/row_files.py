"""`rows/<table>.parquet`: the tier and slot of every row.

Slots are dense inside a tier. Replicated and node rows are numbered by falling count (or keep the slot an older plan
gave them), global rows in row order: such a slot is the row's number minus the lower rows in other tiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recmill.artifacts import InputError, ShardPlan, join_path, local_folder
from recmill.artifacts.places.columns import check_numbers

ROW_BLOCK = 1_000_000
ROW_SCHEMA = pa.schema([("row", pa.int64()), ("tier", pa.int32()), ("slot", pa.int64())])


def most_read_rows(counts_path: Path, num_rows: int, *, below: int) -> np.ndarray:
    """The `num_rows` most read rows of a table of `below` rows by falling count, from its counts file."""
    found, left = [np.zeros(0, np.int64)], num_rows
    with pq.ParquetFile(counts_path) as file:
        if "row" not in file.schema_arrow.names:
            raise InputError(f"{counts_path}: has no column 'row'")
        for batch in file.iter_batches(columns=["row"]):
            if left <= 0:
                break
            found.append(check_numbers(batch, "row", counts_path, below=below)[:left])
            left -= len(found[-1])
    return np.concatenate(found)


def write_rows(path: Path, num_rows: int, tiers: Sequence[np.ndarray | None]) -> None:
    """Write tier and slot of every row; `tiers` lists the rows of each tier by slot, None for the tier of the rest.

    Delta encoding stores the rest in a few bytes per million rows.
    """
    encoding = dict.fromkeys(("row", "tier", "slot"), "DELTA_BINARY_PACKED")
    with pq.ParquetWriter(
        path, ROW_SCHEMA, compression="zstd", use_dictionary=False, column_encoding=encoding
    ) as writer:
        for rows, tier, slot in _blocks(num_rows, tiers):
            writer.write_table(pa.table({"row": rows, "tier": tier, "slot": slot}, schema=ROW_SCHEMA))


def _blocks(num_rows: int, tiers: Sequence[np.ndarray | None]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    listed = [(position, rows) for position, rows in enumerate(tiers) if rows is not None]
    rest = next((position for position, rows in enumerate(tiers) if rows is None), -1)
    moved = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in listed)])
    tier_of = np.concatenate([np.zeros(0, np.int32), *(np.full(len(rows), tier, np.int32) for tier, rows in listed)])
    slot_of = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(rows)) for _, rows in listed)])
    order = np.argsort(moved, kind="stable")
    moved, tier_of, slot_of = moved[order], tier_of[order], slot_of[order]
    for start in range(0, num_rows, ROW_BLOCK):
        rows = np.arange(start, min(start + ROW_BLOCK, num_rows))
        below = np.searchsorted(moved, rows)
        tier, slot = np.full(len(rows), rest, np.int32), rows - below
        first, last = np.searchsorted(moved, [start, start + len(rows)])
        here = moved[first:last] - start
        tier[here], slot[here] = tier_of[first:last], slot_of[first:last]
        yield rows, tier, slot


def write_slots(folder: Path, tables: Mapping[str, np.ndarray]) -> None:
    """Write `<table>.parquet` with `row, slot` for rows that are listed by slot."""
    folder.mkdir()
    for name, rows in tables.items():
        columns = {"row": pa.array(rows, pa.int64()), "slot": pa.array(np.arange(len(rows)), pa.int64())}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet", compression="zstd")


def read_tier_rows(plan: ShardPlan, table: str) -> dict[str, np.ndarray]:
    """The rows of a table's replicated and node tiers by slot, as a plan placed them."""
    import pyarrow.dataset as ds  # loads pandas, if it is installed

    entry = plan.tables.get(table)
    if entry is None:
        raise InputError(f"{join_path(plan.path, plan.manifest_name)}: has no table {table!r}")
    places = {tier.kind: position for position, tier in enumerate(entry.tiers)}
    ordered = {}
    with local_folder(plan.path) as folder:
        path = folder / "rows" / f"{table}.parquet"
        rows, num_rows = ds.dataset(path), sum(tier.num_rows for tier in entry.tiers)
        if missing := {"row", "tier", "slot"} - set(rows.schema.names):
            raise InputError(f"{path}: has no column {min(missing)!r}")
        for kind in ("replicated", "node"):
            inside = rows.to_table(columns=["row", "slot"], filter=pc.field("tier") == places.get(kind, -1))
            row, slot = (check_numbers(inside, name, path, below=num_rows) for name in ("row", "slot"))
            ordered[kind] = row[np.argsort(slot, kind="stable")]
    return ordered


def keep_slots(wanted: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """The wanted rows by slot: rows that stay keep their slot, new rows fill the gaps, rows past the end move down."""
    slots = np.full(len(wanted), -1, np.int64)
    early = previous[: len(wanted)]
    stays = np.flatnonzero(np.isin(early, wanted))
    slots[stays] = early[stays]
    slots[slots < 0] = wanted[~np.isin(wanted, early[stays])]
    return slots
