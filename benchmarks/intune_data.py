"""The Parquet that all loaders read, and a hash of rows that does not depend on their order."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.artifacts import Dataset
from recmill.data.ikjt.batch import Batch
from recmill.data.schema import Feature, Schema

NUM_DENSE, NUM_LISTS, MEAN_LENGTH = 13, 26, 3
ODD = np.uint64(0x9E3779B97F4A7C15)


def write_dataset(
    folder: Path,
    *,
    num_groups: int,
    rows_per_group: int,
    seed: int,
    num_dense: int = NUM_DENSE,
    num_lists: int = NUM_LISTS,
) -> Dataset:
    """One part of `num_groups` row groups with dense and list features."""
    rng = np.random.default_rng(seed)
    dense = [Feature(name=f"d{index}", kind="dense") for index in range(num_dense)]
    lists = [Feature(name=f"s{index}", kind="sparse", num_rows=100_000, dim=8) for index in range(num_lists)]
    schema = Schema(features=(*dense, *lists))
    folder.mkdir(parents=True)
    schema.save(folder)
    with pq.ParquetWriter(folder / "part-00000.parquet", schema.arrow_schema(), compression="zstd") as writer:
        for group in range(num_groups):
            writer.write_table(_make_rows(rng, schema, group * rows_per_group, rows_per_group), rows_per_group)
    num_rows = num_groups * rows_per_group
    part = {
        "file": "part-00000.parquet",
        "split": "train",
        "num_rows": num_rows,
        "num_sessions": num_rows,
        "bytes": (folder / "part-00000.parquet").stat().st_size,
        "row_group_rows": [rows_per_group] * num_groups,
    }
    body = {"layout": "session", "num_rows": num_rows, "num_sessions": num_rows, "source": {}, "parts": [part]}
    Dataset.of_json(body).seal(folder)
    return Dataset.load(folder)


def _make_rows(rng: np.random.Generator, schema: Schema, start: int, num_rows: int) -> pa.Table:
    rows = np.arange(start, start + num_rows)
    columns: dict[str, pa.Array] = {
        "session_id": pa.array(rows),
        "timestamp": pa.array(rows),
        "label": pa.array((rng.random(num_rows) < 0.3).astype(np.float32)),
    }
    for feature in schema.features:
        if feature.kind == "dense":
            columns[feature.name] = pa.array(rng.normal(size=num_rows).astype(np.float32))
        else:
            lengths = rng.integers(1, 2 * MEAN_LENGTH, num_rows)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = (rng.random(offsets[-1]) ** 4 * feature.num_rows).astype(np.int64)
            columns[feature.name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    return pa.table(columns, schema=schema.arrow_schema())


def hash_rows(batches: Iterable[Batch]) -> tuple[int, int]:
    """Number of rows and a hash of their contents; equal for the same rows in any order and any batches."""
    num_rows, total = 0, np.uint64(0)
    with np.errstate(over="ignore"):
        for batch in batches:
            size = len(batch)
            if not size:
                continue
            lengths_KB = batch.ids.lengths().numpy().reshape(-1, size)
            values = batch.ids.values().numpy().astype(np.uint64)
            places = np.concatenate([[0], np.cumsum(lengths_KB.reshape(-1))])
            sums = np.concatenate([[np.uint64(0)], np.cumsum(values * ODD)])
            per_list_KB = (sums[places[1:]] - sums[places[:-1]]).reshape(lengths_KB.shape)
            weights = np.arange(1, len(lengths_KB) + 1, dtype=np.uint64)[:, None] * ODD
            rows = (per_list_KB * weights).sum(axis=0, dtype=np.uint64)
            dense = batch.dense_BF.numpy().view(np.uint32).astype(np.uint64)
            rows += (dense * np.arange(3, 3 + dense.shape[1], dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
            rows += batch.label_B.numpy().view(np.uint32).astype(np.uint64)
            rows ^= rows >> np.uint64(29)
            total += (rows * ODD).sum(dtype=np.uint64)
            num_rows += size
    return num_rows, int(total)


def late_rate(counts: Iterable[int], *, seconds: float) -> float:
    """Rows per second in the last third of the time, from the rows of what arrives."""
    began, num_rows, counted_from = time.perf_counter(), 0, 0.0
    for count in counts:
        elapsed_s = time.perf_counter() - began
        if elapsed_s > 2 * seconds / 3:
            counted_from = counted_from or elapsed_s
            num_rows += count
        if elapsed_s >= seconds:
            break
    return num_rows / max(1e-9, time.perf_counter() - began - counted_from)
