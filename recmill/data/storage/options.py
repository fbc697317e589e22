"""The settings of our Parquet files: for each column the encoding and the zstd level that make it smallest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SORT_KEYS = {
    "time": ("timestamp", "session_id"),
    "session": ("session_id", "timestamp"),
    "deduplicated": ("session_id", "timestamp"),
}
DICTIONARY = "DICTIONARY"
LONG_LIST = 4  # mean number of ids per list
LEVEL = 15  # from here on zstd codes the byte planes of split values apart: items of `recd` take 5% less than at 6
LONG_LIST_LEVEL = 17
TRIAL_LEVEL = 6  # ranks the encodings of long lists as level 17 does, in a fraction of the time
PAGE_BYTES = 8 * 2**20
# zstd 15 makes columns in which something repeats 1 to 8% smaller, and the others no smaller, at a tenth of the speed.
RECORD_LEVELS = (1, 15)
MIN_GAIN = 0.005  # a higher level must make a column smaller by this share
MAX_BEHIND = 1.2  # an encoding that is larger by this factor at the lowest level is not tried at higher ones
MIN_VALUES = 64  # shorter columns are not worth the trials


def writer_options(schema: pa.Schema, layout: str) -> dict[str, Any]:
    """Settings for rows of which no sample is known, chosen by size and reading speed.

    65,536 rows of three lists of 20 ids, a history of 64, an item id and two dense values, 16 samples per session, row
    groups of 8192, zstd 3: dictionaries (Arrow's default) take 8.1 MB, delta 10.2 MB, plain 3.3 MB, byte-stream-split
    ids 2.7 MB, with delta keys and a dictionary for the label 2.6 MB; reading takes as long as plain. With one sample
    per session 7.9 instead of 16.8 MB. Dense values stay plain: splitting the bytes of repeated ones doubles them.
    """
    lists = [leaf_path(field) for field in schema if pa.types.is_list(field.type)]
    encodings = dict.fromkeys(lists, "BYTE_STREAM_SPLIT") | dict.fromkeys(SORT_KEYS[layout], "DELTA_BINARY_PACKED")
    return {
        "compression": "zstd",
        "compression_level": 3,
        "write_statistics": True,
        "use_dictionary": ["label"],
        "column_encoding": encodings,
        "sorting_columns": [pq.SortingColumn(schema.get_field_index(name)) for name in SORT_KEYS[layout]],
    }


def row_options(sample: pa.Table, layout: str) -> dict[str, Any]:
    """Settings for rows like these.

    Lists of several ids get zstd 17: on `recd`, rows of a session that repeat them take 2.5% less than with 6, at a
    fifth of the writing speed. Pages of 8 MB, so that one page holds the rows of a row group.
    """
    levels = {
        column.name: (TRIAL_LEVEL, LONG_LIST_LEVEL) if _has_long_lists(sample.column(column.name)) else (LEVEL, LEVEL)
        for column in sample.schema
    }
    best = smallest_encodings(sample, {name: [trial] for name, (trial, _) in levels.items()})
    chosen = {leaf_path(column): (best[leaf_path(column)][0], levels[column.name][1]) for column in sample.schema}
    return writer_options(sample.schema, layout) | {"data_page_size": PAGE_BYTES} | _column_settings(chosen)


def record_options(record: pa.Table, levels: Sequence[int] = RECORD_LEVELS) -> dict[str, Any]:
    """Settings for records of the deduplicated layout that are like this one."""
    best = smallest_encodings(record, dict.fromkeys(record.schema.names, levels))
    shared = {"compression": "zstd", "write_statistics": False, "store_schema": False}  # Parquet's own types suffice
    return shared | _column_settings(best)


def _column_settings(chosen: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    return {
        "compression_level": {path: level for path, (_, level) in chosen.items()},
        "use_dictionary": [path for path, (encoding, _) in chosen.items() if encoding == DICTIONARY],
        "column_encoding": {path: encoding for path, (encoding, _) in chosen.items() if encoding != DICTIONARY},
    }


def _has_long_lists(column: pa.ChunkedArray) -> bool:
    return pa.types.is_list(column.type) and len(column.combine_chunks().flatten()) >= LONG_LIST * len(column)


def smallest_encodings(table: pa.Table, levels: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, int]]:
    """By path, the encoding and the level (of those given for the column) that make each column smallest."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:  # compressing releases the GIL
        found = pool.map(lambda name: _smallest_encoding(table.select([name]), levels[name]), table.schema.names)
        return dict(zip(map(leaf_path, table.schema), found, strict=True))


def smallest_bytes(table: pa.Table, levels: Sequence[int]) -> int:
    """The bytes of all columns, each in the encoding and at the level that make it smallest."""
    names = table.schema.names
    best = smallest_encodings(table, dict.fromkeys(names, levels)).values()
    return sum(_encoded_bytes(table.select([name]), *own) for name, own in zip(names, best, strict=True))


def _smallest_encoding(column: pa.Table, levels: Sequence[int]) -> tuple[str, int]:
    low, *higher = levels
    values = column.column(0).combine_chunks()
    values = values.flatten() if pa.types.is_list(values.type) else values
    if len(values) < MIN_VALUES:
        return "PLAIN", low
    encodings = ["PLAIN"]
    if not pa.types.is_boolean(values.type):
        encodings += [DICTIONARY, "BYTE_STREAM_SPLIT"] + ["DELTA_BINARY_PACKED"] * pa.types.is_integer(values.type)
    quick = {encoding: _encoded_bytes(column, encoding, low) for encoding in encodings}
    hopeful = [encoding for encoding in encodings if quick[encoding] <= MAX_BEHIND * min(quick.values())]
    sizes = {(encoding, low): (1 - MIN_GAIN) * size for encoding, size in quick.items()}
    sizes |= {(encoding, level): _encoded_bytes(column, encoding, level) for encoding in hopeful for level in higher}
    return min(sizes, key=lambda choice: sizes[choice])


def _encoded_bytes(column: pa.Table, encoding: str, level: int) -> int:
    """Size of a Parquet file with this one column."""
    options: dict[str, Any] = {}
    if encoding != DICTIONARY:
        options = {"column_encoding": {leaf_path(column.schema.field(0)): encoding}, "use_dictionary": False}
    sink = pa.BufferOutputStream()
    pq.write_table(column, sink, compression="zstd", compression_level=level, **options)
    return int(sink.tell())


def leaf_path(field: pa.Field) -> str:
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)
