"""Counts how often every row of a table is read, exactly and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kernels import count_rows
from recmill.artifacts import held_folder

COUNT_SCHEMA = pa.schema([pa.field("row", pa.int64()), pa.field("count", pa.int64())])
ROWS_PER_GROUP = 1 << 20
SPILL_MEMORY_BYTES = 1_000_000_000


class RowCounter:
    """Counts of one table in an array, for tables whose rows fit in memory."""

    def __init__(self, num_rows: int) -> None:
        self.counts = np.zeros(num_rows, np.int64)

    def add(self, ids: np.ndarray) -> None:
        count_rows(self.counts, np.ascontiguousarray(ids))

    def ranked(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows that were read and their counts, in pieces: most read first, ties by row.

        Count and row are sorted as one number, in place: 8 bytes per row that was read, where an argsort takes 24.
        """
        row_bits = len(self.counts).bit_length()
        most = int(self.counts.max(initial=0))
        rows = np.flatnonzero(self.counts)
        if row_bits + most.bit_length() > 63:
            order = np.argsort(-self.counts[rows], kind="stable")
            yield rows[order], self.counts[rows[order]]
            return
        for start in range(0, len(rows), ROWS_PER_GROUP):  # in place, so that no second array is made
            piece = rows[start : start + ROWS_PER_GROUP]
            piece |= (most - self.counts[piece]) << row_bits
        rows.sort()
        for start in range(0, len(rows), ROWS_PER_GROUP):
            piece = rows[start : start + ROWS_PER_GROUP]
            yield piece & ((1 << row_bits) - 1), most - (piece >> row_bits)


def write_counts(path: Path, batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write ranked counts as `counts/<table>.parquet`."""
    with pq.ParquetWriter(path, COUNT_SCHEMA, compression="zstd", use_dictionary=False) as writer:
        for rows, counts in batches:
            for start in range(0, len(rows), ROWS_PER_GROUP):
                chunk = slice(start, start + ROWS_PER_GROUP)
                writer.write_table(pa.table({"row": rows[chunk], "count": counts[chunk]}, schema=COUNT_SCHEMA))


def count_out_of_core(ids: Iterable[np.ndarray], *, spill_parent: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ranked counts, in pieces, of a table too large for an array."""
    schema = pa.schema([pa.field("row", pa.int64())])
    batches = (pa.record_batch([pa.array(own)], schema=schema) for own in ids)
    query = "SELECT row, count(*) AS count FROM log GROUP BY row ORDER BY count DESC, row"
    for batch in query_out_of_core(schema, batches, query, rows_per_batch=ROWS_PER_GROUP, spill_parent=spill_parent):
        yield batch.column(0).to_numpy(), batch.column(1).to_numpy()


def query_out_of_core(
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    query: str,
    *,
    rows_per_batch: int,
    spill_parent: Path | None = None,
) -> Iterator[pa.RecordBatch]:
    """The answer to a query over these batches as table `log`; DuckDB spills to disk what memory cannot hold."""
    from recmill.data.cluster.duckdb_engine import connect  # imports Ibis, which few profiles need

    with held_folder(purpose="spill", beside=spill_parent) as spill:
        connection: Any = connect(memory_limit_bytes=SPILL_MEMORY_BYTES, spill_folder=str(spill))
        try:
            connection.con.register("log", pa.RecordBatchReader.from_batches(schema, batches))
            yield from connection.con.sql(query).to_arrow_reader(rows_per_batch)
        finally:
            connection.disconnect()
