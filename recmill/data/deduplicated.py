"""The `deduplicated` layout: one record a session, each distinct list of it once, and an inverse.

    rows of a session:   tags  [7, 9]  [7, 9]  [4]  [7, 9]      item  [1] [5] [2] [3]

    column               in the record        says
    session_id           17
    first_timestamp      1000
    timestamp/gaps       [0, 20, 5, 90]       time since the sample before
    label                [0, 1, 0, 0]
    tags/inverse         [1, 0, 1, 2]         a new list; the same again; a new one; list 0 of the session again
    tags                 [7, 9, 4]            the distinct lists, one after another
    tags/lengths         [2, 1]               null: all the lists of the session are equally long
    item                 [1, 5, 2, 3]         plain: a list a sample
    item/lengths         null

Histories (`windows`) overlap: `history` is one sequence, `history/shifts` says by how much each distinct list starts
after the one before it, and `history/lengths` by how much it is longer. A feature's name never holds '/', so the
columns cannot clash. Ids may be stored as the codes of popular_ids.py; what they stand for is in the footer of the
part, which Arrow hands on with every table.

Shape suffixes: S = sessions (records), R = rows (samples), U = distinct rows of a group, N = values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from kernels import take_windows
from recmill.data.distinct import DistinctBlock, DistinctGroup
from recmill.data.encoding import Encoding
from recmill.data.popular_ids import load_popular_ids
from recmill.data.schema import Schema

IntArray = npt.NDArray[np.integer[Any]]


def decode_distinct(table: pa.Table, schema: Schema, encoding: Encoding) -> DistinctBlock:
    """The records of a row group as the reader wants them: arrays over Arrow's buffers, no copy of any list."""
    decoder = _Decoder(table, schema, encoding)
    dense_RF = np.empty((decoder.num_rows, len(schema.dense)), np.float32)
    for position, feature in enumerate(schema.dense):
        dense_RF[:, position] = decoder.dense(feature.name)
    id_names = [feature.name for feature in schema.id_features]
    return DistinctBlock(dense_RF=dense_RF, label_R=decoder.label_R, groups=decoder.groups(id_names))


def decode_rows(
    table: pa.Table, schema: Schema, encoding: Encoding, *, columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The records of a row group as rows, with all columns of the schema or some."""
    decoder = _Decoder(table, schema, encoding)
    everything = schema.arrow_schema()
    wanted = everything if columns is None else pa.schema([everything.field(name) for name in columns])
    lists = decoder.lists([field.name for field in wanted if pa.types.is_list(field.type)])
    arrays: list[pa.Array] = []
    for field in wanted:
        if field.name in lists:
            arrays.append(lists[field.name])
        elif field.name == "session_id":
            arrays.append(pa.array(np.repeat(table.column("session_id").to_numpy(), decoder.num_rows_S)))
        elif field.name == "timestamp":
            arrays.append(pa.array(decoder.timestamp_R()))
        else:
            arrays.append(pa.array(decoder.label_R if field.name == "label" else decoder.dense(field.name)))
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


class _Decoder:
    """Arrays of one row group's records; a group's inverse is decoded once however many features share it."""

    def __init__(self, table: pa.Table, schema: Schema, encoding: Encoding) -> None:
        self.table, self.schema, self.encoding = table, schema, encoding
        self.popular = load_popular_ids(table.schema.metadata)
        self.label_R, self.offsets_S = self._column("label")
        self.num_rows = len(self.label_R)
        self.num_rows_S = np.diff(self.offsets_S)
        self._inverses: dict[str, tuple[npt.NDArray[np.int32], IntArray]] = {}

    def _column(self, name: str) -> tuple[Any, IntArray]:
        """Values of all records, and where each record's begin (one entry more than records)."""
        column = self.table.column(name)
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        offsets = lists.offsets.to_numpy()
        values = lists.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy()
        return values, offsets - offsets[0] if offsets[0] else offsets

    def timestamp_R(self) -> npt.NDArray[np.int64]:
        gaps_R, _ = self._column("timestamp/gaps")
        since_R = np.cumsum(gaps_R)
        first_S = self.table.column("first_timestamp").to_numpy()
        timestamp_R: npt.NDArray[np.int64] = since_R + np.repeat(
            first_S - since_R[self.offsets_S[:-1]], self.num_rows_S
        )
        return timestamp_R

    def inverse(self, group: str) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Sample -> distinct row among those of all records, and the number of distinct rows of each record."""
        if group not in self._inverses:
            events_R, _ = self._column(f"{group}/inverse")
            is_new_R = events_R == 1
            inverse_R = np.cumsum(is_new_R, dtype=np.int32)
            num_distinct_S = np.diff(inverse_R[self.offsets_S[1:] - 1], prepend=0)
            inverse_R -= 1
            again_R = np.flatnonzero(events_R > 1)
            if len(again_R):  # an older list came back, and stays until the next event
                base_S = np.cumsum(num_distinct_S) - num_distinct_S
                record = np.searchsorted(self.offsets_S, again_R, side="right") - 1
                inverse_R[again_R] = base_S[record] + events_R[again_R] - 2
                last_event_R = np.maximum.accumulate(np.where(events_R != 0, np.arange(self.num_rows), 0))
                inverse_R = inverse_R[last_event_R]
            self._inverses[group] = (inverse_R, num_distinct_S)
        return self._inverses[group]

    def dense(self, name: str) -> npt.NDArray[np.float32]:
        values, _ = self._column(name)
        group = self.encoding.features[name].group
        dense_R: npt.NDArray[np.float32] = values[self.inverse(group)[0]] if group else values
        return dense_R

    def groups(self, names: Sequence[str]) -> tuple[DistinctGroup, ...]:
        """The id features `names`, those that share an inverse (or have none) together."""
        members: dict[str, list[str]] = {}
        for name in names:
            members.setdefault(self.encoding.features[name].group, []).append(name)
        groups = []
        for group, own in members.items():
            inverse_R, num_distinct_S = self.inverse(group) if group else (None, self.num_rows_S)
            decoded = [self._feature(name, num_distinct_S) for name in own]
            values, starts, lengths = zip(*decoded, strict=True)
            groups.append(
                DistinctGroup(keys=tuple(own), values=values, starts=starts, lengths=lengths, inverse_R=inverse_R)
            )
        return tuple(groups)

    def _feature(
        self, name: str, num_distinct_S: IntArray
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Values, and start and length of every distinct list."""
        values, offsets_S = self._column(name)
        if self.encoding.features[name].coded:
            values = self.popular[self.schema.feature(name).table].to_ids(values)
        if not self.encoding.features[name].windows:
            lengths_U = self._lengths(name, num_distinct_S, np.diff(offsets_S) // num_distinct_S)
            starts_U = np.cumsum(lengths_U, dtype=np.int64)
            starts_U -= lengths_U
            return values, starts_U, lengths_U
        shifts_U, first_S = self._column(f"{name}/shifts")
        first_S = first_S[:-1]
        starts_U = _add_up(shifts_U, first_S)
        lengths_U = self._lengths(name, num_distinct_S, np.diff(offsets_S) - np.maximum.reduceat(starts_U, first_S))
        starts_U += np.repeat(offsets_S[:-1], num_distinct_S)
        return values, starts_U, lengths_U

    def _lengths(self, name: str, num_distinct_S: IntArray, implied_S: IntArray) -> npt.NDArray[np.int32]:
        column = self.table.column(f"{name}/lengths")
        if column.null_count == len(column):
            return np.repeat(implied_S.astype(np.int32), num_distinct_S)
        stored, offsets_S = self._column(f"{name}/lengths")
        if self.encoding.features[name].windows:
            stored = _add_up(stored, offsets_S[:-1][np.diff(offsets_S) > 0]).astype(np.int32)
        if column.null_count == 0:
            lengths: npt.NDArray[np.int32] = stored
            return lengths
        is_stored_S = column.is_valid().to_numpy()
        lengths_U = np.repeat(implied_S.astype(np.int32), num_distinct_S)
        lengths_U[np.repeat(is_stored_S, num_distinct_S)] = stored
        return lengths_U

    def lists(self, names: Sequence[str]) -> dict[str, pa.ListArray]:
        """A list a sample for each of the id features."""
        found = {}
        for group in self.groups(names):
            for name, values, starts_U, lengths_U in zip(
                group.keys, group.values, group.starts, group.lengths, strict=True
            ):
                is_own = group.inverse_R is None
                starts_R = torch.from_numpy(starts_U if is_own else starts_U[group.inverse_R])
                lengths_R = torch.from_numpy((lengths_U if is_own else lengths_U[group.inverse_R]).astype(np.int64))
                ids = from_dlpack(pa.array(values)) if len(values) else torch.empty(0, dtype=torch.int64)
                taken = take_windows(ids, starts_R, lengths_R)
                offsets = np.zeros(self.num_rows + 1, np.int32)
                np.cumsum(lengths_R.numpy(), out=offsets[1:])
                found[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(taken.numpy()))
        return found


def _add_up(differences_U: IntArray, first_S: IntArray) -> npt.NDArray[np.int64]:
    """Sums of the differences from each of `first_S` on."""
    sums_U = np.cumsum(differences_U, dtype=np.int64)
    counts_S = np.diff(first_S, append=len(sums_U))
    sums_U -= np.repeat(sums_U[first_S] - differences_U[first_S], counts_S)
    return sums_U
