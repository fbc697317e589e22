"""Small real datasets for the ingest tests, written with pyarrow alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset
from recmill.data.schema import Feature, Schema

SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense"),
        Feature(name="item", kind="sparse", num_rows=1_000_000, dim=4),
        Feature(name="price", kind="dense"),
        Feature(name="history", kind="sequence", num_rows=1_000_000, dim=4),
    )
)


def make_table(start: int, num_rows: int) -> pa.Table:
    """Rows whose label is their own number, so that a batch says which rows it holds."""
    rows = np.arange(start, start + num_rows)
    histories = [[int(row)] * (int(row) % 4) for row in rows]
    return pa.table(
        {
            "session_id": rows // 3,
            "timestamp": rows,
            "label": rows.astype(np.float32),
            "age": (rows * 0.5).astype(np.float32),
            "item": pa.array([[int(row)] for row in rows], type=pa.list_(pa.int64())),
            "price": (-rows).astype(np.float32),
            "history": pa.array(histories, type=pa.list_(pa.int64())),
        },
        schema=SCHEMA.arrow_schema(),
    )


def write_dataset(
    folder: Path,
    groups: list[list[int]],
    *,
    splits: list[str] | None = None,
    layout: str = "session",
    **options: object,
) -> Dataset:
    """A dataset with one part a list in `groups`, each with row groups of the given sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    SCHEMA.save(folder)
    parts, start = [], 0
    for number, sizes in enumerate(groups):
        name = f"part-{number:05d}.parquet"
        with pq.ParquetWriter(folder / name, SCHEMA.arrow_schema(), **options) as writer:
            for size in sizes:
                writer.write_table(make_table(start, size), row_group_size=size)
                start += size
        parts.append(
            {
                "file": name,
                "split": splits[number] if splits else "train",
                "num_rows": sum(sizes),
                "num_sessions": sum(sizes),
                "bytes": (folder / name).stat().st_size,
                "row_group_rows": sizes,
            }
        )
    body = {"layout": layout, "num_rows": start, "num_sessions": start, "source": {}, "parts": parts}
    Dataset.of_json(body).seal(folder)
    return Dataset.load(folder)
