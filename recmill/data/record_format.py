"""Decides, on a sample of sessions, how the deduplicated layout stores a log: groups, codes and Parquet encodings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.data.encoding import Encoding, choose_encoding, record_schema
from recmill.data.parquet_writer import PartFormat, run_starts
from recmill.data.popular_ids import PopularIds, dump_popular_ids
from recmill.data.schema import Schema
from recmill.data.session_encoder import encode_sessions

KEYS = ("session_id", "first_timestamp")
DICTIONARY = "DICTIONARY"
# Against zstd 3, level 9 takes 1 to 3% off `recd` and globo and 15 takes 4 to 5%, for a seventh of the writing speed.
COMPRESSION_LEVEL = 15


def choose_record_format(
    sample: pa.Table, schema: Schema, *, num_rows: int, rows_per_group: int
) -> tuple[PartFormat, Encoding]:
    """Files of one record a session for a log of `num_rows` rows, of which `sample` holds whole sessions, sorted."""
    encoding = choose_encoding(sample, schema)
    records = encode_sessions(sample, schema, encoding)
    popular = choose_popular_ids(records, schema, scale=num_rows / sample.num_rows)
    features = {
        name: replace(own, coded=schema.feature(name).kind != "dense" and schema.feature(name).table in popular)
        for name, own in encoding.features.items()
    }
    encoding = Encoding(features=features)
    encode = partial(encode_sessions, schema=schema, encoding=encoding, popular=popular)
    group = first_sessions(sample, rows_per_group)
    form = PartFormat(
        schema=record_schema(schema, encoding),
        options=record_options(encode(group)),
        encode=encode,
        metadata=dump_popular_ids(popular),
    )
    return form, encoding


def first_sessions(rows: pa.Table, num_rows: int) -> pa.Table:
    """Whole sessions with about `num_rows` rows, one session at least."""
    ends = np.append(run_starts([rows.column("session_id").to_numpy()])[1:], rows.num_rows)
    last = min(int(np.searchsorted(ends, num_rows)), len(ends) - 1)
    return rows.slice(0, int(ends[last])).combine_chunks()


def choose_popular_ids(records: pa.Table, schema: Schema, *, scale: float) -> dict[str, PopularIds]:
    """The tables whose ids are stored as codes. Records are shuffled, so that popularity is not that of one time."""
    order = pa.array(np.random.default_rng(0).permutation(records.num_rows))
    popular = {}
    for table in schema.tables:
        if any(schema.feature(name).transforms for name in table.features):
            continue  # raw ids may be any int64, negative ones too, and would collide with codes
        columns = [records.column(name).combine_chunks().take(order) for name in table.features]
        ids = np.concatenate([column.values.to_numpy() for column in columns])
        if (found := PopularIds.choose(ids, num_stored=scale * len(ids))) is not None:
            popular[table.name] = found
    return popular


def record_options(records: pa.Table) -> dict[str, Any]:
    """Settings of the Parquet files: for each column the encoding that makes it smallest in these records."""
    best = {leaf_path(field): smallest_encoding(records, field) for field in records.schema}
    return {
        "compression": "zstd",
        "compression_level": COMPRESSION_LEVEL,
        "write_statistics": list(KEYS),
        "use_dictionary": [path for path, encoding in best.items() if encoding == DICTIONARY],
        "column_encoding": {path: encoding for path, encoding in best.items() if encoding != DICTIONARY},
        "sorting_columns": [pq.SortingColumn(0)],
        "store_schema": False,  # Parquet's own types say it all
    }


def smallest_encoding(records: pa.Table, field: pa.Field) -> str:
    values = field.type.value_type if pa.types.is_list(field.type) else field.type
    tried = [DICTIONARY, "PLAIN", "BYTE_STREAM_SPLIT"] + ["DELTA_BINARY_PACKED"] * pa.types.is_integer(values)
    column = records.select([field.name])
    sizes = {}
    for encoding in tried:
        options: Mapping[str, Any] = {"column_encoding": {leaf_path(field): encoding}, "use_dictionary": False}
        sink = io.BytesIO()
        pq.write_table(column, sink, compression="zstd", **({} if encoding == DICTIONARY else options))
        sizes[encoding] = sink.tell()
    return min(sizes, key=lambda encoding: sizes[encoding])


def leaf_path(field: pa.Field) -> str:
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)
