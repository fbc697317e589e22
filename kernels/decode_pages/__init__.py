"""A row group of a Parquet file as an Arrow table, decoded in one call that holds no GIL.

For what tables of features are made of: numbers, booleans and lists of them, without missing values, plain, by
dictionary, by differences or with bytes split, zstd or not compressed. Whatever else a row group holds, Arrow reads:
strings, columns with missing values, and those in which something is wrong.

Shape suffixes: C = columns, X = what the kernel is told of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kernels import _cpu
from kernels.decode_pages import reference

BACKENDS = ("reference", "cpu")
ENCODINGS = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"}
# How a value is stored, its bytes there and in memory; 0 for bits.
NUMBERS: dict[pa.DataType, tuple[str, int, int]] = {
    pa.bool_(): ("BOOLEAN", 0, 0),
    pa.float32(): ("FLOAT", 4, 4),
    pa.float64(): ("DOUBLE", 8, 8),
    pa.int64(): ("INT64", 8, 8),
    pa.uint64(): ("INT64", 8, 8),
    **{kind: ("INT32", 4, kind.bit_width // 8) for kind in (pa.int8(), pa.int16(), pa.int32())},
    **{kind: ("INT32", 4, kind.bit_width // 8) for kind in (pa.uint8(), pa.uint16(), pa.uint32())},
}


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where the columns of a row group lie that the kernel decodes."""

    positions: list[int]  # among the columns that are wanted
    columns_CX: npt.NDArray[np.int64]  # as struct Column in cpu.cpp; addresses count from the start of its memory
    places: list[tuple[int, int, int]]  # where offsets begin in a column's memory, their bytes, and rows


class GroupDecoder:
    """Decodes row groups of one file, the columns with the given leaves. Threads may share it."""

    def __init__(
        self,
        metadata: pq.FileMetaData,
        leaves: Sequence[int],
        *,
        keeps_lists: bool = False,
        kernel: str | None = None,
    ) -> None:
        """With `keeps_lists` all lists of a row group lie in one piece of memory, for callers that keep all or none."""
        if kernel not in (None, *BACKENDS):
            raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
        self._metadata, self._leaves, self._is_reference = metadata, list(leaves), kernel == "reference"
        self._names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in leaves]
        stored = metadata.schema.to_arrow_schema()
        self._schema = pa.schema([stored.field(name) for name in self._names], metadata=stored.metadata)
        self._keeps_lists = keeps_lists
        self._types = [field.type for field in self._schema]
        self._for_arrow: set[int] = set()  # positions of columns that the kernel refused
        self._layouts: dict[int, _Layout] = {}  # a row group is decoded every epoch

    def decode(self, data: bytes | pa.Buffer, start: int, index: int) -> pa.Table:
        """Row group `index`; `data` are the file's bytes from `start` on, as far as its columns reach."""
        if self._is_reference:
            return reference.read_columns(data, start, self._metadata, index, self._leaves)
        if index not in self._layouts:
            self._layouts[index] = self._describe(index)
        arrays = self._decode_pages(pa.py_buffer(data), start, self._layouts[index])
        missing = [position for position in range(len(self._leaves)) if position not in arrays]
        if missing:
            leaves = [self._leaves[position] for position in missing]
            table = reference.read_columns(data, start, self._metadata, index, leaves)
            arrays |= {position: table.column(self._names[position]) for position in missing}
        return pa.Table.from_arrays([arrays[position] for position in range(len(arrays))], schema=self._schema)

    def _decode_pages(self, data: pa.Buffer, start: int, layout: _Layout) -> dict[int, Any]:
        """The columns that the kernel could decode."""
        columns_CX = layout.columns_CX.copy()
        columns_CX[:, 0] -= start
        held = self._allocate(layout)
        columns_CX[:, -2:] += np.array([memory.address for memory in held], dtype=np.int64)[:, None]
        counts_C = np.empty(len(columns_CX), np.int64)
        _cpu.decode_pages(data.address, data.size, columns_CX.ctypes.data, len(columns_CX), counts_C.ctypes.data)
        arrays = {}
        for position, count, memory, place in zip(
            layout.positions, counts_C.tolist(), held, layout.places, strict=True
        ):
            if count < 0:
                self._for_arrow.add(position)
                self._layouts = {}
            else:
                arrays[position] = _array(self._types[position], count, memory, *place)
        return arrays

    def _allocate(self, layout: _Layout) -> list[pa.Buffer]:
        """Memory for each column. Every allocation gives the GIL away, to get it back when another thread lets go."""
        if not self._keeps_lists:
            return [pa.allocate_buffer(offsets_at + offsets_bytes) for offsets_at, offsets_bytes, _ in layout.places]
        ends = {True: 0, False: 0}  # of lists, and of the other columns
        begins = []
        for offsets_at, offsets_bytes, _ in layout.places:
            begins.append(ends[offsets_bytes > 0])
            ends[offsets_bytes > 0] += offsets_at + _aligned(offsets_bytes)
        pieces = {is_list: pa.allocate_buffer(end) for is_list, end in ends.items()}
        return [
            pieces[offsets_bytes > 0].slice(begin, offsets_at + offsets_bytes)
            for begin, (offsets_at, offsets_bytes, _) in zip(begins, layout.places, strict=True)
        ]

    def _describe(self, index: int) -> _Layout:
        row_group, found = self._metadata.row_group(index), {}
        for position, (leaf, field) in enumerate(zip(self._leaves, self._schema, strict=True)):
            column = _describe_column(self._metadata.schema.column(leaf), row_group.column(leaf), field)
            if column is not None and position not in self._for_arrow:
                chunk = row_group.column(leaf)
                place = (first_page(chunk), chunk.total_compressed_size, chunk.num_values, row_group.num_rows)
                found[position] = (*place, *column, chunk.compression != "UNCOMPRESSED", 0, 0)
        columns_CX = np.array(list(found.values()), dtype=np.int64).reshape(len(found), 12)
        places = []
        for _, _, num_levels, num_rows, _, item_bytes, _, _, is_list, *_ in columns_CX.tolist():
            values_bytes = num_levels * item_bytes if item_bytes else (num_levels + 7) // 8
            places.append((_aligned(values_bytes), 4 * (num_rows + 1) if is_list else 0, num_rows))
        columns_CX[:, -1] = [offsets_at for offsets_at, _, _ in places]
        return _Layout(positions=list(found), columns_CX=columns_CX, places=places)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def first_page(chunk: Any) -> int:
    """Where Arrow begins to read a column chunk."""
    pages = (chunk.data_page_offset, chunk.dictionary_page_offset)
    return min(int(page) for page in pages if page is not None)


def _describe_column(stored: Any, chunk: Any, field: pa.Field) -> tuple[int, int, int, int, bool] | None:
    """Bytes stored and in memory, level of a value and of an empty list, whether it is a list; None: Arrow reads it."""
    is_list = pa.types.is_list(field.type)
    values = field.type.value_field if is_list else field
    physical_type, *sizes = NUMBERS.get(values.type, ("", 0, 0))
    empty = int(field.nullable) if is_list else 0
    most = empty + is_list + int(values.nullable)
    is_known = (
        chunk.physical_type == physical_type
        and (stored.max_definition_level, stored.max_repetition_level) == (most, int(is_list))
        and set(chunk.encodings) <= ENCODINGS
        and ("DELTA_BINARY_PACKED" not in chunk.encodings or physical_type in ("INT32", "INT64"))
        and (chunk.compression == "UNCOMPRESSED" or (chunk.compression == "ZSTD" and _cpu.has_zstd()))
    )
    return (sizes[0], sizes[1], most, empty, is_list) if is_known else None


def _array(
    kind: pa.DataType, count: int, memory: pa.Buffer, offsets_at: int, offsets_bytes: int, num_rows: int
) -> pa.Array:
    if not offsets_bytes:
        return pa.Array.from_buffers(kind, count, [None, memory], null_count=0)
    items = pa.Array.from_buffers(kind.value_type, count, [None, memory], null_count=0)
    lists = [None, memory.slice(offsets_at, offsets_bytes)]
    return pa.Array.from_buffers(kind, num_rows, lists, null_count=0, children=[items])
