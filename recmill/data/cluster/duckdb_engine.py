"""Clusters a log with DuckDB in this process, spilling to disk beyond the memory limit."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import fsspec
import ibis
import numpy as np
import pyarrow as pa

from recmill.artifacts import is_remote
from recmill.data.cluster.query import ClusterPlan, log_rows, write_sorted
from recmill.data.cluster.range_sort import MAX_RANGES, RangeSort
from recmill.data.memory_plan import give_back
from recmill.data.storage.options import SORT_KEYS
from recmill.data.storage.writer import SPLIT_COLUMN, PartFormat

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


COMPILERS = "ibis.backends.sql.compilers"


def load_ibis_for_duckdb() -> None:
    """Keep Ibis from importing the SQL compilers of all its backends: 0.04 instead of 0.12 s of CPU time.

    Any other compiler that is asked for later loads them all, as Ibis does.
    """
    found = importlib.util.find_spec(COMPILERS) if COMPILERS not in sys.modules else None
    if found is None or found.loader is None:
        return
    package, loader = importlib.util.module_from_spec(found), found.loader

    def load_all(name: str) -> Any:
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = load_all  # type: ignore[method-assign]
    sys.modules[COMPILERS] = package
    package.DuckDBCompiler = importlib.import_module(f"{COMPILERS}.duckdb").DuckDBCompiler  # type: ignore[attr-defined]


def connect(*, memory_limit_bytes: int, spill_folder: str, row_bytes: int = 0) -> Any:
    """An Ibis connection to an in-memory DuckDB that works out of core, for rows of `row_bytes`."""
    affordable = memory_limit_bytes // max(BYTES_PER_THREAD, ROWS_PER_THREAD * row_bytes)
    threads = max(1, min(len(os.sched_getaffinity(0)), affordable))
    load_ibis_for_duckdb()
    connection = ibis.duckdb.connect(
        memory_limit=f"{memory_limit_bytes}B",
        temp_directory=spill_folder,
        threads=threads,
        preserve_insertion_order=False,
    )
    # Its progress bar would go to standard output, between the lines of a result.
    connection.con.execute("SET enable_progress_bar = false")
    return connection


class DuckDBEngine:
    """Runs `ClusterEngine` in this process."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.connection = connect(
            memory_limit_bytes=plan.memory.duckdb_bytes,
            spill_folder=str(plan.spill_folder),
            row_bytes=plan.log.row_bytes,
        )
        for setting, value in LEAN_SETTINGS.items():
            self.connection.con.execute(f"SET {setting} = {value!r}")
        if is_remote(plan.log.path):  # reading ahead is worth its memory there
            self.connection.con.execute("SET disable_parquet_prefetching = false")
            self.connection.con.register_filesystem(fsspec.core.url_to_fs(plan.log.path)[0])
        self._num_views = count()
        self.rows = log_rows(plan.log, self._open_files)

    def _open_files(self, paths: Sequence[str]) -> Any:
        view = f"log_{next(self._num_views)}"
        # Escaped twice: as SQL strings, and against being read as patterns.
        listed = ", ".join("'" + glob.escape(path).replace("'", "''") + "'" for path in paths)
        options = "union_by_name = true, hive_partitioning = false"
        self.connection.con.execute(f"CREATE TEMP VIEW {view} AS SELECT * FROM read_parquet([{listed}], {options})")
        return self.connection.table(view)

    def fetch_row(self, query: Any) -> tuple[Any, ...]:
        row: tuple[Any, ...] = self.connection.con.sql(self.connection.compile(query)).fetchall()[0]
        return row

    def fetch_table(self, query: Any, schema: pa.Schema) -> pa.Table:
        stored = self._stream(query)
        return pa.Table.from_batches([batch.select(schema.names).cast(schema) for batch in stored], schema=schema)

    def _stream(self, query: Any) -> Iterator[pa.RecordBatch]:
        """The rows of an Ibis query, in no particular order."""
        # Not ibis' to_pyarrow_batches, which calls fetch_record_batch: DuckDB 2 no longer has it. A relation, unlike
        # execute(), does not hold the whole result in memory.
        relation = self.connection.con.sql(self.connection.compile(query))
        yield from relation.to_arrow_reader(self.plan.memory.batch_rows)

    def write_parts(self, query: Any, *, split_names: Sequence[str], form: PartFormat) -> list[dict[str, Any]]:
        split = [SPLIT_COLUMN] if SPLIT_COLUMN in query.columns else []
        rows = self._sorted(query, [*split, *SORT_KEYS[self.plan.layout]], num_splits=len(split_names))
        return write_sorted(rows, self.plan, form, split_names, folder=str(self.plan.folder), prefix="part")

    def _sorted(self, query: Any, keys: list[str], *, num_splits: int) -> Iterator[pa.RecordBatch]:
        """The rows in the order of their keys.

        DuckDB does not sort them: when it merges, its sort needs memory for all wide rows at once (758 MB for 600 MB of
        rows of 3 kB) and fails with less.
        """
        memory, log = self.plan.memory, self.plan.log
        self._give_back()  # what choosing encodings took: 60 MB of a limit of 250
        rows = self._stream(query)
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
        edges = self._find_edges(query, keys[-2], num_splits)

        def range_of(batch: pa.RecordBatch) -> np.ndarray:
            ranges: np.ndarray = np.searchsorted(edges, batch.column(keys[-2]).to_numpy(), side="right")
            if num_splits > 1:
                ranges += (len(edges) + 1) * batch.column(SPLIT_COLUMN).to_numpy()
            return ranges

        yield from sort.on_disk(rows, range_of=range_of, num_ranges=num_splits * (len(edges) + 1))

    def _find_edges(self, query: Any, key: str, num_splits: int) -> np.ndarray:
        """Keys between which lie at most about as many rows as fit in memory, the same keys for every split."""
        log = self.plan.log
        wanted = -(-log.num_rows * log.row_bytes // self.plan.memory.range_bytes)
        num_ranges = min(wanted, MAX_RANGES // num_splits)
        if num_ranges < 2:
            return np.empty(0, np.int64)
        shares = [number / num_ranges for number in range(1, num_ranges)]
        rows = self.connection.con.sql(self.connection.compile(query.select(key=query[key])))
        edges = rows.aggregate(f"approx_quantile(key, {shares})").fetchall()[0][0]
        return np.unique(np.array(edges, np.int64))

    def _give_back(self) -> None:
        """Make DuckDB's allocator return the memory it keeps: it does so when its limit falls."""
        for limit_bytes in (IDLE_BYTES, self.plan.memory.duckdb_bytes):
            self.connection.con.execute(f"SET memory_limit = '{limit_bytes}B'")
        give_back()

    def close(self) -> None:
        self.connection.disconnect()
