"""Decides, on a sample of sessions, how the deduplicated layout stores a log: groups, codes and Parquet encodings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from recmill.data.memory_plan import MAX_SHARED_IDS
from recmill.data.schema import Schema
from recmill.data.storage.encoding import (
    MAX_SHARE,
    MAX_SHARED,
    BoolArray,
    Column,
    Encoding,
    IntArray,
    TimeEncoding,
    choose_encoding,
    dedup_in_sessions,
    inverse_events,
    record_schema,
    session_firsts,
)
from recmill.data.storage.numbers import NumberCode
from recmill.data.storage.options import MIN_VALUES, RECORD_LEVELS, record_options, smallest_bytes
from recmill.data.storage.popular_ids import PopularIds, byte_entropy
from recmill.data.storage.sequences import SequenceWriter
from recmill.data.storage.session_encoder import SessionEncoder, encode_sessions, mark_firsts, time_in_ids
from recmill.data.storage.writer import PartFormat, run_starts

# Ids of sessions that begin with a time in milliseconds: alone, with three or six digits after it, or with 22 bits.
DIVISORS = (0, 1, 10**3, 10**6, 2**22)


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
        users = fetch_users(key)
        encoding = share_histories(users, schema, encoding, key)
        encoding = place_users(users, encoding, key, scale=num_rows / max(users.num_rows, 1))
    popular = choose_popular_ids(sample, schema, encoding, scale=num_rows / sample.num_rows)
    group = first_sessions(sample, rows_per_group)
    marked = choose_marked(group, encoding)
    features = {}
    for name, own in encoding.features.items():
        coded = schema.feature(name).kind != "dense" and schema.feature(name).table in popular and not own.placed
        features[name] = replace(own, coded=coded, marks_firsts=name in marked)
    times, codes = choose_times(group, encoding)
    encoding = Encoding(features=features, times=times)
    return record_format(group, schema, encoding, popular, codes, max_shared_ids=max_shared_ids), encoding


def record_format(
    group: pa.Table,
    schema: Schema,
    encoding: Encoding,
    popular: Mapping[str, PopularIds],
    codes: Mapping[str, NumberCode] = MappingProxyType({}),
    *,
    max_shared_ids: int = MAX_SHARED_IDS,
    levels: Sequence[int] = RECORD_LEVELS,
) -> PartFormat:
    """Files of one record per row group, with the Parquet settings that make the rows of `group` smallest.

    A part is full when the histories that its sessions share hold `max_shared_ids` ids. `levels` of zstd are tried.
    """
    make_encoder = partial(
        SessionEncoder, schema=schema, encoding=encoding, popular=popular, codes=codes, max_ids=max_shared_ids
    )
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
    # First ends are places anywhere in a user's sequence, and the others mostly one further on.
    shared = {name: replace(encoding.features[name], shared_by=key, splits_ends=True) for name in windows}
    encoder = SessionEncoder(schema=schema, encoding=Encoding(features={**encoding.features, **shared}), popular={})
    encoder.encode(rows)
    apart = encode_sessions(rows, schema, encoding)
    kept = dict(encoding.features)
    for name in windows:
        num_apart = len(apart.column(name).combine_chunks().flatten())
        if encoder.sequences[name].num_ids <= MAX_SHARED * num_apart:
            kept[name] = shared[name]
    for history in [name for name, own in kept.items() if own.shared_by]:
        follower = find_follower(rows, schema, Encoding(features=kept), history)
        if follower:
            kept[follower] = replace(kept[follower], follows=history)
    return Encoding(features=kept)


def place_users(rows: pa.Table, encoding: Encoding, key: str, *, scale: float) -> Encoding:
    """The encoding with users as places, if that takes fewer bits; all users are `scale` times those of `rows`."""
    if not any(own.shared_by == key for own in encoding.features.values()):
        return encoding
    ids_S = Column.of(rows, key).values[run_starts([rows.column("session_id").to_numpy()])]
    codes_S = SequenceWriter().place(ids_S)[1:]
    again_bits = np.mean(codes_S > 0) * max(0.0, math.log2(scale))
    if byte_entropy(codes_S) + again_bits > MAX_SHARE * byte_entropy(ids_S):
        return encoding
    return Encoding(features={**encoding.features, key: replace(encoding.features[key], placed=True)})


def choose_marked(rows: pa.Table, encoding: Encoding) -> set[str]:
    """The groups whose changes take fewer bytes with a bit for the first row of every session."""
    session_R = rows.column("session_id").to_numpy()
    first_R, marked = session_firsts(session_R), set()
    for group, names in encoding.groups.items():
        changed = find_changes(rows, session_R, names)
        if _stored_bytes(mark_firsts(changed, first_R)) <= MAX_SHARE * _stored_bytes(changed):
            marked.add(group)
    return marked


def find_changes(rows: pa.Table, session_R: IntArray, names: Sequence[str]) -> BoolArray:
    """Whether each row except a session's first has other lists than the one before."""
    unique_U, inverse_R = dedup_in_sessions(session_R, [Column.of(rows, name) for name in names])
    return inverse_events(unique_U, inverse_R, session_firsts(session_R))[0]


def find_follower(rows: pa.Table, schema: Schema, encoding: Encoding, history: str) -> str | None:
    """The feature whose ids a shared history takes in, if leaving them out pays for the users of `rows`."""
    table = schema.feature(history).table
    for feature in schema.sparse:
        own = encoding.features[feature.name]
        if feature.table != table or own.group or own.follows:
            continue
        num_ids = []
        for follows in ("", history):
            features = {**encoding.features, feature.name: replace(own, follows=follows)}
            encoder = SessionEncoder(schema=schema, encoding=Encoding(features=features), popular={})
            stored = encoder.encode(rows).column(feature.name)[0].values
            num_ids.append(len(stored) + encoder.sequences[history].num_ids)
        if num_ids[1] <= MAX_SHARE * num_ids[0]:
            return feature.name
    return None


def choose_times(rows: pa.Table, encoding: Encoding) -> tuple[TimeEncoding, dict[str, NumberCode]]:
    """How the timestamps of whole sessions, sorted, are stored best, and the codes of the columns that are coded."""
    session_R, timestamp_R = rows.column("session_id").to_numpy(), rows.column("timestamp").to_numpy()
    starts = run_starts([session_R])
    session_S, first_S = session_R[starts], timestamp_R[starts]
    firsts = {divisor: first_S - time_in_ids(session_S, divisor) for divisor in DIVISORS}
    divisor = min(firsts, key=lambda divisor: byte_entropy(firsts[divisor]))
    gaps = np.delete(np.diff(timestamp_R, prepend=0), starts)
    bits, split_by = MAX_SHARE * len(gaps) * byte_entropy(gaps), ""
    for group, names in encoding.groups.items():
        changed = find_changes(rows, session_R, names)
        found = sum(len(own) * byte_entropy(own) for own in (gaps[changed], gaps[~changed]))
        if found < bits:
            bits, split_by, kept = found, group, changed
    columns = {"timestamp/first": firsts[divisor], "timestamp/gaps": gaps[kept] if split_by else gaps}
    codes = {name: NumberCode.choose(numbers) for name, numbers in columns.items() if len(numbers) >= MIN_VALUES}
    for name, code in list(codes.items()):
        if _stored_bytes(*code.to_symbols(columns[name])) > _stored_bytes(columns[name]):
            del codes[name]
    coded = {"first_coded": "timestamp/first" in codes, "gaps_coded": "timestamp/gaps" in codes}
    return TimeEncoding(**coded, divisor=divisor, split_by=split_by), codes


def _stored_bytes(*streams: npt.NDArray[Any]) -> int:
    return smallest_bytes(pa.table({str(number): [stream] for number, stream in enumerate(streams)}), RECORD_LEVELS)


def choose_popular_ids(sample: pa.Table, schema: Schema, encoding: Encoding, *, scale: float) -> dict[str, PopularIds]:
    """The tables whose ids are worth storing as symbols, judged by the ids that the sample's records store."""
    off: dict[str, Any] = {"shared_by": "", "follows": "", "placed": False, "splits_ends": False}
    features = {name: replace(own, **off) for name, own in encoding.features.items()}
    apart = Encoding(features=features)
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
