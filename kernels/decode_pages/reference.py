"""What a row group holds is what Arrow reads from it."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq


def read_columns(
    data: bytes | pa.Buffer, start: int, metadata: pq.FileMetaData, index: int, leaves: Sequence[int]
) -> pa.Table:
    """The columns with these leaves; `data` are the file's bytes from `start` on, as far as they reach."""
    reader = pq.core.ParquetReader()
    # ParquetFile would look up all columns by name again, a tenth of the time of a small row group.
    reader.open(_window(data, start), metadata=metadata, pre_buffer=False, arrow_extensions_enabled=True)
    return reader.read_row_group(index, column_indices=list(leaves), use_threads=False)


def _window(data: bytes | pa.Buffer, start: int) -> pa.BufferReader:
    """The file that Arrow sees: it has the bytes of one row group, at their place, and no others.

    A buffer that begins where byte 0 of the file would lie if all of it were in memory. Arrow reads whole column
    chunks, all of which lie within `data`, so what is before it is never touched. A file object in Python would do the
    same, but every seek and read of a column takes the GIL.
    """
    buffer = pa.py_buffer(data)
    return pa.BufferReader(pa.foreign_buffer(buffer.address - start, start + buffer.size, base=buffer))
