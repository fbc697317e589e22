"""Sorts rows in bounded memory: the stream is spilled to disk by key range, and each range is sorted in memory.

    unsorted rows        ->    one file per key range        ->    one after another: loaded, sorted, returned
    7 2 9 4 1 8 3              | 2 1 3 | 4 | 7 9 8 |                1 2 3 4 7 8 9

The edges of the ranges are estimates (quantiles); a range that is too large is divided again, by its own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recmill.data.memory_plan import give_back
from recmill.data.sources.lists import numbers_of, plain_column

RangeOf = Callable[[pa.RecordBatch], npt.NDArray[np.integer]]  # the range of each row of a batch
TOLERANCE = 1.25  # a range that exceeds its size by this factor is still sorted in memory
MAX_RANGES = 256  # each is an open file; ranges that are then too large are divided again
SPILL = pa.ipc.IpcWriteOptions(compression="lz4")


class RangeSort:
    """Sorts rows by `keys` with `range_bytes` of them in memory at a time, briefly twice as many."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: Sequence[str],
        range_bytes: int,
        batch_rows: int,
        end_reading: Callable[[], None] = give_back,
    ) -> None:
        """`end_reading` is called when a stream has been spilled, before its rows are loaded again."""
        self.folder, self.keys, self.range_bytes, self.batch_rows = folder, tuple(keys), range_bytes, batch_rows
        self.end_reading = end_reading
        self._numbers = count()

    def in_memory(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a stream that fits in memory, in order."""
        found = list(batches)
        if found:
            yield from self._hand_out(found)

    def on_disk(
        self, batches: Iterable[pa.RecordBatch], *, range_of: RangeOf, num_ranges: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a stream, in order, through files on disk."""
        found = self._spill(batches, range_of, num_ranges)
        self.end_reading()
        for spilled in found:
            yield from self._read(spilled)

    def _spill(self, batches: Iterable[pa.RecordBatch], range_of: RangeOf, num_ranges: int) -> list[_Spilled]:
        ranges = [_Spilled(self.folder / f"range-{next(self._numbers)}.arrow") for _ in range(num_ranges)]
        try:
            for batch in batches:
                ranges_R = range_of(batch)
                ordered = batch.take(plain_column(np.argsort(ranges_R, kind="stable")))
                starts = np.concatenate([[0], np.cumsum(np.bincount(ranges_R, minlength=num_ranges))]).tolist()
                for spilled, start, stop in zip(ranges, starts, starts[1:], strict=False):
                    if start < stop:
                        spilled.write(ordered.slice(start, stop - start))
        finally:
            for spilled in ranges:
                spilled.close()
        return [spilled for spilled in ranges if spilled.num_rows]

    def _read(self, spilled: _Spilled) -> Iterator[pa.RecordBatch]:
        if spilled.num_bytes <= TOLERANCE * self.range_bytes or spilled.num_rows == 1:
            batches = list(spilled.read())
            spilled.path.unlink()
            yield from self._hand_out(batches)
            return
        num_ranges = min(-(-spilled.num_bytes // self.range_bytes), MAX_RANGES)
        parts = self._spill(spilled.read(), self._equal_ranges(spilled, num_ranges), num_ranges)
        spilled.path.unlink()
        for part in parts:
            yield from self._read(part)

    def _equal_ranges(self, spilled: _Spilled, num_ranges: int) -> RangeOf:
        """Ranges with equal numbers of rows, by the keys that were spilled; rows of equal keys may be separated."""
        keys = [batch.select(list(self.keys)) for batch in spilled.read(self.keys)]
        order = _order(keys, self.keys)
        range_R = np.empty(len(order), np.int64)
        range_R[order] = np.arange(len(order)) * num_ranges // len(order)
        done = 0

        def range_of(batch: pa.RecordBatch) -> npt.NDArray[np.integer]:
            nonlocal done
            done += batch.num_rows
            return range_R[done - batch.num_rows : done]

        return range_of

    def _hand_out(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in order. Empties the list, so that two copies exist only briefly."""
        order = _order(batches, self.keys)
        table = pa.Table.from_batches(batches).combine_chunks()
        batches.clear()
        give_back()
        for start in range(0, len(order), self.batch_rows):
            yield from table.take(plain_column(order[start : start + self.batch_rows])).to_batches()


class _Spilled:
    """Rows in a file, unsorted."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_rows, self.num_bytes = path, 0, 0  # bytes in memory, not in the file
        self._writer: pa.RecordBatchStreamWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self.path), batch.schema, options=SPILL)
        self._writer.write_batch(batch)
        self.num_rows += batch.num_rows
        self.num_bytes += batch.nbytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def read(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(str(self.path)) as source:
            schema = pa.ipc.open_stream(source).schema
            fields = None if columns is None else [schema.get_field_index(name) for name in columns]
            source.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            yield from pa.ipc.open_stream(source, options=options)


def _order(batches: Sequence[pa.RecordBatch], keys: Sequence[str]) -> npt.NDArray[np.intp]:
    return np.lexsort([np.concatenate([numbers_of(batch.column(key)) for batch in batches]) for key in reversed(keys)])
