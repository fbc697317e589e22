"""Decides, on a sample of sessions, how the deduplicated layout stores a log: groups, codes and Parquet encodings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recmill.data.memory_plan import MAX_SHARED_IDS
from recmill.data.schema import Schema
from recmill.data.storage.encoding import KEYS, MAX_SHARED, Encoding, choose_encoding, record_schema
from recmill.data.storage.popular_ids import PopularIds
from recmill.data.storage.session_encoder import SessionEncoder, encode_sessions
from recmill.data.storage.writer import DICTIONARY, PartFormat, encoded_bytes, for_columns, run_starts

# Level 15 takes 1 to 8% off columns in which something repeats, and nothing off the others, for a tenth of the speed.
COMPRESSION_LEVELS = (1, 15)
MIN_GAIN = 0.005
MAX_BEHIND = 1.2  # an encoding that is so much larger at the low level is not tried at the high one
MIN_VALUES = 64  # shorter columns are not worth the trials


def choose_record_format(
    sample: pa.Table,
    schema: Schema,
    *,
    num_rows: int,
    rows_per_group: int,
    max_shared_ids: int = MAX_SHARED_IDS,
    fetch_users: Callable[[str], pa.Table] | None = None,
) -> tuple[PartFormat, Encoding]:
    """Files of one record a row group for a log of `num_rows` rows, of which `sample` holds whole sessions, sorted.

    A part is full when the histories that its sessions share hold `max_shared_ids` ids. `fetch_users` gives all
    sessions of some users, sorted, when told which feature says who the user is.
    """
    encoding = choose_encoding(sample, schema)
    if fetch_users and (key := find_user(sample, schema, encoding)):
        encoding = share_histories(fetch_users(key), schema, encoding, key)
    popular = choose_popular_ids(sample, schema, encoding, scale=num_rows / sample.num_rows)
    features = {
        name: replace(own, coded=schema.feature(name).kind != "dense" and schema.feature(name).table in popular)
        for name, own in encoding.features.items()
    }
    encoding = Encoding(features=features)
    make_encoder = partial(SessionEncoder, schema=schema, encoding=encoding, popular=popular, max_ids=max_shared_ids)
    group = first_sessions(sample, rows_per_group)
    form = PartFormat(
        schema=record_schema(schema, encoding),
        options=record_options(make_encoder().encode(group)),
        make_encoder=make_encoder,
    )
    return form, encoding


def first_sessions(rows: pa.Table, num_rows: int) -> pa.Table:
    """Whole sessions with about `num_rows` rows, one session at least."""
    ends = np.append(run_starts([rows.column("session_id").to_numpy()])[1:], rows.num_rows)
    last = min(int(np.searchsorted(ends, num_rows)), len(ends) - 1)
    return rows.slice(0, int(ends[last])).combine_chunks()


def find_user(rows: pa.Table, schema: Schema, encoding: Encoding) -> str | None:
    """The feature that may say whose session it is: one id, the same in a whole session, with the most values."""
    if not any(own.windows for own in encoding.features.values()):
        return None
    starts = run_starts([rows.column("session_id").to_numpy()])
    counts = {}
    for feature in schema.id_features:
        lists = rows.column(feature.name).combine_chunks()
        if encoding.features[feature.name].windows or pc.any(pc.not_equal(pc.list_value_length(lists), 1)).as_py():
            continue
        ids = lists.flatten().to_numpy()
        if np.isin(np.flatnonzero(np.diff(ids)) + 1, starts).all():
            counts[feature.name] = len(np.unique(ids))
    return max(counts, key=lambda name: counts[name]) if counts else None


def share_histories(rows: pa.Table, schema: Schema, encoding: Encoding, key: str) -> Encoding:
    """The encoding with those histories shared by `key` that all sessions of some users, `rows`, repeat enough."""
    windows = [name for name, own in encoding.features.items() if own.windows]
    if not rows.num_rows:
        return encoding
    shared = {name: replace(encoding.features[name], shared_by=key) for name in windows}
    encoder = SessionEncoder(schema=schema, encoding=Encoding(features={**encoding.features, **shared}), popular={})
    encoder.encode(rows)
    apart = encode_sessions(rows, schema, encoding)
    kept = dict(encoding.features)
    for name in windows:
        num_apart = len(apart.column(name).combine_chunks().flatten())
        if encoder.sequences[name].num_ids <= MAX_SHARED * num_apart:
            kept[name] = shared[name]
    return Encoding(features=kept)


def choose_popular_ids(sample: pa.Table, schema: Schema, encoding: Encoding, *, scale: float) -> dict[str, PopularIds]:
    """The tables whose ids are stored as symbols, by what their features store of the sample's sessions."""
    apart = Encoding(features={name: replace(own, shared_by="") for name, own in encoding.features.items()})
    records = encode_sessions(sample, schema, apart)
    popular = {}
    for table in schema.tables:
        if any(schema.feature(name).transforms for name in table.features):
            continue  # raw ids may be any int64, negative ones too
        ids = np.concatenate([records.column(name).combine_chunks().flatten().to_numpy() for name in table.features])
        # Shuffled, so that popularity is not that of one time.
        ids = np.random.default_rng(0).permutation(ids)
        found = PopularIds.choose(ids, num_rows=table.num_rows, num_stored=scale * len(ids))
        if found is not None:
            popular[table.name] = found
    return popular


def record_options(record: pa.Table) -> dict[str, Any]:
    """Settings of the Parquet files: for each column the encoding that makes it smallest in this record."""
    best = for_columns(record.schema, lambda field: smallest_encoding(record, field))
    return {
        "compression": "zstd",
        "compression_level": {path: level for path, (_, level) in best.items()},
        "write_statistics": [f"{name}.list.element" for name in KEYS],
        "use_dictionary": [path for path, (encoding, _) in best.items() if encoding == DICTIONARY],
        "column_encoding": {path: encoding for path, (encoding, _) in best.items() if encoding != DICTIONARY},
        "store_schema": False,  # Parquet's own types say it all
    }


def smallest_encoding(record: pa.Table, field: pa.Field) -> tuple[str, int]:
    """The encoding and the level of zstd that make a column smallest; a higher level must gain MIN_GAIN."""
    kind = field.type.value_type
    if len(record.column(field.name)[0]) < MIN_VALUES:
        return "PLAIN", COMPRESSION_LEVELS[0]
    encodings = ["PLAIN"]
    if not pa.types.is_boolean(kind):
        encodings += [DICTIONARY, "BYTE_STREAM_SPLIT"] + ["DELTA_BINARY_PACKED"] * pa.types.is_integer(kind)
    low, high = COMPRESSION_LEVELS
    column = record.select([field.name])
    quick = {encoding: encoded_bytes(column, encoding, low) for encoding in encodings}
    hopeful = [encoding for encoding in encodings if quick[encoding] <= MAX_BEHIND * min(quick.values())]
    sizes = {(encoding, low): (1 - MIN_GAIN) * size for encoding, size in quick.items()}
    sizes |= {(encoding, high): encoded_bytes(column, encoding, high) for encoding in hopeful}
    return min(sizes, key=lambda choice: sizes[choice])
