from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernels.decode_pages import GroupDecoder

NUM_ROWS = 1000


def make_lists(rng: np.random.Generator, kind: pa.DataType, *, num_rows: int, most: int, shortest: int = 0) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(shortest, 7, num_rows))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rng.integers(0, most, offsets[-1])).cast(kind))


def make_table(num_rows: int = NUM_ROWS, *, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "dense": pa.array(rng.normal(size=num_rows).astype(np.float32)),
            "label": pa.array(rng.integers(0, 2, num_rows).astype(np.float32)),
            "one": pa.array(np.ones(num_rows, np.int64)),
            "short": pa.array(rng.integers(0, 9, num_rows), pa.int32()),
            "ids": make_lists(rng, pa.int64(), num_rows=num_rows, most=10**12),
            "full": make_lists(rng, pa.int64(), num_rows=num_rows, most=300, shortest=1),
            "small": make_lists(rng, pa.int32(), num_rows=num_rows, most=20),
            "weights": make_lists(rng, pa.float32(), num_rows=num_rows, most=1000),
            "bits": pa.array(rng.integers(0, 2, num_rows).astype(bool)),
            "wide": pa.array(rng.normal(size=num_rows)),
            "byte": pa.array(rng.integers(0, 256, num_rows), pa.uint8()),
            "negative": pa.array(rng.integers(-30_000, 30_000, num_rows), pa.int16()),
            "most": pa.array(rng.integers(2**31, 2**32, num_rows), pa.uint32()),
            "flags": make_lists(rng, pa.bool_(), num_rows=num_rows, most=2),
            "bytes": make_lists(rng, pa.uint8(), num_rows=num_rows, most=256),
            "pairs": make_lists(rng, pa.uint16(), num_rows=num_rows, most=65_536),
            "empty": pa.array([[]] * num_rows, pa.list_(pa.int64())),
        }
    )


def write(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **({"compression": "zstd", "row_group_size": 600} | options))
    return sink.getvalue()


def decode_all(stored: bytes, **options: Any) -> tuple[pa.Table, set[str]]:
    """All rows, and the columns that Arrow decoded."""
    metadata = pq.read_metadata(io.BytesIO(stored))
    decoder = GroupDecoder(metadata, range(metadata.num_columns), **options)
    tables = [decoder.decode(stored, 0, index) for index in range(metadata.num_row_groups)]
    names = [metadata.schema.column(leaf).path.split(".")[0] for leaf in range(metadata.num_columns)]
    decoded = {position for layout in decoder._layouts.values() for position in layout.positions}
    return pa.concat_tables(tables), set(names) - {names[position] for position in decoded}


NUMBERS = ("dense", "short", "wide", "byte", "negative", "most")
SPLIT = {"use_dictionary": False, "column_encoding": dict.fromkeys(NUMBERS, "BYTE_STREAM_SPLIT")}
LISTS = [f"{name}.list.element" for name in ("ids", "full", "small", "weights", "empty", "bytes", "pairs")]
WHOLE = ("one", "short", "byte", "negative", "most", *LISTS[:3], *LISTS[4:])
DELTAS = {"use_dictionary": False, "column_encoding": dict.fromkeys(WHOLE, "DELTA_BINARY_PACKED")}
OPTIONS: dict[str, dict[str, Any]] = {
    "differences": DELTAS,
    "differences, many pages": {**DELTAS, "data_page_size": 200, "write_batch_size": 50},
    "differences, not compressed": {**DELTAS, "compression": "none"},
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "split bytes": {"use_dictionary": False, "column_encoding": dict.fromkeys(LISTS, "BYTE_STREAM_SPLIT")},
    "split bytes of numbers": SPLIT,
    "not compressed": {"compression": "none"},
    "many pages": {"data_page_size": 200, "write_batch_size": 50},
    "many pages, plain": {"data_page_size": 200, "write_batch_size": 50, "use_dictionary": False},
    "dictionary given up": {"dictionary_pagesize_limit": 300, "write_batch_size": 64},
    "checksums": {"write_page_checksum": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_decodes_what_arrow_does(name: str) -> None:
    table = make_table()
    found, by_arrow = decode_all(write(table, **OPTIONS[name]))
    found.validate(full=True)
    assert found.equals(table)
    assert found.schema.equals(table.schema)
    assert by_arrow == set()


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130])
@pytest.mark.parametrize("options", [{}, DELTAS], ids=["dictionary", "differences"])
def test_few_rows_decode(num_rows: int, options: dict[str, Any]) -> None:
    table = make_table(num_rows)
    assert decode_all(write(table, **options)) == (table, set())


def test_arrow_decodes_differences_that_fill_a_word() -> None:
    table = pa.table({"one": pa.array([0, 2**62, 5, -(2**62), 7])})
    assert decode_all(write(table, **DELTAS)) == (table, {"one"})


def test_differences_beyond_the_numbers_wrap_around() -> None:
    numbers = pa.array([-(2**31), 2**31 - 1, -(2**31), 0, 2**31 - 1, -1], pa.int32())
    found, _ = decode_all(write(pa.table({"short": numbers}), **DELTAS))
    assert found["short"].to_pylist() == numbers.to_pylist()


def test_columns_without_missing_values_by_declaration_decode() -> None:
    table = make_table()
    kinds = [
        pa.field(
            field.name,
            pa.list_(pa.field("element", field.type.value_type, nullable=False))
            if pa.types.is_list(field.type)
            else field.type,
            nullable=field.name == "ids",
        )
        for field in table.schema
    ]
    table = table.cast(pa.schema(kinds))
    found, by_arrow = decode_all(write(table))
    assert found.equals(table)
    assert by_arrow == set()


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array([[1], None, [2, 3]]), {}),
        (pa.array([[1], [None, 4], [2, 3]]), {}),
        (pa.array([1.0, None, 2.0], pa.float32()), {}),
        (pa.array(["a", "b", "c"]), {}),
        (pa.array([1, 2, 3], pa.date32()), {}),
        (pa.array([[[1]], [[2], [3]], []]), {}),
        (pa.array([1, 2, 3]), {"compression": "snappy"}),
        (pa.array([1, 2, 3]), {"data_page_version": "2.0"}),
    ],
)
def test_arrow_decodes_the_rest(column: pa.Array, options: dict[str, Any]) -> None:
    table = pa.table({"before": pa.array([1, 2, 3]), "other": column, "after": pa.array([[4], [], [5]])})
    found, by_arrow = decode_all(write(table, row_group_size=2, **options))
    assert found.equals(table)
    assert "other" in by_arrow


def test_the_reference_is_arrow() -> None:
    table = make_table()
    assert decode_all(write(table), kernel="reference")[0].equals(table)
    with pytest.raises(ValueError, match="kernel is 'gpu'"):
        decode_all(write(table), kernel="gpu")


def test_damaged_bytes_end_in_an_error_or_in_numbers() -> None:
    """Never in a crash: levels, indices and sizes of pages are checked before memory is touched."""
    rng = np.random.default_rng(0)
    for compression in ("none", "zstd"):
        stored = write(make_table(200), compression=compression)
        metadata = pq.read_metadata(io.BytesIO(stored))
        end = len(stored) - 8 - metadata.serialized_size
        num_refused = 0
        for _ in range(100):
            damaged = bytearray(stored)
            for place in rng.integers(4, end, 3):
                damaged[place] = rng.integers(0, 256)
            try:
                table = GroupDecoder(metadata, range(metadata.num_columns)).decode(bytes(damaged), 0, 0)
            except (OSError, pa.ArrowException):
                num_refused += 1
            else:
                table.validate(full=True)
        assert num_refused > 0


def test_a_delta_page_with_too_many_parts_is_left_to_arrow() -> None:
    """2**61 parts: eight times as many overflow to zero, by which nothing can be divided."""
    stored = bytearray(write(pa.table({"one": pa.array(range(500))}), **{**DELTAS, "compression": "none"}))
    header = bytes([0x80, 0x02, 0x04, 0xF4, 0x03])  # blocks of 256 in 4 parts, 500 values
    place = bytes(stored).index(header) + 2
    stored[place : place + 9] = bytes([0x80] * 8 + [0x20])
    metadata = pq.read_metadata(io.BytesIO(bytes(stored)))
    with pytest.raises((OSError, pa.ArrowException)):
        GroupDecoder(metadata, [0]).decode(bytes(stored), 0, 0)


def test_arrow_sees_only_the_bytes_of_the_row_group() -> None:
    stored = write(pa.table({"name": pa.array(["a", "b"] * 600), "number": pa.array(range(1200))}))
    metadata = pq.read_metadata(io.BytesIO(stored))
    chunk = metadata.row_group(1).column(0)
    start = min(chunk.dictionary_page_offset, chunk.data_page_offset)
    table = GroupDecoder(metadata, [0, 1]).decode(stored[start:], start, 1)
    assert table["number"].to_pylist() == list(range(600, 1200))
    with pytest.raises(ValueError, match=f"expected only bytes from {start} on"):
        GroupDecoder(metadata, [0, 1]).decode(stored[start:], start, 0)
