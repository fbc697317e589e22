"""Encodes whole sessions as records of the `deduplicated` layout, which deduplicated.py describes.

Shape suffixes: S = sessions, R = rows (samples), U = distinct rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import take_windows, window_rows
from recmill.data.memory_plan import MAX_SHARED_IDS
from recmill.data.schema import Schema
from recmill.data.storage.encoding import (
    BoolArray,
    Column,
    Encoding,
    IntArray,
    dedup_in_sessions,
    inverse_events,
    lists_of,
    record_schema,
    session_firsts,
)
from recmill.data.storage.numbers import NumberCode, dump_code
from recmill.data.storage.popular_ids import Bytes, PopularIds, dump_popular_ids
from recmill.data.storage.sequences import SequenceWriter

NO_KEY = np.iinfo(np.int64).min  # for sessions whose first row does not identify the user


class SessionEncoder:
    """Encodes the records of one part; what they share goes into its footer."""

    def __init__(
        self,
        *,
        schema: Schema,
        encoding: Encoding,
        popular: Mapping[str, PopularIds],
        codes: Mapping[str, NumberCode] = MappingProxyType({}),
        max_ids: int = MAX_SHARED_IDS,
    ) -> None:
        """The part is full when the histories that its sessions share hold `max_ids` ids."""
        self.schema, self.encoding, self.popular, self._max_ids = schema, encoding, popular, max_ids
        self.codes = codes
        self.followers = {own.follows: name for name, own in encoding.features.items() if own.follows}
        self.arrow_schema = record_schema(schema, encoding)
        self._used = {table: np.zeros(len(own.ids), np.bool_) for table, own in popular.items()}
        self.sequences = {name: SequenceWriter() for name, own in encoding.features.items() if own.shared_by}

    def encode(self, rows: pa.Table) -> pa.Table:
        """The record of whole sessions, sorted by session and time."""
        record = _Record(rows, self)
        record.add_keys()
        # First the users: their places are in the order of their first appearance in this column.
        groups = self.encoding.groups
        for group in sorted(groups, key=lambda group: not any(self.encoding.features[n].placed for n in groups[group])):
            record.add_group(group, groups[group])
        record.add_times()
        for name in self.encoding.plain:
            record.add_plain(name)
        arrays = [_one_list(record.streams[field.name], field.type) for field in self.arrow_schema]
        return pa.Table.from_arrays(arrays, schema=self.arrow_schema)

    @property
    def is_full(self) -> bool:
        """Whether the footer is as large as a reader should have to hold."""
        return sum(own.num_ids for own in self.sequences.values()) >= self._max_ids

    def metadata(self) -> dict[bytes, bytes]:
        """Metadata for the footer."""
        found: dict[bytes, bytes] = {}
        for name, own in self.sequences.items():
            coded = self.encoding.features[name].coded
            found |= own.dump(name, partial(self.to_symbols, name) if coded else None)
        for table, popular in self.popular.items():
            found |= dump_popular_ids(table, popular, self._used[table])
        for column, code in self.codes.items():
            found |= dump_code(column, code)
        return found

    def to_symbols(self, name: str, ids: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """The ids of a feature as symbols, and the bytes that follow them."""
        table = self.schema.feature(name).table
        return self.popular[table].to_symbols(ids, used=self._used[table])


class _Record:
    """The streams of one row group, by column."""

    def __init__(self, rows: pa.Table, encoder: SessionEncoder) -> None:
        self.rows, self.encoder = rows, encoder
        self.session_R = rows.column("session_id").to_numpy()
        self.first_R = session_firsts(self.session_R)
        self.starts_S = np.flatnonzero(self.first_R)
        self.record_R = np.cumsum(self.first_R) - 1
        self.streams: dict[str, npt.NDArray[np.generic]] = {}
        self._changed: dict[str, BoolArray] = {}  # by group
        self._next_R: dict[str, tuple[IntArray, BoolArray]] = {}  # by follower: the id that follows, if there is one

    def add_keys(self) -> None:
        self.streams |= {
            "session_id": self.session_R[self.starts_S],
            "session/num_rows": self._count(self.record_R).astype(np.int32),
            **{name: self.rows.column(name).to_numpy() for name in self.encoder.schema.labels},
        }

    def add_times(self) -> None:
        """After the groups, one of which may split the gaps."""
        times, timestamp_R = self.encoder.encoding.times, self.rows.column("timestamp").to_numpy()
        session_S, first_S = self.session_R[self.starts_S], timestamp_R[self.starts_S]
        self._add_numbers("timestamp/first", first_S - time_in_ids(session_S, times.divisor))
        gaps = np.diff(timestamp_R, prepend=timestamp_R[:1])[~self.first_R]
        if times.split_by:
            changed = self._changed[times.split_by]
            self.streams["timestamp/still"], gaps = gaps[~changed], gaps[changed]
        self._add_numbers("timestamp/gaps", gaps)

    def _add_numbers(self, column: str, numbers: IntArray) -> None:
        code = self.encoder.codes.get(column)
        if code is None:
            self.streams[column] = numbers
        else:
            self.streams[column], self.streams[f"{column}/rest"] = code.to_symbols(numbers)

    def _count(self, session: IntArray) -> IntArray:
        return np.bincount(session, minlength=len(self.starts_S))

    def add_group(self, group: str, names: Sequence[str]) -> None:
        columns = [Column.of(self.rows, name) for name in names]
        unique_U, inverse_R = dedup_in_sessions(self.session_R, columns)
        changed, again = inverse_events(unique_U, inverse_R, self.first_R)
        self._changed[group] = changed
        if self.encoder.encoding.features[group].marks_firsts:
            changed = mark_firsts(changed, self.first_R)
        self.streams |= {f"{group}/changed": changed, f"{group}/again": again}
        num_distinct_S = self._count(self.record_R[unique_U])
        for name, column in zip(names, columns, strict=True):
            values, lengths_U = column.take(unique_U)
            if self.encoder.encoding.features[name].windows:
                self._add_windows(name, values, lengths_U, num_distinct_S, inverse_R)
            else:
                self.add_values(name, values, lengths_U)

    def add_plain(self, name: str) -> None:
        column = Column.of(self.rows, name)
        values, lengths_R = column.values, np.diff(column.offsets)
        if name in self._next_R:
            next_R, has_next_R = self._next_R[name]
            follows_R = has_next_R & (lengths_R == 1)
            follows_R[follows_R] = values[column.offsets[:-1][follows_R]] == next_R[follows_R]
            self.streams[f"{name}/follows"] = follows_R
            values = np.delete(values, column.offsets[:-1][follows_R])
        self.add_values(name, values, lengths_R)

    def add_values(self, name: str, values: npt.NDArray[Any], lengths_U: IntArray) -> None:
        """Add lists, one after another, or dense values."""
        if values.dtype == np.float32:
            self.streams[name] = rotate_floats(values)
            return
        is_constant = bool((lengths_U == lengths_U[0]).all())
        self.streams[f"{name}/lengths"] = (lengths_U[:1] if is_constant else lengths_U).astype(np.int32)
        self._add_ids(name, values)

    def _add_ids(self, name: str, ids: IntArray) -> None:
        if self.encoder.encoding.features[name].placed:
            self.streams[name] = self.encoder.sequences[self.encoder.encoding.history_of(name)].place(ids)
        elif self.encoder.encoding.features[name].coded:
            self.streams[name], self.streams[f"{name}/rest"] = self.encoder.to_symbols(name, ids)
        else:
            self.streams[name] = ids

    def _add_windows(
        self, name: str, values: IntArray, lengths_U: IntArray, num_distinct_S: IntArray, inverse_R: IntArray
    ) -> None:
        sequence, sizes_S, starts_U = window_sessions(values, lengths_U, num_distinct_S)
        ends_U = starts_U + lengths_U
        if key := self.encoder.encoding.features[name].shared_by:
            store, keys_S, follower = self.encoder.sequences[name], self._keys(key), self.encoder.followers.get(name)
            is_last_U = ends_U == np.repeat(sizes_S, num_distinct_S)
            tails = self._tails(follower, is_last_U[inverse_R]) if follower else {}
            begins_S = store.lay(keys_S, sequence, sizes_S, tails=tails)
            ends_U += np.repeat(begins_S, num_distinct_S)
            if follower:
                next_U, has_next_U = store.following(np.repeat(keys_S, num_distinct_S), ends_U)
                self._next_R[follower] = next_U[inverse_R], has_next_U[inverse_R]
        else:
            self._add_ids(name, sequence)
        first_S = _starts(num_distinct_S)
        longest = lengths_U.max(keepdims=True)
        is_implied = np.array_equal(lengths_U, np.minimum(ends_U, longest))
        lengths = longest if is_implied else _differences(lengths_U, first_S)
        self.streams[f"{name}/lengths"] = lengths.astype(np.int32)
        ends = _differences(ends_U, first_S).astype(np.int32)
        if self.encoder.encoding.features[name].splits_ends:
            self.streams[f"{name}/first_ends"], ends = ends[first_S], np.delete(ends, first_S)
        self.streams[f"{name}/ends"] = ends

    def _tails(self, name: str, is_last_R: BoolArray) -> dict[int, int]:
        """By session, the first positive id of the follower whose history has come to its end."""
        column, label_R = Column.of(self.rows, name), self.rows.column(self.encoder.schema.labels[0]).to_numpy()
        rows = np.flatnonzero(is_last_R & (label_R > 0) & (np.diff(column.offsets) == 1))
        sessions, first = np.unique(self.record_R[rows], return_index=True)
        return dict(zip(sessions.tolist(), column.values[column.offsets[rows[first]]].tolist(), strict=True))

    def _keys(self, name: str) -> IntArray:
        """The user of each session: the first id of the feature in its first row."""
        column = Column.of(self.rows, name)
        offsets = column.offsets
        starts_S, ends_S = offsets[self.starts_S], offsets[self.starts_S + 1]
        keys_S = np.full(len(starts_S), NO_KEY)
        has_key_S = ends_S > starts_S
        keys_S[has_key_S] = column.values[starts_S[has_key_S]]
        return keys_S


def encode_sessions(
    rows: pa.Table,
    schema: Schema,
    encoding: Encoding,
    popular: Mapping[str, PopularIds] = MappingProxyType({}),
    *,
    codes: Mapping[str, NumberCode] = MappingProxyType({}),
) -> pa.Table:
    """Whole sessions, sorted by session and time, as the only record of a part, with the footer's metadata."""
    encoder = SessionEncoder(schema=schema, encoding=encoding, popular=popular, codes=codes)
    return encoder.encode(rows).replace_schema_metadata(encoder.metadata())


def rotate_floats(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """The bits of the values with the sign moved to the lowest bit, so that the exponent fills a byte of its own.

    Split into bytes, standard normal values then take 26.7 bits instead of 28.2; their entropy is 26.5.
    """
    bits = values.view(np.uint32)
    return ((bits << np.uint32(1)) | (bits >> np.uint32(31))).view(np.int32)


def mark_firsts(changed: BoolArray, first_R: BoolArray) -> BoolArray:
    """`changed` with a bit for every row; the first row of a session counts as a change."""
    changed_R = first_R.copy()
    changed_R[~first_R] = changed
    return changed_R


def time_in_ids(session_S: IntArray, divisor: int) -> IntArray:
    """The time with which the ids of sessions begin; 0 without a divisor."""
    return session_S // divisor if divisor else np.zeros_like(session_S)


def window_sessions(
    values: IntArray, lengths_U: IntArray, num_distinct_S: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """One sequence per session whose windows are its lists: all sequences, their sizes, and each list's start.

    A list that equals no other separates two sessions, so that no window crosses from one into the next.
    """
    if len(values) and values.min() < 0:  # raw ids before their transforms: any int64
        known, codes = np.unique(values, return_inverse=True)
        sequences, sizes_S, starts_U = window_sessions(codes, lengths_U, num_distinct_S)
        return known[sequences], sizes_S, starts_U
    num_sessions = len(num_distinct_S)
    first_S, value_starts_U = _starts(num_distinct_S), _starts(lengths_U)
    parted = np.insert(values, value_starts_U[first_S], -1 - np.arange(num_sessions))  # separators are below every id
    lengths = np.insert(lengths_U, first_S, 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    buffer, _, starts = window_rows(parted, offsets)
    positions = np.flatnonzero(buffer < 0)
    positions_S = positions[np.argsort(-buffer[positions])]
    if buffer[0] == -1:
        begins_S, ends_S = positions_S + 1, np.append(positions_S[1:], len(buffer))
    else:  # histories that grow at the front come last session first
        begins_S, ends_S = np.append(positions_S[1:] + 1, 0), positions_S
    starts_U = np.delete(starts, first_S + np.arange(num_sessions)) - np.repeat(begins_S, num_distinct_S)
    starts_U[lengths_U == 0] = 0
    sizes_S = ends_S - begins_S
    return take_windows(buffer, begins_S, sizes_S, num_threads=1), sizes_S, starts_U


def _one_list(stream: npt.NDArray[np.generic], kind: pa.DataType) -> pa.ListArray:
    offsets = pa.array([0, len(stream)], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(stream, kind.value_type), type=lists_of(kind.value_type))


def _starts(counts: IntArray) -> IntArray:
    starts: IntArray = np.cumsum(counts) - counts
    return starts


def _differences(numbers_U: IntArray, first_S: IntArray) -> IntArray:
    """The difference to the session's list before; the first list of a session keeps its number."""
    differences_U = np.diff(numbers_U, prepend=numbers_U[:1])
    differences_U[first_S] = numbers_U[first_S]
    return differences_U
