"""A row group of a Parquet file as an Arrow table, decoded in one call that does not hold the GIL.

Decodes what tables of features consist of: numbers, booleans and lists of them without missing values, in the encodings
plain, dictionary, delta and byte stream split, compressed with zstd or uncompressed. Arrow reads all other columns:
strings, columns with missing values, damaged columns.

Measured gain: 2.8 ms of CPU time per row group instead of Arrow's 7.0 (`kernel="reference"`): 4,000 rows, 13 numbers
and 20 lists of 10 ids, dictionary encoding, zstd, medians of 40 on a two-core AMD EPYC.

Callers that cut batches from rows need no Arrow table: `DecodedRows` has the same numbers with ids in 4 bytes.

Shape suffixes: C = columns, X = numbers that describe a column, R = rows, F = numbers side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kernels import _cpu
from kernels.check_pages import describe_chunks, find_damaged_chunk, first_page, raise_if_damaged
from kernels.decode_pages import reference
from kernels.join_lists import PackedLists
from kernels.recycled import recycled_array

BACKENDS = ("reference", "cpu")
NUM_FIELDS, VALUES_AT, OFFSETS_AT = 14, 11, 12  # of struct Column in cpu.cpp
SESSION = "session_id"  # the one column of single int64 numbers that rows may have
MAX_BOUND = 2**31  # of ids that 4 bytes hold
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
    num_rows: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedRows:
    """A row group without an Arrow array per column: lists of ids in one piece of memory, single numbers in another.

    Ids have 4 bytes and lie inside their tables; there are no missing values.
    """

    num_rows: int
    names: Mapping[str, int]  # of the columns, with their positions
    columns_CX: npt.NDArray[np.int64]
    counts_C: npt.NDArray[np.int64]
    lists: pa.Buffer
    others: pa.Buffer

    @property
    def nbytes(self) -> int:
        return int(self.lists.size + self.others.size)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """The numbers of a column that has no lists, not copied."""
        begin, dtype = int(self.columns_CX[self.names[name], VALUES_AT]), np.int64 if name == SESSION else np.float32
        return np.frombuffer(self.others, dtype, count=self.num_rows, offset=begin)

    def stack(
        self, names: Sequence[str], stacked_RF: npt.NDArray[np.float32], *, keeps_missing: bool = False
    ) -> str | None:
        """Write columns of float32 side by side, NaN as 0. Returns the first with an infinite value, or None.

        With `keeps_missing`, NaN stays and counts as infinite.
        """
        places_F = self.columns_CX[[self.names[name] for name in names], VALUES_AT]
        found = _cpu.stack_columns(self.others, places_F, stacked_RF, keeps_missing) if names else -1
        return None if found < 0 else names[found]

    def lists_of(self, names: Sequence[str]) -> PackedLists:
        positions = [self.names[name] for name in names]
        places_CX = self.columns_CX[positions]
        return PackedLists(
            piece=self.lists,
            values_at=np.ascontiguousarray(places_CX[:, VALUES_AT]),
            offsets_at=np.ascontiguousarray(places_CX[:, OFFSETS_AT]),
            counts=self.counts_C[positions],
            num_rows=self.num_rows,
        )


class GroupDecoder:
    """Decodes row groups of one file, the columns with the given leaves. Threads may share it."""

    def __init__(
        self,
        metadata: pq.FileMetaData,
        leaves: Sequence[int],
        *,
        bounds: Mapping[str, int] | None = None,
        needs_checksums: bool = False,
        kernel: str | None = None,
    ) -> None:
        """With `bounds`, the number of rows of each list column's table, `decode` returns DecodedRows where it can: all
        columns are for the kernel, all ids inside their tables, all other numbers float32.

        Checksums of pages are compared where there are some; `needs_checksums`: a page without one is damaged.
        """
        if kernel not in (None, *BACKENDS):
            raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
        self._metadata, self._leaves, self._is_reference = metadata, list(leaves), kernel == "reference"
        self._names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in leaves]
        stored = metadata.schema.to_arrow_schema()
        self._schema = pa.schema([stored.field(name) for name in self._names], metadata=stored.metadata)
        self._needs_checksums = needs_checksums
        self._types = [field.type for field in self._schema]
        self._bounds = bounds if bounds is not None and self._can_be_rows(bounds) else None
        self._row_layouts: dict[int, _Layout] = {}
        self._positions = {name: position for position, name in enumerate(self._names)}
        self._for_arrow: set[int] = set()  # positions of columns that the kernel could not decode
        self._layouts: dict[int, _Layout] = {}  # row groups are decoded once per epoch
        self._chunks: dict[int, npt.NDArray[np.int64]] = {}

    def _can_be_rows(self, bounds: Mapping[str, int]) -> bool:
        kinds = {name: pa.list_(pa.int64()) for name, bound in bounds.items() if bound <= MAX_BOUND}
        kinds[SESSION] = pa.int64()
        return all(field.type == kinds.get(field.name, pa.float32()) for field in self._schema)

    def decode(self, data: bytes | pa.Buffer, start: int, index: int) -> pa.Table | DecodedRows:
        """Row group `index`; `data` holds the file's bytes from `start` on, as far as its columns reach.

        Damaged pages raise OSError.
        """
        if index not in self._chunks:
            self._chunks[index] = describe_chunks(self._metadata.row_group(index), self._leaves)
        damaged = find_damaged_chunk(data, start, self._chunks[index], needs_checksums=self._needs_checksums)
        raise_if_damaged(damaged, self._metadata, self._leaves)
        if self._is_reference:
            return reference.read_columns(data, start, self._metadata, index, self._leaves)
        bounds = self._bounds
        if bounds is not None and (rows := self._decode_rows(data, start, index, bounds)) is not None:
            return rows
        if index not in self._layouts:
            self._layouts[index] = self._describe(index)
        arrays = self._decode_pages(data, start, self._layouts[index])
        missing = [position for position in range(len(self._leaves)) if position not in arrays]
        if missing:
            leaves = [self._leaves[position] for position in missing]
            table = reference.read_columns(data, start, self._metadata, index, leaves)
            arrays |= {position: table.column(self._names[position]) for position in missing}
        return pa.Table.from_arrays([arrays[position] for position in range(len(arrays))], schema=self._schema)

    def _decode_rows(
        self, data: bytes | pa.Buffer, start: int, index: int, bounds: Mapping[str, int]
    ) -> DecodedRows | None:
        """The row group, or None if a column is not for the kernel or an id lies outside its table."""
        if index not in self._row_layouts:
            self._row_layouts[index] = self._describe(index, bounds=bounds)
        layout = self._row_layouts[index]
        if len(layout.positions) == len(self._leaves):
            columns_CX, pieces, counts_C = _run_kernel(data, start, layout)
        if len(layout.positions) < len(self._leaves) or (counts_C < 0).any():
            self._bounds = None  # probably true of the next row group, too
            return None
        return DecodedRows(
            num_rows=layout.num_rows,
            names=self._positions,
            columns_CX=columns_CX,
            counts_C=counts_C,
            lists=pieces[0],
            others=pieces[1],
        )

    def _decode_pages(self, data: bytes | pa.Buffer, start: int, layout: _Layout) -> dict[int, Any]:
        """The columns that the kernel could decode, by position."""
        _, pieces, counts_C = _run_kernel(data, start, layout)
        arrays = {}
        for position, count, (piece, *place) in zip(layout.positions, counts_C.tolist(), layout.places, strict=True):
            if count < 0:
                self._for_arrow.add(position)
                self._layouts = {}
            else:
                arrays[position] = _array(self._types[position], count, pieces[piece], *place)
        return arrays

    def _describe(self, index: int, bounds: Mapping[str, int] | None = None) -> _Layout:
        row_group = self._metadata.row_group(index)
        positions, columns, places = [], [], []
        piece_bytes = [] if bounds is None else [0, 0]  # lists, and all other columns
        for position, (leaf, field) in enumerate(zip(self._leaves, self._schema, strict=True)):
            chunk = row_group.column(leaf)
            column = _describe_column(self._metadata.schema.column(leaf), chunk, field)
            if column is None or position in self._for_arrow:
                continue
            (stored_bytes, item_bytes, *levels, is_list), num_rows = column, row_group.num_rows
            if bounds is None:
                piece_bytes.append(0)
            elif is_list:
                item_bytes = 4
            piece = len(piece_bytes) - 1 if bounds is None else int(not is_list)
            values_at = piece_bytes[piece]
            values_bytes = chunk.num_values * item_bytes if item_bytes else (chunk.num_values + 7) // 8
            offsets_at = values_at + _aligned(values_bytes)
            piece_bytes[piece] = offsets_at + (_aligned(4 * (num_rows + 1)) if is_list else 0)
            positions.append(position)
            bytes_read = (first_page(chunk), chunk.total_compressed_size, chunk.num_values, num_rows)
            kind = (stored_bytes, item_bytes, *levels, is_list, chunk.compression != "UNCOMPRESSED")
            bound = 0 if bounds is None else bounds.get(field.name, 0)
            columns.append((*bytes_read, *kind, piece, values_at, offsets_at, bound))
            places.append((piece, values_at, offsets_at, num_rows))
        columns_CX = np.array(columns, dtype=np.int64).reshape(len(columns), NUM_FIELDS)
        return _Layout(
            positions=positions,
            columns_CX=columns_CX,
            places=places,
            piece_bytes=piece_bytes,
            num_rows=row_group.num_rows,
        )


def _run_kernel(
    data: bytes | pa.Buffer, start: int, layout: _Layout
) -> tuple[npt.NDArray[np.int64], list[pa.Buffer], npt.NDArray[np.int64]]:
    """(description of the columns, their pieces of memory, values per column)."""
    columns_CX = layout.columns_CX.copy()
    columns_CX[:, 0] -= start
    pieces = [pa.py_buffer(recycled_array(num_bytes, np.uint8)) for num_bytes in layout.piece_bytes]
    counts_C = np.empty(len(columns_CX), np.int64)
    _cpu.decode_pages(data, columns_CX, pieces, counts_C)
    return columns_CX, pieces, counts_C


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
