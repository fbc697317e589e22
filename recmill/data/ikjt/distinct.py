"""Decoded rows of a row group with each repeated list stored once: transforms run on it, batches are cut from it.

Shape suffixes: R = rows (samples) of the row group, U = distinct rows of a group, F = dense features, T = labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kernels import dedup_rows, take_rows, take_windows, window_rows
from recmill.artifacts import InputError
from recmill.data.schema import Schema

if TYPE_CHECKING:
    from recmill.data.ikjt.batch import RowBlock

IdArray = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.int32]
Rows = slice | npt.NDArray[np.integer]
Number = TypeVar("Number", bound=np.generic)

# Below this factor, the saved copies do not pay for the inverse and the expansion.
MIN_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctGroup:
    """Features that share one inverse, each distinct row stored once. Row u of the f-th feature is

        values[f][starts_FU[f, u] : starts_FU[f, u] + lengths_FU[f, u]]

    so lists may follow one another or be overlapping windows of a history. `inverse_R` maps a sample to its distinct
    row; None means that every sample has its own (U = R). The other fields are for cutting: `pack_block` sets them.
    """

    keys: tuple[str, ...]
    values: tuple[IdArray, ...]  # the same buffer for all features if lists have to be picked one by one
    starts_FU: IdArray
    lengths_FU: LengthArray
    inverse_R: LengthArray | None = None
    # Neighbouring samples mostly use neighbouring distinct rows: `breaks_R` counts, up to each sample, those whose
    # distinct row is neither the one before nor the next. Samples with the same count use all rows between theirs.
    breaks_R: LengthArray | None = None
    is_packed: bool = False  # each list begins where the one before it ends, so a range of rows is one run of values
    is_expanded: bool = False  # batches hold one list per sample, although the lists are stored once
    keeps_windows: bool = False
    ids_FR: IdArray | None = None  # the values, if every list is a single id and no two samples share one

    @property
    def num_distinct(self) -> int:
        return int(self.lengths_FU.shape[1])

    @property
    def nbytes(self) -> int:
        if self.ids_FR is not None:
            return self.ids_FR.nbytes
        buffers = {id(values): values for values in self.values}
        arrays = [*buffers.values(), self.starts_FU, self.lengths_FU, self.inverse_R, self.breaks_R]
        return sum(array.nbytes for array in arrays if array is not None)

    def features(self) -> Iterator[tuple[str, IdArray, IdArray, LengthArray]]:
        """The name, values, starts and lengths of each feature."""
        return zip(self.keys, self.values, self.starts_FU, self.lengths_FU, strict=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctBlock:
    """All samples of a row group. The groups hold every id feature of the schema exactly once."""

    dense_RF: npt.NDArray[np.float32]
    label_RT: npt.NDArray[np.float32]
    groups: tuple[DistinctGroup, ...]
    # Set by `pack_block`: the bytes of each row with all its lists; and those of the rows before r with only the lists
    # that differ from the row before, one entry more than rows.
    row_bytes_R: IdArray = field(default_factory=lambda: np.empty(0, np.int64))
    new_bytes_R: IdArray = field(default_factory=lambda: np.empty(0, np.int64))
    session_R: IdArray | None = None

    def __len__(self) -> int:
        return int(self.label_RT.shape[0])

    @property
    def num_ids(self) -> int:
        """Ids of all samples, repeated lists counted every time."""
        lengths = ((own.lengths_FU.sum(axis=0, dtype=np.int64), own.inverse_R) for own in self.groups)
        return sum(int((per_U if inverse_R is None else per_U[inverse_R]).sum()) for per_U, inverse_R in lengths)

    @cached_property
    def nbytes(self) -> int:
        arrays = (self.dense_RF, self.label_RT, self.row_bytes_R, self.new_bytes_R)
        return sum(array.nbytes for array in arrays) + sum(group.nbytes for group in self.groups)

    def batch_bytes(self, start: int, stop: int) -> int:
        """Upper bound of what the rows [start, stop) add to a batch: a list that differs from the last one is new."""
        if start == stop:
            return 0
        return int(self.row_bytes_R[start] + self.new_bytes_R[stop] - self.new_bytes_R[start + 1])


def find_distinct(block: RowBlock, keys: Sequence[str], groups: Sequence[Sequence[str]]) -> DistinctBlock:
    """The rows of a block whose id features are `keys`, with the given groups deduplicated over the row group.

    Distinct lists of a group are copied, so the columns they come from can be freed. A feature in no group, and a
    group that never repeats, stays where it is.
    """
    position_of = {key: position for position, key in enumerate(keys)}
    found = [_find_group(block, group, [position_of[key] for key in group]) for group in groups]
    found += [_plain_group(block, group, [position_of[group[0]]]) for group in group_keys(keys, groups)[len(groups) :]]
    return DistinctBlock(
        dense_RF=block.dense_RF, label_RT=block.label_RT, groups=tuple(found), session_R=block.session_R
    )


def group_keys(keys: Sequence[str], dedup: Sequence[Sequence[str]]) -> list[list[str]]:
    """All groups of a batch: those to deduplicate, then every other feature alone."""
    grouped = {key for group in dedup for key in group}
    return [*(list(group) for group in dedup), *([key] for key in keys if key not in grouped)]


def _find_group(block: RowBlock, keys: Sequence[str], positions: Sequence[int]) -> DistinctGroup:
    values = [block.values[position] for position in positions]
    offsets = [block.offsets[position].astype(np.int64, copy=False) for position in positions]
    unique_U, inverse_R = dedup_rows(values, offsets, num_threads=1)
    num_distinct = len(unique_U)
    if num_distinct == len(inverse_R):
        return _plain_group(block, keys, positions)
    stored, lengths = take_rows(values, offsets, unique_U, num_threads=1)
    lengths_FU = lengths.reshape(len(keys), num_distinct)
    ends_FU = lengths_FU.cumsum(axis=1)
    edges = np.cumsum([0, *(int(ends_U[-1]) for ends_U in ends_FU)])
    return DistinctGroup(
        keys=tuple(keys),
        values=tuple(stored[first:last] for first, last in pairwise(edges)),
        starts_FU=ends_FU - lengths_FU,
        lengths_FU=lengths_FU.astype(np.int32),
        inverse_R=inverse_R.astype(np.int32),
    )


def _plain_group(block: RowBlock, keys: Sequence[str], positions: Sequence[int]) -> DistinctGroup:
    offsets = [block.offsets[position] for position in positions]
    return DistinctGroup(
        keys=tuple(keys),
        values=tuple(block.values[position].astype(np.int64, copy=False) for position in positions),
        starts_FU=np.stack([own[:-1] for own in offsets], dtype=np.int64),
        lengths_FU=np.stack([np.diff(own) for own in offsets], dtype=np.int32),
    )


def regroup(block: DistinctBlock, groups: Sequence[Sequence[str]]) -> DistinctBlock:
    """The block with the given groups, which hold all its features, made from whatever groups it has.

    Rows are the same if the stored groups number them the same, so nothing is compared and no value is copied.
    """
    source_of = {key: group for group in block.groups for key in group.keys}
    joined = tuple(_join([source_of[key] for key in keys], keys, len(block)) for keys in groups)
    return replace(block, groups=joined)


def _join(sources: Sequence[DistinctGroup], keys: Sequence[str], num_rows: int) -> DistinctGroup:
    """One group of `keys`, the f-th of them taken from the f-th of `sources`."""
    if sources[0].keys == tuple(keys):
        return sources[0]
    inverses = {id(source): source.inverse_R for source in sources}
    inverse_R = sources[0].inverse_R
    rows_of: dict[int, Rows] = dict.fromkeys(inverses, slice(None))  # the rows of each source in the joint group
    if len(inverses) > 1:
        if any(inverse is None for inverse in inverses.values()):
            first_U, inverse_R = np.arange(num_rows), None
        else:
            each: IdArray = np.arange(num_rows + 1)
            columns: list[npt.NDArray[Any]] = [inverse for inverse in inverses.values() if inverse is not None]
            first_U, joint_R = dedup_rows(columns, [each] * len(columns), num_threads=1)
            inverse_R = joint_R.astype(np.int32)
        rows_of = {name: first_U if inverse is None else inverse[first_U] for name, inverse in inverses.items()}
    places = [(source, source.keys.index(key), rows_of[id(source)]) for source, key in zip(sources, keys, strict=True)]
    return DistinctGroup(
        keys=tuple(keys),
        values=tuple(source.values[at] for source, at, _ in places),
        starts_FU=stack_rows([source.starts_FU[at, rows] for source, at, rows in places]),
        lengths_FU=stack_rows([source.lengths_FU[at, rows] for source, at, rows in places]),
        inverse_R=inverse_R,
    )


def reorder(block: DistinctBlock, order_R: IdArray) -> DistinctBlock:
    """The block with its samples in another order; distinct rows are numbered in order of first use again."""
    groups = tuple(_reorder_group(group, order_R) for group in block.groups)
    session_R = None if block.session_R is None else block.session_R[order_R]
    dense_RF, label_RT = block.dense_RF[order_R], block.label_RT[order_R]
    return replace(block, dense_RF=dense_RF, label_RT=label_RT, groups=groups, session_R=session_R)


def _reorder_group(group: DistinctGroup, order_R: IdArray) -> DistinctGroup:
    rows_U, inverse_R = order_R, None
    if group.inverse_R is not None:
        inverse_R = group.inverse_R[order_R]
        first_U = np.full(group.num_distinct, len(order_R), np.int64)
        np.minimum.at(first_U, inverse_R, np.arange(len(order_R)))
        rows_U = np.argsort(first_U, kind="stable")
        number_U = np.empty(len(rows_U), np.int32)
        number_U[rows_U] = np.arange(len(rows_U), dtype=np.int32)
        inverse_R = number_U[inverse_R]
    starts_FU, lengths_FU = group.starts_FU[:, rows_U], group.lengths_FU[:, rows_U]
    return replace(group, starts_FU=starts_FU, lengths_FU=lengths_FU, inverse_R=inverse_R)


def find_windows(block: DistinctBlock, keys: Sequence[str]) -> DistinctBlock:
    """The block with the lists of the named features as windows of a shared buffer, where that saves `MIN_FACTOR`."""
    groups: list[DistinctGroup] = []
    for group in block.groups:
        if set(keys).isdisjoint(group.keys):
            groups.append(group)
            continue
        values, starts = list(group.values), list(group.starts_FU)
        for position, (key, own_values, starts_U, lengths_U) in enumerate(group.features()):
            if key not in keys or not is_packed(starts_U, lengths_U):
                continue
            offsets = np.concatenate([starts_U, starts_U[-1:] + lengths_U[-1:]])
            buffer, _, window_starts = window_rows(own_values, offsets)
            if MIN_FACTOR * len(buffer) <= int(offsets[-1] - offsets[0]):
                values[position], starts[position] = buffer, window_starts
        groups.append(replace(group, values=tuple(values), starts_FU=stack_rows(starts)))
    return replace(block, groups=tuple(groups))


def check_ranges(block: DistinctBlock, schema: Schema, *, where: str) -> None:
    """Raise for ids outside their table: an embedding lookup would read or write foreign memory."""
    for group in block.groups:
        for key, values, starts_U, lengths_U in group.features():
            num_rows = schema.feature(key).num_rows
            if not values.size or (int(values.min()) >= 0 and int(values.max()) < num_rows):
                continue
            used = take_lists(values, starts_U, lengths_U)  # values outside all lists may be anything
            wrong = np.flatnonzero((used < 0) | (used >= num_rows))
            if wrong.size:
                distinct = int(np.searchsorted(np.cumsum(lengths_U), wrong[0], side="right"))
                row = distinct if group.inverse_R is None else int(np.argmax(group.inverse_R == distinct))
                raise InputError(
                    f"{where}: column {key!r}, row {row}: id {int(used[wrong[0]])} lies outside [0, {num_rows})"
                    + (" after its transforms" if schema.feature(key).transforms else "")
                )


def stack_labels(columns: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """One column per label, not copied if there is one."""
    return np.stack(columns, axis=1) if len(columns) > 1 else columns[0][:, None]


def stack_rows(rows: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """One row per feature, not copied if there is one row or all are the same array."""
    if len(rows) > 1 and all(row is rows[0] for row in rows):
        return np.broadcast_to(rows[0], (len(rows), len(rows[0])))
    return np.stack(rows) if len(rows) > 1 else rows[0][None]


def is_packed(starts_U: IdArray, lengths_U: LengthArray) -> bool:
    """Whether each list begins where the one before it ends, so that a range of rows is one run of values."""
    return bool(len(starts_U) and np.array_equal(starts_U[1:], starts_U[:-1] + lengths_U[:-1]))


def take_lists(values: IdArray, starts_W: IdArray, lengths_W: LengthArray) -> IdArray:
    """values[start : start + length] of every list, one after another."""
    return take_windows(values, np.ascontiguousarray(starts_W), lengths_W.astype(np.int64), num_threads=1)
