"""The `deduplicated` layout: one record per row group, each distinct list of a session once, and an inverse.

    rows of two sessions:   tags  [7, 9]  [7, 9]  [4]  [7, 9]  | [4]     item  [1] [5] [2] [3] | [1]

    column               stream               one number for
    session_id           [17, 18]             each session
    session/num_rows     [4, 1]               each session
    timestamp/first      [1000, 1010]         each session
    timestamp/gaps       [20, 5, 90]          each row except a session's first: time since the row before
    label                [0, 1, 0, 0, 1]      each row
    tags/changed         [no, yes, yes]       each row except a session's first: does the list change?
    tags/again           [0, 1]               each row that changed: 0 for a new list, 1 + k for the session's k-th list
    tags                 [7, 9, 4, 4]         each id of the distinct lists, one list after another
    tags/lengths         [2, 1, 1]            each distinct list; a single number stands for all
    item                 [1, 5, 2, 3, 1]      plain: one list per row
    item/lengths         [1]

Each column is one long list, so that Parquet stores neither nulls nor the ends of sessions a second time. Dense values
are stored as integers (`rotate_floats`); ids may be the symbols of popular_ids.py, with `tags/rest` for the bytes that
follow them, and timestamps those of numbers.py, a session's first one less the time in its id.

Histories (`windows`) overlap: `history` is one sequence per session, `history/ends` says where each distinct list ends
in it (the session's first end, then differences), `history/lengths` how long it is (likewise; or one number n: the last
n ids, or fewer where its end comes sooner). Where users come back, their sessions share one sequence in the footer
(sequences.py), which Arrow passes on with every table; `history/first_ends` then holds the first end of each session,
and an item that follows its row's history there is not stored again where `item/follows` says so. Names of features
never contain '/', so columns cannot clash.

Shape suffixes: S = sessions, R = rows (samples), U = distinct rows of a group, C = rows that changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import decode_inverse, decode_windows
from recmill.data.ikjt.distinct import DistinctBlock, DistinctGroup, stack_labels, stack_rows, take_lists
from recmill.data.schema import Schema
from recmill.data.storage.encoding import Encoding
from recmill.data.storage.numbers import load_code
from recmill.data.storage.popular_ids import PopularIds, load_popular_ids
from recmill.data.storage.sequences import Sequences, load_sequences, places_of
from recmill.data.storage.session_encoder import NO_KEY, time_in_ids


def decode_distinct(
    table: pa.Table,
    schema: Schema,
    encoding: Encoding,
    *,
    keeps_sessions: bool = False,
    wanted: Schema | None = None,
) -> DistinctBlock:
    """The record of a row group with every distinct list once, as the reader wants it: all features or some."""
    wanted = wanted or schema
    decoder = _Decoder(table, schema, encoding)
    dense_RF = np.empty((decoder.num_rows, len(wanted.dense)), np.float32)
    for position, feature in enumerate(wanted.dense):
        dense_RF[:, position] = decoder.dense(feature.name)
    id_names = [feature.name for feature in wanted.id_features]
    return DistinctBlock(
        dense_RF=dense_RF,
        label_RT=stack_labels([decoder.stream(name) for name in schema.labels]),
        groups=decoder.groups(id_names),
        session_R=decoder.session_R() if keeps_sessions else None,
    )


def session_sizes(table: pa.Table) -> npt.NDArray[np.int64]:
    """The number of rows of each session in the record of a row group."""
    sizes_S: npt.NDArray[np.int64] = table.column("session/num_rows")[0].values.to_numpy().astype(np.int64)
    return sizes_S


def decode_rows(
    table: pa.Table, schema: Schema, encoding: Encoding, *, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The record of a row group as rows, with all columns of the schema or some."""
    decoder = _Decoder(table, schema, encoding)
    everything = schema.arrow_schema()
    wanted = everything if columns is None else pa.schema([everything.field(name) for name in columns])
    lists = decoder.lists([field.name for field in wanted if pa.types.is_list(field.type)])
    arrays: list[pa.Array] = []
    for field in wanted:
        if field.name in lists:
            arrays.append(lists[field.name])
        elif field.name == "session_id":
            arrays.append(pa.array(decoder.session_R()))
        elif field.name == "timestamp":
            arrays.append(pa.array(decoder.timestamp_R()))
        else:
            is_label = field.name in schema.labels
            arrays.append(pa.array(decoder.stream(field.name) if is_label else decoder.dense(field.name)))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


ListsU = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]  # values, starts_U, lengths_U


class _Decoder:
    """Arrays of one row group; streams that features share are decoded once."""

    def __init__(self, table: pa.Table, schema: Schema, encoding: Encoding) -> None:
        assert table.num_rows == 1, "a row group is one record"
        self.table, self.schema, self.encoding = table, schema, encoding
        self.num_rows = len(self.stream(schema.labels[0]))
        self.num_rows_S = self.stream("session/num_rows")
        self.starts_S = np.cumsum(self.num_rows_S) - self.num_rows_S
        self._metadata = table.schema.metadata  # Arrow copies the footer's text on every access
        self._inverses: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = {}
        self._features: dict[str, ListsU] = {}
        self._shared: dict[str, tuple[Sequences, npt.NDArray[np.int64]]] = {}
        self._placed: dict[str, npt.NDArray[np.int64]] = {}
        self._merged_ends: dict[str, npt.NDArray[np.int32]] = {}
        self._equal: dict[tuple[str, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = {}

    def stream(self, name: str) -> Any:
        """The numbers of a column, copied only if they are bits."""
        return self.table.column(name)[0].values.to_numpy(zero_copy_only=False)

    @cached_property
    def is_other_R(self) -> npt.NDArray[np.bool_]:
        """Whether a row is not the first of its session."""
        is_other_R = np.ones(self.num_rows, np.bool_)
        is_other_R[self.starts_S] = False
        return is_other_R

    def _spread(self, others: npt.NDArray[Any], *, first: Any) -> npt.NDArray[Any]:
        """One value per row from those of all rows except a session's first, which get `first`."""
        spread_R = np.empty(self.num_rows, others.dtype)
        spread_R[self.is_other_R] = others
        spread_R[self.starts_S] = first
        return spread_R

    def session_R(self) -> npt.NDArray[np.int64]:
        session_R: npt.NDArray[np.int64] = np.repeat(self.stream("session_id"), self.num_rows_S)
        return session_R

    def timestamp_R(self) -> npt.NDArray[np.int64]:
        times = self.encoding.times
        since_R = np.cumsum(self._spread(self._gaps(), first=0))
        first_S = self._numbers("timestamp/first", times.first_coded)
        first_S = first_S + time_in_ids(self.stream("session_id"), times.divisor)
        timestamp_R: npt.NDArray[np.int64] = since_R + np.repeat(first_S - since_R[self.starts_S], self.num_rows_S)
        return timestamp_R

    def _gaps(self) -> npt.NDArray[np.int64]:
        times = self.encoding.times
        gaps = self._numbers("timestamp/gaps", times.gaps_coded)
        if not times.split_by:
            return gaps
        bits, num_bits, first_bit = self._changed(times.split_by)
        changed = np.unpackbits(bits, bitorder="little")[first_bit : first_bit + num_bits].astype(np.bool_)
        merged = np.empty(len(changed), np.int64)
        merged[changed], merged[~changed] = gaps, self.stream("timestamp/still")
        return merged

    def _numbers(self, column: str, is_coded: bool) -> npt.NDArray[np.int64]:
        stored: npt.NDArray[Any] = self.stream(column)
        return (
            load_code(self._metadata, column).to_numbers(stored, self.stream(f"{column}/rest")) if is_coded else stored
        )

    def inverse(self, group: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The distinct row of each sample, counted over all sessions, and the number of distinct rows per session."""
        if group not in self._inverses:
            bits, num_bits, first_bit = self._changed(group)
            self._inverses[group] = decode_inverse(
                self.num_rows_S, bits, self.stream(f"{group}/again"), num_bits=num_bits, first_bit=first_bit
            )
        return self._inverses[group]

    def _changed(self, group: str) -> tuple[npt.NDArray[np.uint8], int, int]:
        """Whether each row except a session's first differs from the one before: bits, their number, the first one."""
        changed = self.table.column(f"{group}/changed")[0].values
        if self.encoding.features[group].marks_firsts:
            others = changed.to_numpy(zero_copy_only=False)[self.is_other_R]
            return np.packbits(others, bitorder="little"), len(others), 0
        bits = changed.buffers()[1]
        return np.frombuffer(bits, np.uint8) if len(changed) else np.empty(0, np.uint8), len(changed), changed.offset

    def dense(self, name: str) -> npt.NDArray[np.float32]:
        rotated = self.stream(name).view(np.uint32)
        values = ((rotated >> np.uint32(1)) | (rotated << np.uint32(31))).view(np.float32)
        group = self.encoding.features[name].group
        dense_R: npt.NDArray[np.float32] = values[self.inverse(group)[0]] if group else values
        return dense_R

    def groups(self, names: Sequence[str]) -> tuple[DistinctGroup, ...]:
        """The id features `names`, grouped by the inverse that they share; those without one form a group too."""
        members: dict[str, list[str]] = {}
        for name in names:
            members.setdefault(self.encoding.features[name].group, []).append(name)
        groups = []
        for group, own in members.items():
            inverse_R = self.inverse(group)[0] if group else None
            values, starts, lengths = zip(*map(self._feature, own), strict=True)
            groups.append(
                DistinctGroup(
                    keys=tuple(own),
                    values=values,
                    starts_FU=stack_rows(starts),
                    lengths_FU=stack_rows(lengths),
                    inverse_R=inverse_R,
                )
            )
        return tuple(groups)

    def _num_distinct(self, name: str) -> npt.NDArray[np.int64]:
        group = self.encoding.features[name].group
        return self.inverse(group)[1] if group else self.num_rows_S.astype(np.int64)

    def _feature(self, name: str) -> ListsU:
        if name not in self._features:
            windows = self.encoding.features[name].windows
            self._features[name] = self._windows(name) if windows else self._lists(name)
        return self._features[name]

    def _popular(self, name: str) -> PopularIds | None:
        if not self.encoding.features[name].coded:
            return None
        return load_popular_ids(self._metadata, self.schema.feature(name).table)

    def _ids(self, name: str) -> npt.NDArray[np.int64]:
        popular, stored = self._popular(name), self.stream(name)
        if self.encoding.features[name].placed:
            return self._store(self.encoding.history_of(name)).keys[self._places(name)]
        return stored if popular is None else popular.to_ids(stored, self.stream(f"{name}/rest"))

    def _lists(self, name: str) -> ListsU:
        lengths_U = self.stream(f"{name}/lengths")
        if len(lengths_U) == 1:
            starts_U, lengths_U = self._equal_lists(self.encoding.features[name].group, int(lengths_U[0]))
        else:
            starts_U = np.cumsum(lengths_U, dtype=np.int64)
            starts_U -= lengths_U
        if history := self.encoding.features[name].follows:
            return self._followed(name, history, starts_U), starts_U, lengths_U
        return self._ids(name), starts_U, lengths_U

    def _followed(self, name: str, history: str, starts_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The ids of a follower: those that are stored, and between them those that follow their row's history."""
        row_F = np.flatnonzero(self.stream(f"{name}/follows"))
        at_F, stored = starts_R[row_F], self._ids(name)
        values = np.empty(len(stored) + len(row_F), np.int64)
        is_stored = np.ones(len(values), np.bool_)
        is_stored[at_F] = False
        np.place(values, is_stored, stored)
        values[at_F] = self._next_ids(history, self.inverse(self.encoding.features[history].group)[0][row_F])
        return values

    def _next_ids(self, history: str, window_F: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """The ids that follow some windows of a shared history."""
        sequences, begins_S = self._sequences(history)
        steps_U, num_distinct_S = self._ends(history), self._num_distinct(history)
        ends_U = np.cumsum(steps_U, dtype=np.int64)
        first_S = np.cumsum(num_distinct_S) - num_distinct_S
        ends_U += np.repeat(begins_S - ends_U[first_S] + steps_U[first_S], num_distinct_S)
        at_F = ends_U[window_F]
        if len(at_F) and not 0 <= int(at_F.min()) <= int(at_F.max()) < len(sequences.values):
            raise ValueError(f"an id follows a window that ends outside of its {len(sequences.values)} values")
        next_F: npt.NDArray[np.int64] = sequences.values[at_F]
        return next_F

    def _sequences(self, history: str) -> tuple[Sequences, npt.NDArray[np.int64]]:
        """The sequences of a shared history, and where that of each session's user begins."""
        if history not in self._shared:
            sequences, key = self._store(history), self.encoding.features[history].shared_by
            # All stores of a user know the same places; a search takes longer than all the rest of a history.
            place_S = self._first_ids(key, self._places(key)) if self.encoding.features[key].placed else None
            if place_S is not None:
                self._shared[history] = sequences, sequences.offsets[place_S]
            else:
                self._shared[history] = sequences, sequences.begins(self._keys(key))
        return self._shared[history]

    def _places(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._placed:
            places, num_users = places_of(self.stream(name)), len(self._store(self.encoding.history_of(name)).keys)
            if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_users:
                raise ValueError(f"{name}: a place is outside of the {num_users} users of the part")
            self._placed[name] = places
        return self._placed[name]

    def _store(self, history: str) -> Sequences:
        return load_sequences(self._metadata, history, self._popular(history))

    def _equal_lists(self, group: str, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Starts and lengths of a group's lists that all have one length; its features share them."""
        if (group, length) not in self._equal:
            count = int(self.inverse(group)[1].sum()) if group else self.num_rows
            starts_U = np.arange(0, count * length, length) if length else np.zeros(count, np.int64)
            self._equal[group, length] = starts_U, np.full(count, length, np.int32)
        return self._equal[group, length]

    def _windows(self, name: str) -> ListsU:
        windows = self._ends(name), self.stream(f"{name}/lengths"), self._num_distinct(name)
        if not self.encoding.features[name].shared_by:
            return decode_windows(self._ids(name), *windows)
        sequences, begins_S = self._sequences(name)
        return decode_windows(sequences.values, *windows, begins_S=begins_S)

    def _ends(self, name: str) -> npt.NDArray[np.int32]:
        """How far each window's end is from that of the session's window before, or from the begin of the sequence."""
        steps: npt.NDArray[np.int32] = self.stream(f"{name}/ends")
        if not self.encoding.features[name].splits_ends:
            return steps
        if name in self._merged_ends:
            return self._merged_ends[name]
        num_distinct_S = self._num_distinct(name)
        first_S = np.cumsum(num_distinct_S) - num_distinct_S
        is_other_U = np.ones(len(first_S) + len(steps), np.bool_)
        is_other_U[first_S] = False
        steps_U = np.empty(len(is_other_U), np.int32)
        steps_U[is_other_U], steps_U[first_S] = steps, self.stream(f"{name}/first_ends")
        self._merged_ends[name] = steps_U
        return steps_U

    def _first_ids(self, name: str, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """The value of each session's first row, given those of all lists; None if some list there is empty."""
        _, starts_U, lengths_U = self._feature(name)
        num_distinct_S = self._num_distinct(name)
        first_S = np.cumsum(num_distinct_S) - num_distinct_S
        return values[starts_U[first_S]] if (lengths_U[first_S] > 0).all() else None

    def _keys(self, name: str) -> npt.NDArray[np.int64]:
        """The user of each session: the first id of the feature in its first row."""
        values, starts_U, lengths_U = self._feature(name)
        num_distinct_S = self._num_distinct(name)
        first_S = np.cumsum(num_distinct_S) - num_distinct_S
        keys_S = np.full(len(first_S), NO_KEY)
        has_key_S = lengths_U[first_S] > 0
        keys_S[has_key_S] = values[starts_U[first_S[has_key_S]]]
        return keys_S

    def lists(self, names: Sequence[str]) -> dict[str, pa.ListArray]:
        """One list per sample for each of the id features."""
        found = {}
        for group in self.groups(names):
            for name, values, starts_U, lengths_U in group.features():
                row_R = slice(None) if group.inverse_R is None else group.inverse_R
                taken = take_lists(values, starts_U[row_R], lengths_U[row_R])
                offsets = np.zeros(self.num_rows + 1, np.int32)
                np.cumsum(lengths_U[row_R], out=offsets[1:])
                found[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(taken))
        return found
