"""Datasets whose lists repeat inside sessions, for the tests of deduplicated batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from recmill.artifacts import Dataset
from recmill.data.cluster import cluster_sessions
from recmill.data.schema import Feature, Schema

SCHEMA = Schema(
    features=(
        Feature(name="age", kind="dense"),
        Feature(name="likes", kind="sparse", num_rows=50, dim=4, group="user"),
        Feature(name="item", kind="sparse", num_rows=1_000, dim=4),
        Feature(name="visits", kind="sparse", num_rows=50, dim=4, group="user"),
        Feature(name="history", kind="sequence", num_rows=1_000, dim=4, shift=True),
    )
)


def make_log(seed: int, *, num_sessions: int, samples_per_session: int = 6) -> pa.Table:
    """A raw log in time order: user lists stay (and come back), histories shift, items change, some lists are empty."""
    random = np.random.default_rng(seed)
    rows = []
    for session in range(num_sessions):
        versions = [(_ids(random, 50, 5), _ids(random, 50, 3)) for _ in range(3)]
        clicks = [int(item) for item in random.integers(0, 1_000, 40)]
        seen = int(random.integers(0, 9))
        for _ in range(int(random.integers(1, 2 * samples_per_session))):
            likes, visits = versions[int(random.choice(3, p=[0.7, 0.2, 0.1]))]
            seen = min(seen + int(random.integers(0, 2)), 39)
            rows.append(
                {
                    "session_id": session,
                    "timestamp": int(random.integers(0, 1_000_000)),
                    "label": float(random.integers(0, 2)),
                    "age": float(random.normal()),
                    "likes": likes,
                    "item": [clicks[seen]],
                    "visits": visits,
                    "history": clicks[max(0, seen - 8) : seen],
                }
            )
    rows.sort(key=lambda row: row["timestamp"])
    return pa.Table.from_pylist(rows, schema=SCHEMA.arrow_schema())


def _ids(random: np.random.Generator, num_rows: int, most: int) -> list[int]:
    return [int(number) for number in random.integers(0, num_rows, random.integers(0, most + 1))]


def write_log(folder: Path, seed: int = 0, *, num_sessions: int = 60, schema: Schema = SCHEMA) -> Path:
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    pq.write_table(make_log(seed, num_sessions=num_sessions), folder / "log.parquet")
    schema.save(folder)
    return folder


def write_layout(raw: Path, out: Path, layout: str) -> Dataset:
    return cluster_sessions(raw, out=out, layout=layout, rows_per_group=50, rows_per_part=200)
