"""Writes whole sessions as the records of the `deduplicated` layout (see deduplicated.py for what they look like).

Shape suffixes: S = sessions (records), R = rows (samples), U = distinct rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kernels import take_rows, take_windows, window_rows
from recmill.data.encoding import Column, Encoding, dedup_in_sessions, inverse_events, lists_of, record_schema
from recmill.data.popular_ids import PopularIds
from recmill.data.schema import Schema


class _Encoder:
    """The records of one row group, a column at a time."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self.session_R = from_dlpack(rows.column("session_id").combine_chunks())
        changes_R = torch.ones(len(self.session_R), dtype=torch.bool)
        changes_R[1:] = self.session_R[1:] != self.session_R[:-1]
        self.starts_S = torch.nonzero(changes_R).reshape(-1)
        self.record_R = torch.cumsum(changes_R, 0) - 1
        self.num_rows_S = _counts(self.record_R, self.starts_S)
        self.columns: dict[str, pa.Array] = {}

    def add_keys(self) -> None:
        timestamp_R = from_dlpack(self.rows.column("timestamp").combine_chunks())
        gaps_R = timestamp_R.diff(prepend=timestamp_R[:1])
        gaps_R[self.starts_S] = 0
        self.columns["session_id"] = _array(self.session_R[self.starts_S])
        self.columns["first_timestamp"] = _array(timestamp_R[self.starts_S])
        self.columns["timestamp/gaps"] = _lists(gaps_R, self.num_rows_S)
        self.columns["label"] = _lists(Column.of(self.rows, "label").values, self.num_rows_S)

    def add_plain(self, name: str) -> None:
        column = Column.of(self.rows, name)
        self._add_lists(name, column.values, column.offsets.diff(), self.num_rows_S)

    def add_group(self, group: str, names: Sequence[str], encoding: Encoding) -> None:
        columns = [Column.of(self.rows, name) for name in names]
        unique_U, inverse_R = dedup_in_sessions(self.session_R, columns)
        base_R = inverse_R[self.starts_S][self.record_R]  # a session's first row is its first distinct one
        self.columns[f"{group}/inverse"] = _lists(
            torch.from_numpy(inverse_events(unique_U, inverse_R, base_R)), self.num_rows_S
        )
        record_U = self.record_R[unique_U]
        num_distinct_S = _counts(record_U, self.starts_S)
        for name, column in zip(names, columns, strict=True):
            values, lengths_U = take_rows([column.values], [column.offsets], unique_U)
            if encoding.features[name].windows:
                self._add_windows(name, values, lengths_U, num_distinct_S)
            else:
                self._add_lists(name, values, lengths_U, num_distinct_S)

    def _add_lists(self, name: str, values: Tensor, lengths_U: Tensor, num_distinct_S: Tensor) -> None:
        first_S = _starts(num_distinct_S)
        num_values_S = _sum_by_record(lengths_U, first_S)
        self.columns[name] = _lists(values, num_values_S)
        if values.dtype == torch.int64:
            implied_S = num_values_S // num_distinct_S
            self._add_lengths(name, lengths_U, num_distinct_S, implied_S, stored_U=lengths_U)

    def _add_windows(self, name: str, values: Tensor, lengths_U: Tensor, num_distinct_S: Tensor) -> None:
        sequence, num_values_S, starts_U = window_sessions(values, lengths_U, num_distinct_S)
        first_S = _starts(num_distinct_S)
        self.columns[name] = _lists(sequence, num_values_S)
        self.columns[f"{name}/shifts"] = _lists(_differences(starts_U, first_S).int(), num_distinct_S)
        # The window that starts last ends where the sequence does, if all are equally long.
        implied_S = num_values_S - _max_by_record(starts_U, first_S)
        self._add_lengths(name, lengths_U, num_distinct_S, implied_S, stored_U=_differences(lengths_U, first_S))

    def _add_lengths(
        self, name: str, lengths_U: Tensor, num_distinct_S: Tensor, implied_S: Tensor, *, stored_U: Tensor
    ) -> None:
        """What is stored of the lengths, for the sessions in which they are not those that a reader finds by itself."""
        record_U = torch.repeat_interleave(num_distinct_S)
        differs_U = lengths_U != implied_S[record_U]
        is_stored_S = torch.zeros(len(num_distinct_S), dtype=torch.bool)
        is_stored_S[record_U[differs_U]] = True
        stored = _lists(stored_U[is_stored_S[record_U]].int(), num_distinct_S * is_stored_S)
        mask = pa.array(~is_stored_S.numpy())
        self.columns[f"{name}/lengths"] = pa.ListArray.from_arrays(
            stored.offsets, stored.values, type=stored.type, mask=mask
        )


def encode_sessions(
    rows: pa.Table, schema: Schema, encoding: Encoding, popular: Mapping[str, PopularIds] = MappingProxyType({})
) -> pa.Table:
    """Whole sessions, sorted by session and time, as one record a session; `popular` has the codes of tables."""
    encoder = _Encoder(rows)
    encoder.add_keys()
    for group, names in encoding.groups.items():
        encoder.add_group(group, names, encoding)
    for name in encoding.plain:
        encoder.add_plain(name)
    wanted = record_schema(schema, encoding)
    for feature in schema.id_features:
        if encoding.features[feature.name].coded:
            lists = encoder.columns[feature.name]
            codes = popular[feature.table].to_codes(lists.values.to_numpy())
            kind = wanted.field(feature.name).type
            elements = pa.array(codes.astype(kind.value_type.to_pandas_dtype(), copy=False))
            encoder.columns[feature.name] = pa.ListArray.from_arrays(lists.offsets, elements, type=kind)
    arrays = [encoder.columns[name] for name in wanted.names]
    return pa.Table.from_arrays(arrays, schema=wanted)


def window_sessions(values: Tensor, lengths_U: Tensor, num_distinct_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence a session in which its lists are windows: all sequences, their sizes, and starts in one's own.

    Between two sessions lies a list that equals no other, so that no window crosses from one into the next.
    """
    if values.numel() and int(values.min()) < 0:  # raw ids that transforms will map: any int64
        known, codes = torch.unique(values, return_inverse=True)
        sequences, sizes_S, starts_U = window_sessions(codes, lengths_U, num_distinct_S)
        return known[sequences], sizes_S, starts_U
    num_sessions = len(num_distinct_S)
    first_S, value_starts_U = _starts(num_distinct_S), _starts(lengths_U)
    separators = -1 - torch.arange(num_sessions)  # below every id
    at = value_starts_U[first_S].numpy()
    parted = torch.from_numpy(np.insert(values.numpy(), at, separators.numpy()))
    lengths = torch.from_numpy(np.insert(lengths_U.numpy(), first_S.numpy(), 1))
    buffer, _, starts = window_rows(parted, _offsets(lengths))
    is_list = torch.ones(len(lengths), dtype=torch.bool)
    is_list[first_S + torch.arange(num_sessions)] = False
    positions = torch.nonzero(buffer < 0).reshape(-1)
    positions_S = positions[torch.argsort(buffer[positions], descending=True)]
    if buffer[0] == -1:
        begins_S = positions_S + 1
        ends_S = torch.cat([positions_S[1:], positions_S.new_tensor([len(buffer)])])
    else:  # histories that grow at the front are laid last session first
        begins_S = torch.cat([positions_S[1:] + 1, positions_S.new_zeros(1)])
        ends_S = positions_S
    starts_U = starts[is_list] - torch.repeat_interleave(begins_S, num_distinct_S)
    starts_U[lengths_U == 0] = 0
    return take_windows(buffer, begins_S, ends_S - begins_S), ends_S - begins_S, starts_U


def _array(values: Tensor) -> pa.Array:
    return pa.array(values.numpy())


def _lists(values: Tensor, counts_S: Tensor) -> pa.ListArray:
    offsets = pa.array(_offsets(counts_S).int().numpy())
    elements = _array(values.contiguous())
    return pa.ListArray.from_arrays(offsets, elements, type=lists_of(elements.type))


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


def _starts(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _differences(numbers_U: Tensor, first_S: Tensor) -> Tensor:
    """From one list of a session to the next; a session's first is itself."""
    differences_U = numbers_U.diff(prepend=numbers_U[:1])
    differences_U[first_S] = numbers_U[first_S]
    return differences_U


def _counts(record: Tensor, starts_S: Tensor) -> Tensor:
    return torch.bincount(record, minlength=len(starts_S))


def _sum_by_record(numbers_U: Tensor, first_S: Tensor) -> Tensor:
    return torch.from_numpy(np.add.reduceat(numbers_U.numpy(), first_S.numpy()))


def _max_by_record(numbers_U: Tensor, first_S: Tensor) -> Tensor:
    return torch.from_numpy(np.maximum.reduceat(numbers_U.numpy(), first_S.numpy()))
