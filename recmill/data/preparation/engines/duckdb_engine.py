"""Prepares a log with DuckDB in this process, out of core.

sources -> codes, sorted by user and time (DuckDB) -> samples of whole users (numpy) -> spilled by time
        -> each range of time: sorted, histories copied out of their users' events, written
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import ibis
import numpy as np
import pyarrow as pa

from recmill.artifacts import InputError
from recmill.data.cluster.duckdb_engine import IDLE_BYTES, LEAN_SETTINGS, connect
from recmill.data.cluster.range_sort import MAX_RANGES, RangeSort
from recmill.data.inspection.columns import literal
from recmill.data.inspection.reading import explain_errors, scan
from recmill.data.memory_plan import give_back
from recmill.data.preparation.engines.blocks import cut_blocks
from recmill.data.preparation.queries.recipe import Recipe
from recmill.data.preparation.queries.tables import cast_of, sql_function
from recmill.data.preparation.samples.attributes import Column
from recmill.data.preparation.samples.blocks import SamplePlan, Samples, list_columns, make_samples
from recmill.data.preparation.samples.summary import SessionStarts
from recmill.data.preparation.sources import SourceFiles
from recmill.data.sources.lists import numbers_of, plain_column
from recmill.data.sources.log_writer import ROWS_PER_GROUP
from recmill.progress import Progress

BATCH_ROWS = 131_072
# Shares of the memory limit. DuckDB is done when the ranges are sorted.
DUCKDB_SHARE = 0.4
BLOCK_SHARE = 0.25
RANGE_SHARE = 0.1
# Bytes that making samples takes per event and column, and per sample and column (measured: 10 and 20).
EVENT_BYTES, SAMPLE_BYTES = 24, 40
MAX_BLOCK_EVENTS = 1_000_000
MIN_BLOCK_EVENTS = 5_000


_epoch_ms = sql_function("epoch_ms", "timestamp", returns="int64")


class DuckDBQueries:
    """Runs queries, and makes the rows of a log from them."""

    def __init__(self, scratch: Path, *, memory_limit_bytes: int) -> None:
        self.scratch, self.memory_limit_bytes = scratch, memory_limit_bytes
        self.duckdb_bytes = int(DUCKDB_SHARE * memory_limit_bytes)
        self.connection = connect(memory_limit_bytes=self.duckdb_bytes, spill_folder=str(scratch / "spill"))
        for setting, value in {**LEAN_SETTINGS, "TimeZone": "UTC"}.items():
            self.connection.con.execute(f"SET {setting} = {value!r}")
        self._numbers = count()
        self._opened: list[SourceFiles] = []

    def open(self, source: SourceFiles) -> Any:
        self._opened.append(source)
        name = f"source_{next(self._numbers)}"
        with explain_errors(source):
            try:
                self._create_view(name, source)
            except duckdb.ConversionException:  # a column of numbers has a text below the rows that were guessed from
                if source.format != "csv":
                    raise
                self._create_view(name, replace(source, options={**source.options, "all_rows": True}))
        return self.connection.table(name)

    def _create_view(self, name: str, source: SourceFiles) -> None:
        con = self.connection.con
        files = scan(con, source, [glob.escape(file) for file in source.files])
        con.execute(f"CREATE OR REPLACE TEMP VIEW {name}_files AS SELECT * FROM {files}")
        columns = con.execute(f"DESCRIBE {name}_files").fetchall()
        casts = [_converted(column, kind) for column, kind, *_ in columns]
        query = f"SELECT {', '.join(casts)} FROM {name}_files"
        if source.is_text:
            stored = str(self.scratch / f"{name}.parquet")
            con.execute(f"COPY ({query}) TO {literal(stored)} (FORMAT parquet, COMPRESSION lz4_raw)")
            query = f"SELECT * FROM read_parquet({literal(stored)})"
        con.execute(f"CREATE TEMP VIEW {name} AS {query}")

    def milliseconds(self, column: Any) -> Any:
        return _epoch_ms(column)

    def hex_number(self, column: Any) -> Any:
        return (ibis.literal("0x") + column).cast("int64")

    def fetch(self, query: Any) -> pa.Table:
        reader = self._stream(query)
        return pa.Table.from_batches(list(reader), schema=reader.schema)

    def keep(self, query: Any) -> Any:
        name = f"kept_{next(self._numbers)}"
        with self._explained():
            self.connection.con.execute(f"CREATE TEMP TABLE {name} AS {self.connection.compile(query)}")
        return self.connection.table(name)

    def _stream(self, query: Any) -> pa.RecordBatchReader:
        with self._explained():
            return self.connection.con.sql(self.connection.compile(query)).to_arrow_reader(BATCH_ROWS)

    def make_rows(self, recipe: Recipe, starts: SessionStarts, progress: Progress) -> Iterator[pa.RecordBatch]:
        """The rows of the log in time order; the start of every session goes to `starts`."""
        plan, num_events = recipe.plan, recipe.events.num_events
        histories = _HistoryFiles(self.scratch, plan)
        row_bytes = 8 * (len(plan.schema.columns) + 2 * len(plan.windows))
        per_event = 1 + (plan.per_positive if plan.drawing is not None else 0)
        range_bytes = int(RANGE_SHARE * self.memory_limit_bytes)
        sort = RangeSort(
            self.scratch,
            keys=("timestamp", "session_id"),
            range_bytes=range_bytes,
            batch_rows=ROWS_PER_GROUP,
            end_reading=self._give_back,
        )
        done = 0

        def samples() -> Iterator[pa.RecordBatch]:
            nonlocal done
            block_bytes = len(recipe.query.columns) * EVENT_BYTES + len(plan.schema.columns) * SAMPLE_BYTES * per_event
            block_events = int(BLOCK_SHARE * self.memory_limit_bytes / block_bytes)
            for block in self._blocks(recipe.query, min(max(block_events, MIN_BLOCK_EVENTS), MAX_BLOCK_EVENTS)):
                found = make_samples(block, plan)
                starts.add(found)
                yield histories.store(found)
                done += len(block["user"])
                progress("make samples", done, num_events)

        total_bytes = num_events * per_event * row_bytes
        if total_bytes <= range_bytes:
            rows = sort.in_memory(samples())
        else:
            edges = self._edges(recipe, min(-(-total_bytes // range_bytes), MAX_RANGES))
            rows = sort.on_disk(samples(), range_of=lambda batch: _range(batch, edges), num_ranges=len(edges) + 1)
        written = 0
        for batch in rows:
            yield histories.read(batch)
            written += batch.num_rows
            progress("write the log", written, starts.num_samples)

    def _blocks(self, query: Any, block_events: int) -> Iterator[dict[str, Column]]:
        with self._explained():
            yield from cut_blocks(self._stream(query.order_by(["user", "time"])), block_events)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises what DuckDB says about values that it cannot convert, and files that it cannot read, as InputError."""
        try:
            yield
        except (duckdb.ConversionException, duckdb.InvalidInputException, duckdb.OutOfRangeException) as error:
            raise InputError(f"a value cannot be converted ({_first_line(error)})") from None
        except duckdb.OutOfMemoryException as error:
            raise InputError(f"too little memory ({_first_line(error)}); raise --memory-limit") from None
        except duckdb.Error:
            self._refuse_damage()
            raise

    def _refuse_damage(self) -> None:
        """Raise an InputError with the first Parquet file that cannot be read: DuckDB's errors often name none."""
        for source in self._opened:
            for file in source.files if source.format == "parquet" else ():
                with explain_errors(replace(source, path=file)):
                    rows = scan(self.connection.con, source, [glob.escape(file)])
                    self.connection.con.execute(f"SELECT sum(hash(COLUMNS(*))) FROM {rows}").fetchall()

    def _edges(self, recipe: Recipe, num_ranges: int) -> np.ndarray:
        """Times between which lie about equally many events."""
        shares = [number / num_ranges for number in range(1, num_ranges)]
        if not shares:
            return np.empty(0, np.int64)
        rows = recipe.events.rows
        times = self.connection.con.sql(self.connection.compile(rows.select(time=rows.time)))
        return np.unique(np.array(times.aggregate(f"approx_quantile(time, {shares})").fetchall()[0][0], np.int64))

    def _give_back(self) -> None:
        for limit_bytes in (IDLE_BYTES, self.duckdb_bytes):
            try:
                self.connection.con.execute(f"SET memory_limit = '{limit_bytes}B'")
            except duckdb.Error:  # kept tables are in use
                continue
        give_back()

    def close(self) -> None:
        self.connection.disconnect()


class _HistoryFiles:
    """Users' events, one flat file per history: samples hold windows into them until they are written."""

    def __init__(self, folder: Path, plan: SamplePlan) -> None:
        self.plan = plan
        self.names = [feature.name for feature in plan.features if feature.window]
        self.paths = {name: folder / f"history-{number}.bin" for number, name in enumerate(self.names)}
        self.files = {name: path.open("wb") for name, path in self.paths.items()}
        self.num_values = dict.fromkeys(plan.windows, 0)
        self.mapped: dict[str, np.ndarray] = {}

    def store(self, samples: Samples) -> pa.RecordBatch:
        """The samples with their windows, and their events appended to the files."""
        columns: dict[str, np.ndarray] = dict(samples.columns)
        for window in self.plan.windows:
            columns[f"start of {window}"] = samples.starts[window] + self.num_values[window]
            columns[f"length of {window}"] = samples.lengths[window]
        for feature in self.plan.features:
            if feature.window:
                self.files[feature.name].write(samples.histories[feature.name].tobytes())
        for window in self.plan.windows:
            reader = next(feature.name for feature in self.plan.features if feature.window == window)
            self.num_values[window] += len(samples.histories[reader])
        return pa.RecordBatch.from_arrays([plain_column(own) for own in columns.values()], names=list(columns))

    def read(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.mapped:
            for name, file in self.files.items():
                file.close()
                is_empty = self.paths[name].stat().st_size == 0
                self.mapped[name] = np.zeros(0, np.int64) if is_empty else np.memmap(self.paths[name], np.int64, "r")
        columns = {name: numbers_of(batch.column(name)) for name in batch.schema.names}
        windows = {own: (columns[f"start of {own}"], columns[f"length of {own}"]) for own in self.plan.windows}
        return list_columns(columns, windows, self.mapped, self.plan)


def _range(batch: pa.RecordBatch, edges: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.searchsorted(edges, numbers_of(batch.column("timestamp")), side="right")
    return found


def _converted(column: str, kind: str) -> str:
    """DuckDB's expression for a column of SQL type `kind` as it is read."""
    name = '"' + column.replace('"', '""') + '"'
    if kind == "TIMESTAMP WITH TIME ZONE":  # a cast would be left to the CSV reader, which ignores offsets
        return f"make_timestamp(epoch_us({name})) AS {name}"
    cast = cast_of(kind)
    return f"CAST({name} AS {cast}) AS {name}" if cast else name


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
