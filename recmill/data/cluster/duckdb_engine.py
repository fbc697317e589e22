"""Clusters a log with DuckDB in this process, spilling to disk beyond the memory limit."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import fsspec
import ibis
import numpy as np
import pyarrow as pa

from recmill.artifacts import InputError, is_remote
from recmill.data.cluster.query import ClusterPlan, canonical_rows
from recmill.data.cluster.range_sort import MAX_RANGES, RangeSort
from recmill.data.log import RawLog
from recmill.data.memory_plan import give_back
from recmill.data.storage.options import SORT_KEYS
from recmill.data.storage.writer import SPLIT_COLUMN, PartFormat, PartWriter, cut_row_groups

# With less memory per thread, sorting rows with lists fails instead of spilling (measured: 100 MB suffice for one
# thread and not for two).
BYTES_PER_THREAD = 100_000_000
# It also fails with memory for fewer rows per thread: 230 MB are too few for two threads and rows of 3 kB.
ROWS_PER_THREAD = 65_536

# By default DuckDB reads all columns of a row group ahead and caches them: twice 44 MB where 44 MB suffice.
LEAN_SETTINGS = {
    "disable_parquet_prefetching": "true",
    "enable_external_file_cache": "false",
    "streaming_buffer_size": "1MB",
    "allocator_flush_threshold": "1MB",
}
IDLE_BYTES = 8_000_000


def connect(*, memory_limit_bytes: int, spill_folder: str, row_bytes: int = 0) -> Any:
    """An Ibis connection to an in-memory DuckDB that works out of core, for rows of `row_bytes`."""
    affordable = memory_limit_bytes // max(BYTES_PER_THREAD, ROWS_PER_THREAD * row_bytes)
    threads = max(1, min(len(os.sched_getaffinity(0)), affordable))
    connection = ibis.duckdb.connect(
        memory_limit=f"{memory_limit_bytes}B",
        temp_directory=spill_folder,
        threads=threads,
        preserve_insertion_order=False,
    )
    # Its progress bar would go to standard output, between the lines of a result.
    connection.con.execute("SET enable_progress_bar = false")
    return connection


def stream(connection: Any, query: Any, *, batch_rows: int = 32_768) -> Iterator[pa.RecordBatch]:
    """The rows of an Ibis query, in no particular order."""
    # Not ibis' to_pyarrow_batches, which calls fetch_record_batch: DuckDB 2 no longer has it. A relation, unlike
    # execute(), does not hold the whole result in memory.
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
        # Escaped twice: as SQL strings, and against being read as patterns.
        listed = ", ".join("'" + glob.escape(path).replace("'", "''") + "'" for path in paths)
        options = "union_by_name = true, hive_partitioning = false"
        connection.con.execute(f"CREATE TEMP VIEW log_{number} AS SELECT * FROM read_parquet([{listed}], {options})")
        found = dict(zip(log.schema.columns, types, strict=True))
        tables.append(canonical_rows(connection.table(f"log_{number}"), log.schema, found))
    return ibis.union(*tables) if len(tables) > 1 else tables[0]


@contextmanager
def explain_duckdb_errors(memory_limit_bytes: int, out: str) -> Iterator[None]:
    """Raise InputError when memory or disk space does not suffice."""
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
    """Runs `ClusterEngine` in this process."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        with explain_duckdb_errors(plan.memory_limit_bytes, plan.out):
            self.connection = connect(
                memory_limit_bytes=plan.memory.duckdb_bytes,
                spill_folder=str(plan.spill_folder),
                row_bytes=plan.log.row_bytes,
            )
            for setting, value in LEAN_SETTINGS.items():
                self.connection.con.execute(f"SET {setting} = {value!r}")
            if is_remote(plan.log.path):  # reading ahead is worth its memory there
                self.connection.con.execute("SET disable_parquet_prefetching = false")
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
        """The rows in the order of their keys.

        DuckDB does not sort them: when it merges, its sort needs memory for all wide rows at once (758 MB for 600 MB of
        rows of 3 kB) and fails with less.
        """
        memory, log = self.plan.memory, self.plan.log
        rows = stream(self.connection, query, batch_rows=memory.batch_rows)
        sort = RangeSort(
            self.plan.spill_folder,
            keys=keys,
            range_bytes=memory.range_bytes,
            batch_rows=memory.batch_rows,
            end_reading=self._give_back,
        )
        if log.num_rows * log.row_bytes <= memory.range_bytes:
            yield from sort.in_memory(rows)
            return
        edges = self._find_edges(query, keys, num_splits)
        firsts = np.cumsum([0, *(len(own) + 1 for own in edges)])  # the range with the lowest keys of each split

        def range_of(batch: pa.RecordBatch) -> np.ndarray:
            key = batch.column(keys[-2]).to_numpy()
            split = batch.column(SPLIT_COLUMN).to_numpy() if num_splits > 1 else np.zeros(len(key), np.int32)
            ranges: np.ndarray = firsts[split]
            for number, own in enumerate(edges):
                ranges[split == number] += np.searchsorted(own, key[split == number], side="right")
            return ranges

        yield from sort.on_disk(rows, range_of=range_of, num_ranges=int(firsts[-1]))

    def _find_edges(self, query: Any, keys: list[str], num_splits: int) -> list[np.ndarray]:
        """For each split, keys between which lie about as many rows as fit in memory."""
        found, log = [], self.plan.log
        for number in range(num_splits):
            own = query.filter(query[SPLIT_COLUMN] == number) if num_splits > 1 else query
            key = own[keys[-2]]
            num_rows = self.fetch_row(own.count().as_table())[0]
            wanted = -(-num_rows * log.row_bytes // self.plan.memory.range_bytes)
            num_ranges = min(wanted, MAX_RANGES // num_splits)
            shares = [number / num_ranges for number in range(1, num_ranges)]
            if not shares:
                found.append(np.empty(0, np.int64))
                continue
            rows = self.connection.con.sql(self.connection.compile(own.select(key=key)))
            edges = rows.aggregate(f"approx_quantile(key, {shares})").fetchall()[0][0]
            found.append(np.unique(np.array(edges, np.int64)))
        return found

    def _give_back(self) -> None:
        """Make DuckDB's allocator return the memory it keeps: it does so when its limit falls."""
        for limit_bytes in (IDLE_BYTES, self.plan.memory.duckdb_bytes):
            self.connection.con.execute(f"SET memory_limit = '{limit_bytes}B'")
        give_back()

    def close(self) -> None:
        self.connection.disconnect()
