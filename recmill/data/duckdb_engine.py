"""Clusters a log with DuckDB in this process, spilling to disk beyond the memory limit."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import duckdb
import fsspec
import ibis
import pyarrow as pa

from recmill.artifacts import InputError, is_remote
from recmill.data.cluster_query import ClusterPlan, canonical_rows
from recmill.data.log import RawLog
from recmill.data.parquet_writer import SORT_KEYS, SPLIT_COLUMN, PartFormat, PartWriter, cut_row_groups

# Below this much memory a thread, a sort of rows with lists fails instead of spilling (measured: 100 MB works with one
# thread and not with two).
MEMORY_BYTES_A_THREAD = 100_000_000
# And so does one of this many rows a thread: 230 MB are too few for two threads and rows of 3 kB.
ROWS_A_THREAD = 65_536
# A pass sorts as many rows as take this share of DuckDB's memory, one in three; more passes than that are refused.
PASS_FACTOR = 3
MAX_PASSES = 64


def connect(*, memory_limit_bytes: int, spill_folder: str, row_bytes: int = 0) -> Any:
    """An Ibis connection to a DuckDB in memory that works out of core; `row_bytes` of the rows it will sort."""
    affordable = memory_limit_bytes // max(MEMORY_BYTES_A_THREAD, ROWS_A_THREAD * row_bytes)
    threads = max(1, min(len(os.sched_getaffinity(0)), affordable))
    return ibis.duckdb.connect(
        memory_limit=f"{memory_limit_bytes}B",
        temp_directory=spill_folder,
        threads=threads,
        preserve_insertion_order=False,
    )


def stream(connection: Any, query: Any, *, batch_rows: int = 32_768) -> Iterator[pa.RecordBatch]:
    """The rows of an Ibis query, as they come."""
    # Not through ibis' to_pyarrow_batches: it calls fetch_record_batch, which DuckDB 2 has no more; and a relation,
    # other than execute(), does not hold the whole result in memory.
    yield from connection.con.sql(connection.compile(query)).to_arrow_reader(batch_rows)


def register_log(connection: Any, log: RawLog) -> Any:
    """The canonical rows of the log as an Ibis table."""
    if is_remote(log.path):
        connection.con.register_filesystem(fsspec.core.url_to_fs(log.path)[0])
    by_types: dict[tuple[Any, ...], list[str]] = {}
    for file in log.files:
        by_types.setdefault(file.types, []).append(file.path)
    tables = []
    for number, (types, paths) in enumerate(by_types.items()):
        # Quoted twice: as SQL strings, and against being read as patterns.
        listed = ", ".join("'" + glob.escape(path).replace("'", "''") + "'" for path in paths)
        options = "union_by_name = true, hive_partitioning = false"
        connection.con.execute(f"CREATE TEMP VIEW log_{number} AS SELECT * FROM read_parquet([{listed}], {options})")
        found = dict(zip(log.schema.columns, types, strict=True))
        tables.append(canonical_rows(connection.table(f"log_{number}"), log.schema, found))
    return ibis.union(*tables) if len(tables) > 1 else tables[0]


@contextmanager
def explain_duckdb_errors(memory_limit_bytes: int, out: str) -> Iterator[None]:
    """Say in one sentence that memory or disk did not suffice."""
    try:
        yield
    except (duckdb.Error, OSError) as error:  # an error inside an Arrow stream arrives as OSError
        text = str(error)
        if "No space left" in text or "max_temp_directory_size" in text:
            raise InputError(f"{out}: cannot be written: the disk is full") from error
        if "Out of Memory" in text:
            raise InputError(
                f"{memory_limit_bytes:,} bytes of memory are too few for this log; raise --memory-limit"
            ) from error
        raise


class DuckDBEngine:
    """See `cluster.Engine`."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        with explain_duckdb_errors(plan.memory_limit_bytes, plan.out):
            self.connection = connect(
                memory_limit_bytes=plan.memory.sort_bytes,
                spill_folder=str(plan.spill_folder),
                row_bytes=plan.log.row_bytes,
            )
            self.rows = register_log(self.connection, plan.log)

    def fetch_row(self, query: Any) -> tuple[Any, ...]:
        with explain_duckdb_errors(self.plan.memory_limit_bytes, self.plan.out):
            row: tuple[Any, ...] = self.connection.con.sql(self.connection.compile(query)).fetchall()[0]
            return row

    def fetch_table(self, query: Any, schema: pa.Schema) -> pa.Table:
        with explain_duckdb_errors(self.plan.memory_limit_bytes, self.plan.out):
            stored = stream(self.connection, query, batch_rows=self.plan.memory.batch_rows)
            batches = [batch.select(schema.names).cast(schema) for batch in stored]
            return pa.Table.from_batches(batches, schema=schema)

    def write_parts(self, query: Any, *, split_names: Sequence[str], form: PartFormat) -> list[dict[str, Any]]:
        plan = self.plan
        writer = PartWriter(
            folder=str(plan.folder),
            prefix="part",
            form=form,
            split_names=split_names,
            rows_per_part=plan.rows_per_part,
        )
        split = [SPLIT_COLUMN] if SPLIT_COLUMN in query.columns else []
        done = 0
        with explain_duckdb_errors(plan.memory_limit_bytes, plan.out):
            batches = self._sorted(query, [*split, *SORT_KEYS[plan.layout]], num_splits=len(split_names))
            for group in cut_row_groups(
                batches, schema=plan.arrow_schema, layout=plan.layout, rows_per_group=plan.rows_per_group
            ):
                writer.write(group)
                done += group.rows.num_rows
                plan.progress("write the dataset", done, plan.log.num_rows)
        return writer.close()

    def _sorted(self, query: Any, keys: list[str], *, num_splits: int) -> Iterator[pa.RecordBatch]:
        """The rows by their keys; in several passes over the log where DuckDB cannot sort them all at once.

        DuckDB's merge of wide rows needs memory for all of them at once: 600 MB of rows of 3 kB fail in 320 MB. A range
        of the rows that fits is sorted without a merge.
        """
        plan = self.plan
        batches = stream(self.connection, query.order_by(*keys), batch_rows=plan.memory.batch_rows)
        try:
            first = next(batches, None)
        except duckdb.OutOfMemoryException:
            num_passes = -(-PASS_FACTOR * plan.log.num_rows * plan.log.row_bytes // plan.memory.sort_bytes)
            if num_passes > MAX_PASSES:
                raise
        else:
            yield from () if first is None else (first,)
            yield from batches
            return
        for part in key_ranges(self.connection, query, keys, num_passes, num_splits):
            yield from stream(self.connection, part.order_by(*keys), batch_rows=plan.memory.batch_rows)

    def close(self) -> None:
        self.connection.disconnect()


def key_ranges(connection: Any, query: Any, keys: list[str], count: int, num_splits: int) -> Iterator[Any]:
    """The rows of each split in `count` ranges of the key that they are sorted by."""
    is_split = keys[0] == SPLIT_COLUMN
    shares = [number / count for number in range(1, count)] or [0.5]
    for number in range(num_splits):
        own = query.filter(query[SPLIT_COLUMN] == number) if is_split else query
        key = own[keys[1] if is_split else keys[0]]
        rows = connection.con.sql(connection.compile(own.select(key=key)))
        edges = rows.aggregate(f"approx_quantile(key, {shares})").fetchall()
        inner = sorted(set(edges[0][0] or []))
        if not inner:
            continue
        yield own.filter(key < inner[0])
        for low, high in pairwise(inner):
            yield own.filter((key >= low) & (key < high))
        yield own.filter(key >= inner[-1])
