"""Writes whole sessions as the records of the `deduplicated` layout (see deduplicated.py for what they look like).

Shape suffixes: S = sessions, R = rows (samples), U = distinct rows of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kernels import take_rows, take_windows, window_rows
from recmill.data.memory_plan import MAX_SHARED_IDS
from recmill.data.schema import Schema
from recmill.data.storage.encoding import (
    Column,
    Encoding,
    dedup_in_sessions,
    inverse_events,
    lists_of,
    record_schema,
    session_firsts,
)
from recmill.data.storage.popular_ids import Bytes, PopularIds, dump_popular_ids
from recmill.data.storage.sequences import SequenceWriter

NO_KEY = np.iinfo(np.int64).min  # of a session whose first row does not say whose it is


class SessionEncoder:
    """Makes the records of one part; what they share goes into its footer."""

    def __init__(
        self, *, schema: Schema, encoding: Encoding, popular: Mapping[str, PopularIds], max_ids: int = MAX_SHARED_IDS
    ) -> None:
        """`max_ids`: of histories that sessions share, after which the part is full."""
        self.schema, self.encoding, self.popular, self._max_ids = schema, encoding, popular, max_ids
        self.arrow_schema = record_schema(schema, encoding)
        self._used = {table: np.zeros(len(own.ids), np.bool_) for table, own in popular.items()}
        self.sequences = {name: SequenceWriter() for name, own in encoding.features.items() if own.shared_by}

    def encode(self, rows: pa.Table) -> pa.Table:
        """A record of whole sessions, sorted by session and time."""
        record = _Record(rows, self)
        record.add_keys()
        for group, names in self.encoding.groups.items():
            record.add_group(group, names)
        for name in self.encoding.plain:
            column = Column.of(rows, name)
            record.add_values(name, column.values, column.offsets.diff())
        arrays = [_one_list(record.streams[field.name], field.type) for field in self.arrow_schema]
        return pa.Table.from_arrays(arrays, schema=self.arrow_schema)

    @property
    def is_full(self) -> bool:
        """Whether the footer has become as large as a reader should have to hold."""
        return sum(own.num_ids for own in self.sequences.values()) >= self._max_ids

    def metadata(self) -> dict[bytes, bytes]:
        """What the footer must say."""
        found: dict[bytes, bytes] = {}
        for name, own in self.sequences.items():
            coded = self.encoding.features[name].coded
            found |= own.dump(name, partial(self.to_symbols, name) if coded else None)
        for table, popular in self.popular.items():
            found |= dump_popular_ids(table, popular, self._used[table])
        return found

    def to_symbols(self, name: str, ids: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """The ids of a feature as symbols, and the bytes that follow them."""
        table = self.schema.feature(name).table
        return self.popular[table].to_symbols(ids, used=self._used[table])


class _Record:
    """The streams of one row group, by the name of their column."""

    def __init__(self, rows: pa.Table, encoder: SessionEncoder) -> None:
        self.rows, self.encoder = rows, encoder
        self.session_R = from_dlpack(rows.column("session_id").combine_chunks())
        self.first_R = session_firsts(self.session_R)
        self.starts_S = torch.nonzero(self.first_R).reshape(-1)
        self.record_R = torch.cumsum(self.first_R, 0) - 1
        self.streams: dict[str, npt.NDArray[np.generic]] = {}

    def add_keys(self) -> None:
        timestamp_R = from_dlpack(self.rows.column("timestamp").combine_chunks())
        gaps_R = timestamp_R.diff(prepend=timestamp_R[:1])
        self.streams |= {
            "session_id": self.session_R[self.starts_S].numpy(),
            "session/num_rows": self._count(self.record_R).int().numpy(),
            "timestamp/first": timestamp_R[self.starts_S].numpy(),
            "timestamp/last": timestamp_R.max().reshape(1).numpy(),
            "timestamp/gaps": gaps_R[~self.first_R].numpy(),
            "label": Column.of(self.rows, "label").values.numpy(),
        }

    def _count(self, session: Tensor) -> Tensor:
        return torch.bincount(session, minlength=len(self.starts_S))

    def add_group(self, group: str, names: Sequence[str]) -> None:
        columns = [Column.of(self.rows, name) for name in names]
        unique_U, inverse_R = dedup_in_sessions(self.session_R, columns)
        changed, again = inverse_events(unique_U, inverse_R, self.first_R)
        self.streams |= {f"{group}/changed": changed, f"{group}/again": again}
        num_distinct_S = self._count(self.record_R[unique_U])
        for name, column in zip(names, columns, strict=True):
            values, lengths_U = take_rows([column.values], [column.offsets], unique_U)
            if self.encoder.encoding.features[name].windows:
                self._add_windows(name, values, lengths_U, num_distinct_S)
            else:
                self.add_values(name, values, lengths_U)

    def add_values(self, name: str, values: Tensor, lengths_U: Tensor) -> None:
        """Lists one after another, or a dense value each."""
        if values.dtype == torch.float32:
            self.streams[name] = rotate_floats(values.numpy())
            return
        self.streams[f"{name}/lengths"] = _unless_constant(lengths_U.int().numpy())
        self._add_ids(name, values.numpy())

    def _add_ids(self, name: str, ids: npt.NDArray[np.int64]) -> None:
        if self.encoder.encoding.features[name].coded:
            self.streams[name], self.streams[f"{name}/rest"] = self.encoder.to_symbols(name, ids)
        else:
            self.streams[name] = ids

    def _add_windows(self, name: str, values: Tensor, lengths_U: Tensor, num_distinct_S: Tensor) -> None:
        sequence, sizes_S, starts_U = window_sessions(values, lengths_U, num_distinct_S)
        ends_U = starts_U + lengths_U
        if key := self.encoder.encoding.features[name].shared_by:
            begins_S = self.encoder.sequences[name].lay(self._keys(key), sequence.numpy(), sizes_S.numpy())
            ends_U += torch.repeat_interleave(torch.from_numpy(begins_S), num_distinct_S)
        else:
            self._add_ids(name, sequence.numpy())
        first_S = _starts(num_distinct_S)
        longest = lengths_U.max()
        is_implied = torch.equal(lengths_U, torch.clamp(ends_U, max=longest))
        lengths = longest.reshape(1) if is_implied else _differences(lengths_U, first_S)
        self.streams[f"{name}/lengths"] = lengths.int().numpy()
        self.streams[f"{name}/ends"] = _differences(ends_U, first_S).int().numpy()

    def _keys(self, name: str) -> npt.NDArray[np.int64]:
        """Whose each session is: the first id of the feature in its first row."""
        column = Column.of(self.rows, name)
        starts_S, ends_S = column.offsets[self.starts_S], column.offsets[self.starts_S + 1]
        keys_S = torch.full_like(starts_S, NO_KEY)
        has_key_S = ends_S > starts_S
        keys_S[has_key_S] = column.values[starts_S[has_key_S]]
        return keys_S.numpy()


def encode_sessions(
    rows: pa.Table, schema: Schema, encoding: Encoding, popular: Mapping[str, PopularIds] = MappingProxyType({})
) -> pa.Table:
    """Whole sessions, sorted by session and time, as a part with one record would hold them, its footer's text too."""
    encoder = SessionEncoder(schema=schema, encoding=encoding, popular=popular)
    return encoder.encode(rows).replace_schema_metadata(encoder.metadata())


def rotate_floats(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """Their bits with the sign at the other end, so that the exponent fills a byte of its own.

    Standard normal values take 26.7 bits split into bytes then, and 28.2 as they are; 26.5 is their entropy.
    """
    bits = values.view(np.uint32)
    return ((bits << np.uint32(1)) | (bits >> np.uint32(31))).view(np.int32)


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


def _one_list(stream: npt.NDArray[np.generic], kind: pa.DataType) -> pa.ListArray:
    offsets = pa.array([0, len(stream)], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(stream, kind.value_type), type=lists_of(kind.value_type))


def _unless_constant(lengths_U: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return lengths_U[:1] if (lengths_U == lengths_U[0]).all() else lengths_U


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])


def _starts(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _differences(numbers_U: Tensor, first_S: Tensor) -> Tensor:
    """From one list of a session to the next; a session's first is itself."""
    differences_U = numbers_U.diff(prepend=numbers_U[:1])
    differences_U[first_S] = numbers_U[first_S]
    return differences_U
