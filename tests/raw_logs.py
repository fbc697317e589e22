"""Small raw logs for tests: random sessions, interleaved in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.data.schema import Feature, Schema

LOG_SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense"),
        Feature(name="tags", kind="sparse", num_rows=30, dim=4),
        Feature(name="item", kind="sparse", table="items", num_rows=20, dim=4),
        Feature(name="history", kind="sequence", table="items", num_rows=20, dim=4, shift=True),
    )
)


def lists_of(rows: list[list[int]]) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int64()))


def random_log(num_rows: int, *, num_sessions: int = 0, seed: int = 0, max_time: int = 10_000) -> pa.Table:
    """Rows of LOG_SCHEMA in time order, of sessions whose ids are not in order; `item` is a plain column."""
    rng = np.random.default_rng(seed)
    num_sessions = num_sessions or max(1, num_rows // 4)
    ids = rng.permutation(num_sessions) * 7 - 3
    return pa.table(
        {
            "session_id": ids[rng.integers(0, num_sessions, num_rows)],
            "timestamp": np.sort(rng.integers(0, max_time, num_rows)),
            "label": rng.integers(0, 2, num_rows).astype(np.float32),
            "age": rng.integers(0, 3, num_rows).astype(np.float32),
            "tags": lists_of([rng.integers(0, 30, rng.integers(0, 4)).tolist() for _ in range(num_rows)]),
            "item": rng.integers(0, 20, num_rows),
            "history": lists_of([rng.integers(0, 20, rng.integers(0, 4)).tolist() for _ in range(num_rows)]),
        }
    )


def write_log(
    folder: Path, table: pa.Table, *, schema: Schema = LOG_SCHEMA, num_files: int = 1, **options: Any
) -> Path:
    """Write the log as Parquet files with schema.json beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [number * table.num_rows // num_files for number in range(num_files + 1)]
    for number in range(num_files):
        piece = table.slice(bounds[number], bounds[number + 1] - bounds[number])
        pq.write_table(piece, folder / f"log-{number}.parquet", **options)
    schema.save(folder)
    return folder


def canonical(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row as something that can be compared and sorted, a plain id as a list of one."""
    item = row["item"] if isinstance(row["item"], list) else [row["item"]]
    lists = (tuple(row["tags"]), tuple(item), tuple(row["history"]))
    return (row["session_id"], row["timestamp"], float(row["label"]), float(row["age"]), *lists)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [canonical(row) for row in table.to_pylist()]
