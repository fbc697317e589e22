"""Decides, on a sample of sessions, how the deduplicated layout stores a log: groups, codes and Parquet encodings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recmill.data.memory_plan import MAX_SHARED_IDS
from recmill.data.schema import Schema
from recmill.data.storage.encoding import MAX_SHARED, Encoding, choose_encoding, record_schema
from recmill.data.storage.options import RECORD_LEVELS, record_options
from recmill.data.storage.popular_ids import PopularIds
from recmill.data.storage.session_encoder import SessionEncoder, encode_sessions
from recmill.data.storage.writer import PartFormat, run_starts


def choose_record_format(
    sample: pa.Table,
    schema: Schema,
    *,
    num_rows: int,
    rows_per_group: int,
    max_shared_ids: int = MAX_SHARED_IDS,
    fetch_users: Callable[[str], pa.Table] | None = None,
) -> tuple[PartFormat, Encoding]:
    """The format of the files for a log of `num_rows` rows, of which `sample` holds whole sessions, sorted.

    `fetch_users` returns all sessions of some users, sorted, given the feature that identifies the user.
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
    group = first_sessions(sample, rows_per_group)
    return record_format(group, schema, encoding, popular, max_shared_ids=max_shared_ids), encoding


def record_format(
    group: pa.Table,
    schema: Schema,
    encoding: Encoding,
    popular: Mapping[str, PopularIds],
    *,
    max_shared_ids: int = MAX_SHARED_IDS,
    levels: Sequence[int] = RECORD_LEVELS,
) -> PartFormat:
    """Files of one record per row group, with the Parquet settings that make the rows of `group` smallest.

    A part is full when the histories that its sessions share hold `max_shared_ids` ids. `levels` of zstd are tried.
    """
    make_encoder = partial(SessionEncoder, schema=schema, encoding=encoding, popular=popular, max_ids=max_shared_ids)
    options = record_options(make_encoder().encode(group), levels)
    return PartFormat(schema=record_schema(schema, encoding), options=options, make_encoder=make_encoder)


def first_sessions(rows: pa.Table, num_rows: int) -> pa.Table:
    """Whole sessions with about `num_rows` rows, at least one session."""
    ends = np.append(run_starts([rows.column("session_id").to_numpy()])[1:], rows.num_rows)
    last = min(int(np.searchsorted(ends, num_rows)), len(ends) - 1)
    return rows.slice(0, int(ends[last])).combine_chunks()


def find_user(rows: pa.Table, schema: Schema, encoding: Encoding) -> str | None:
    """The feature that may identify the user: one id, constant within a session, with the most distinct values."""
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
    """The encoding with histories that all sessions of a user share, if that pays for the users of `rows`."""
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
    """The tables whose ids are worth storing as symbols, judged by the ids that the sample's records store."""
    apart = Encoding(features={name: replace(own, shared_by="") for name, own in encoding.features.items()})
    records = encode_sessions(sample, schema, apart)
    popular = {}
    for table in schema.tables:
        if any(schema.feature(name).transforms for name in table.features):
            continue  # raw ids may be any int64, even negative
        ids = np.concatenate([records.column(name).combine_chunks().flatten().to_numpy() for name in table.features])
        # Shuffled, so that popularity is not that of one period.
        ids = np.random.default_rng(0).permutation(ids)
        found = PopularIds.choose(ids, num_rows=table.num_rows, num_stored=scale * len(ids))
        if found is not None:
            popular[table.name] = found
    return popular
