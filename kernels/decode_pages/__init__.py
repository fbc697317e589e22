"""A row group of a Parquet file as an Arrow table, decoded in one call that does not hold the GIL.

Decodes what tables of features consist of: numbers, booleans and lists of them without missing values, in the encodings
plain, dictionary, delta and byte stream split, compressed with zstd or uncompressed. Arrow reads all other columns:
strings, columns with missing values, damaged columns.

Measured gain: 2.8 ms of CPU time per row group instead of Arrow's 7.0 (`kernel="reference"`): 4,000 rows, 13 numbers
and 20 lists of 10 ids, dictionary encoding, zstd, medians of 40 on a two-core AMD EPYC.

Shape suffixes: C = columns, X = numbers that describe a column.
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
from kernels.check_pages import describe_chunks, find_damaged_chunk, first_page, raise_if_damaged
from kernels.decode_pages import reference

BACKENDS = ("reference", "cpu")
ENCODINGS = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED"}
# Physical type in the file, bytes per value in the file, bytes per value in memory; 0 means one bit.
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
    """The columns of a row group that the kernel decodes."""

    positions: list[int]  # among the requested columns
    columns_CX: npt.NDArray[np.int64]  # struct Column in cpu.cpp
    places: list[tuple[int, int, int, int]]  # in memory: which piece, where in it values and offsets begin, rows
    piece_bytes: list[int]


class GroupDecoder:
    """Decodes row groups of one file, the columns with the given leaves. Threads may share it."""

    def __init__(
        self,
        metadata: pq.FileMetaData,
        leaves: Sequence[int],
        *,
        keeps_lists: bool = False,
        needs_checksums: bool = False,
        kernel: str | None = None,
    ) -> None:
        """`keeps_lists` places all lists of a row group in one piece of memory, for callers that keep all or none.

        Checksums of pages are compared where there are some; `needs_checksums`: a page without one is damaged.
        """
        if kernel not in (None, *BACKENDS):
            raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
        self._metadata, self._leaves, self._is_reference = metadata, list(leaves), kernel == "reference"
        self._names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in leaves]
        stored = metadata.schema.to_arrow_schema()
        self._schema = pa.schema([stored.field(name) for name in self._names], metadata=stored.metadata)
        self._keeps_lists, self._needs_checksums = keeps_lists, needs_checksums
        self._types = [field.type for field in self._schema]
        self._for_arrow: set[int] = set()  # positions of columns that the kernel could not decode
        self._layouts: dict[int, _Layout] = {}  # row groups are decoded once per epoch
        self._chunks: dict[int, npt.NDArray[np.int64]] = {}

    def decode(self, data: bytes | pa.Buffer, start: int, index: int) -> pa.Table:
        """Row group `index`; `data` holds the file's bytes from `start` on, as far as its columns reach.

        Damaged pages raise OSError.
        """
        if index not in self._chunks:
            self._chunks[index] = describe_chunks(self._metadata.row_group(index), self._leaves)
        damaged = find_damaged_chunk(data, start, self._chunks[index], needs_checksums=self._needs_checksums)
        raise_if_damaged(damaged, self._metadata, self._leaves)
        if self._is_reference:
            return reference.read_columns(data, start, self._metadata, index, self._leaves)
        if index not in self._layouts:
            self._layouts[index] = self._describe(index)
        arrays = self._decode_pages(data, start, self._layouts[index])
        missing = [position for position in range(len(self._leaves)) if position not in arrays]
        if missing:
            leaves = [self._leaves[position] for position in missing]
            table = reference.read_columns(data, start, self._metadata, index, leaves)
            arrays |= {position: table.column(self._names[position]) for position in missing}
        return pa.Table.from_arrays([arrays[position] for position in range(len(arrays))], schema=self._schema)

    def _decode_pages(self, data: bytes | pa.Buffer, start: int, layout: _Layout) -> dict[int, Any]:
        """The columns that the kernel could decode, by position."""
        columns_CX = layout.columns_CX.copy()
        columns_CX[:, 0] -= start
        # Few pieces: every allocation releases the GIL and has to wait for it again.
        pieces = [pa.allocate_buffer(num_bytes) for num_bytes in layout.piece_bytes]
        counts_C = np.empty(len(columns_CX), np.int64)
        _cpu.decode_pages(data, columns_CX, pieces, counts_C)
        arrays = {}
        for position, count, (piece, *place) in zip(layout.positions, counts_C.tolist(), layout.places, strict=True):
            if count < 0:
                self._for_arrow.add(position)
                self._layouts = {}
            else:
                arrays[position] = _array(self._types[position], count, pieces[piece], *place)
        return arrays

    def _describe(self, index: int) -> _Layout:
        row_group = self._metadata.row_group(index)
        positions, columns, places = [], [], []
        piece_bytes = [0, 0] if self._keeps_lists else []  # lists, and all other columns
        for position, (leaf, field) in enumerate(zip(self._leaves, self._schema, strict=True)):
            chunk = row_group.column(leaf)
            column = _describe_column(self._metadata.schema.column(leaf), chunk, field)
            if column is None or position in self._for_arrow:
                continue
            (_, item_bytes, _, _, is_list), num_rows = column, row_group.num_rows
            if not self._keeps_lists:
                piece_bytes.append(0)
            piece = (0 if is_list else 1) if self._keeps_lists else len(piece_bytes) - 1
            values_at = piece_bytes[piece]
            values_bytes = chunk.num_values * item_bytes if item_bytes else (chunk.num_values + 7) // 8
            offsets_at = values_at + _aligned(values_bytes)
            piece_bytes[piece] = offsets_at + (_aligned(4 * (num_rows + 1)) if is_list else 0)
            positions.append(position)
            bytes_read = (first_page(chunk), chunk.total_compressed_size, chunk.num_values, num_rows)
            columns.append((*bytes_read, *column, chunk.compression != "UNCOMPRESSED", piece, values_at, offsets_at))
            places.append((piece, values_at, offsets_at, num_rows))
        columns_CX = np.array(columns, dtype=np.int64).reshape(len(columns), 13)
        return _Layout(positions=positions, columns_CX=columns_CX, places=places, piece_bytes=piece_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _describe_column(stored: Any, chunk: Any, field: pa.Field) -> tuple[int, int, int, int, bool] | None:
    """(bytes per value in the file, in memory, level of a value, of an empty list, is a list); None: Arrow reads it."""
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
        and chunk.compression in ("UNCOMPRESSED", "ZSTD")
    )
    return (sizes[0], sizes[1], most, empty, is_list) if is_known else None


def _array(kind: pa.DataType, count: int, piece: pa.Buffer, values_at: int, offsets_at: int, num_rows: int) -> pa.Array:
    values = [None, piece.slice(values_at) if values_at else piece]
    if not pa.types.is_list(kind):
        return pa.Array.from_buffers(kind, count, values, null_count=0)
    items = pa.Array.from_buffers(kind.value_type, count, values, null_count=0)
    offsets = [None, piece.slice(offsets_at, 4 * (num_rows + 1))]
    return pa.Array.from_buffers(kind, num_rows, offsets, null_count=0, children=[items])
