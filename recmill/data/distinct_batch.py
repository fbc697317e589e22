"""Batches cut from deduplicated row groups: which distinct rows a slice of samples uses, and their lists, once.

Nothing is hashed or compared here. Repeats were found once for the row group, and what follows is numbering.

Shape suffixes: R = rows (samples) of a row group, F = features of a group, U = distinct rows, B = samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.data.distinct import DistinctBlock, DistinctGroup, IdArray, is_packed, take_lists
from recmill.data.ikjt import InverseKeyedJaggedTensor
from recmill.data.ikjt_build import MIN_FACTOR, Group

FloatArray = npt.NDArray[np.float32]
Rows = slice | npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutGroup:
    """A group as batches take it: what of its lists they hold, and what a sample adds to their size."""

    keys: tuple[str, ...]
    values: tuple[IdArray, ...]
    starts_FU: IdArray
    lengths_FU: npt.NDArray[np.int32]
    inverse_R: npt.NDArray[np.int32] | None
    is_packed: tuple[bool, ...]  # each list begins where the one before it ends, so a range of rows is one run
    is_expanded: bool  # batches hold a list a sample, though the lists are stored once
    keeps_windows: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class CutBlock:
    """A deduplicated row group that batches are cut from."""

    dense_RF: FloatArray
    label_R: FloatArray
    groups: tuple[CutGroup, ...]
    row_bytes_R: IdArray  # of a row with all its lists
    new_bytes_R: IdArray  # of the rows before r with the lists that differ from the row before; one more than rows
    nbytes: int

    def __len__(self) -> int:
        return int(self.label_R.shape[0])

    def batch_bytes(self, start: int, stop: int) -> int:
        """At most what the rows [start, stop) add to a batch: every list that differs from the one before it is new."""
        if start == stop:
            return 0
        return int(self.row_bytes_R[start] + self.new_bytes_R[stop] - self.new_bytes_R[start + 1])


BlockSlice = tuple[CutBlock, int, int]


def prepare_block(
    block: DistinctBlock, *, dedup: Sequence[Sequence[str]] | None, windows: Sequence[str] = ()
) -> CutBlock:
    """The block ready for batches in which the groups `dedup` are deduplicated; `block` has these groups already."""
    deduplicated = {key for group in dedup or () for key in group}
    groups = tuple(
        _prepare_group(
            group,
            is_expanded=group.inverse_R is not None and not deduplicated.issuperset(group.keys),
            keeps_windows=dedup is not None and not set(windows).isdisjoint(group.keys),
        )
        for group in block.groups
    )
    row_bytes_R, new_bytes_R = _count_bytes(block, groups)
    stored = sum(
        sum(values.nbytes for values in group.values)
        + group.starts_FU.nbytes
        + group.lengths_FU.nbytes
        + (0 if group.inverse_R is None else group.inverse_R.nbytes)
        for group in groups
    )
    plain = (block.dense_RF, block.label_R, row_bytes_R, new_bytes_R)
    return CutBlock(
        dense_RF=block.dense_RF,
        label_R=block.label_R,
        groups=groups,
        row_bytes_R=row_bytes_R,
        new_bytes_R=new_bytes_R,
        nbytes=stored + sum(array.nbytes for array in plain),
    )


def _prepare_group(group: DistinctGroup, *, is_expanded: bool, keeps_windows: bool) -> CutGroup:
    values, starts, packed = [], [], []
    for own_values, own_starts, own_lengths in zip(group.values, group.starts, group.lengths, strict=True):
        is_run = is_packed(own_starts, own_lengths)
        if not is_run and not keeps_windows and int(own_lengths.sum()) <= len(own_values):
            # Shortened lists leave gaps: closed once here rather than in every batch.
            own_values = take_lists(own_values, own_starts, own_lengths)
            own_starts, is_run = np.cumsum(own_lengths, dtype=np.int64) - own_lengths, True
        values.append(own_values)
        starts.append(own_starts)
        packed.append(is_run)
    return CutGroup(
        keys=group.keys,
        values=tuple(values),
        starts_FU=np.stack(starts),
        lengths_FU=np.stack(group.lengths),
        inverse_R=group.inverse_R,
        is_packed=tuple(packed),
        is_expanded=is_expanded,
        keeps_windows=keeps_windows,
    )


def _count_bytes(block: DistinctBlock, groups: Sequence[CutGroup]) -> tuple[IdArray, IdArray]:
    """(bytes of each row with all its lists, running sum of the bytes that are new in each row)."""
    fixed = 4 * (int(block.dense_RF.shape[1]) + 1)
    row_bytes_R = np.full(len(block), fixed, dtype=np.int64)
    new_bytes_R = np.full(len(block), fixed, dtype=np.int64)
    for group in groups:
        list_bytes = len(group.keys) * (12 if group.keeps_windows else 4)
        lists_U = 8 * group.lengths_FU.sum(axis=0, dtype=np.int64) + list_bytes
        lists_R = lists_U if group.inverse_R is None else lists_U[group.inverse_R]
        if group.inverse_R is not None and not group.is_expanded:
            is_new_R = np.diff(group.inverse_R, prepend=-1) != 0
            row_bytes_R += lists_R + 4
            new_bytes_R += lists_R * is_new_R + 4
        else:
            row_bytes_R += lists_R
            new_bytes_R += lists_R
    return row_bytes_R, np.concatenate([[0], np.cumsum(new_bytes_R)])


def cut_ids(
    slices: Sequence[BlockSlice], keys: Sequence[str], *, dedup: Sequence[Sequence[str]] | None
) -> KeyedJaggedTensor | InverseKeyedJaggedTensor:
    """The ids of the rows [start, stop) of each block: deduplicated, or as one list a sample if `dedup` is None."""
    num_samples = sum(stop - start for _, start, stop in slices)
    if dedup is None:
        return _cut_kjt(slices, keys, num_samples)
    if not slices:
        return InverseKeyedJaggedTensor(keys, [_empty_group(group) for group in group_keys(keys, dedup)], stride=0)
    num_groups = len(slices[0][0].groups)
    groups = [
        _cut_group([(block.groups[position], start, stop) for block, start, stop in slices], num_samples)
        for position in range(num_groups)
    ]
    return InverseKeyedJaggedTensor(keys, groups, stride=num_samples)


def group_keys(keys: Sequence[str], dedup: Sequence[Sequence[str]]) -> list[list[str]]:
    """All groups of a batch: those to deduplicate, then every other feature alone."""
    grouped = {key for group in dedup for key in group}
    return [*(list(group) for group in dedup), *([key] for key in keys if key not in grouped)]


def _cut_kjt(slices: Sequence[BlockSlice], keys: Sequence[str], num_samples: int) -> KeyedJaggedTensor:
    pieces: dict[str, list[IdArray]] = {key: [] for key in keys}
    lengths: dict[str, list[npt.NDArray[np.int32]]] = {key: [] for key in keys}
    for block, start, stop in slices:
        for group in block.groups:
            rows: Rows = slice(start, stop) if group.inverse_R is None else group.inverse_R[start:stop]
            for position, key in enumerate(group.keys):
                pieces[key].append(_cut_lists(group, position, rows))
                lengths[key].append(group.lengths_FU[position, rows])
    values = [piece for key in keys for piece in pieces[key]]
    all_lengths = [piece for key in keys for piece in lengths[key]]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(np.concatenate(values) if values else np.empty(0, dtype=np.int64)),
        lengths=torch.from_numpy(np.concatenate(all_lengths) if all_lengths else np.empty(0, dtype=np.int32)),
        stride=num_samples,
        length_per_key=[sum(len(piece) for piece in pieces[key]) for key in keys],
    )


def _cut_group(slices: Sequence[tuple[CutGroup, int, int]], num_samples: int) -> Group:
    """One group of a batch: the rows that each slice uses, one slice after another."""
    rows_of, inverses = [], []
    num_rows = 0
    for group, start, stop in slices:
        rows, num_used, inverse = _used_rows(group, start, stop)
        rows_of.append(rows)
        inverses.append(inverse + num_rows)
        num_rows += num_used
    lengths = [group.lengths_FU[:, rows] for (group, _, _), rows in zip(slices, rows_of, strict=True)]
    keys = slices[0][0].keys
    cut: Any = _cut_windows if any(group.keeps_windows for group, _, _ in slices) else _cut_packed
    values, num_stored, starts_FU = cut([group for group, _, _ in slices], rows_of)
    inverse_B = None if num_rows == num_samples else torch.from_numpy(np.concatenate(inverses).astype(np.int32))
    return Group(
        keys=keys,
        values=torch.from_numpy(values),
        lengths_FU=torch.from_numpy(np.concatenate(lengths, axis=1).reshape(-1)),
        num_stored=num_stored,
        inverse_B=inverse_B,
        starts_FU=None if starts_FU is None else torch.from_numpy(starts_FU),
    )


def _used_rows(group: CutGroup, start: int, stop: int) -> tuple[Rows, int, npt.NDArray[np.integer]]:
    """The distinct rows of the samples [start, stop), how many they are, and each sample's place among them."""
    identity = np.arange(stop - start)
    if group.inverse_R is None:
        return slice(start, stop), stop - start, identity
    inverse = group.inverse_R[start:stop]
    if group.is_expanded:
        return inverse, stop - start, identity
    first, last = int(inverse.min()), int(inverse.max()) + 1
    inverse = inverse - first
    is_used = np.zeros(last - first, dtype=bool)
    is_used[inverse] = True
    num_used = int(np.count_nonzero(is_used))
    if num_used == stop - start:  # no repetition: in the order of the samples, so that the batch may go without inverse
        is_run = num_used == last - first and np.array_equal(inverse, identity)
        return slice(first, last) if is_run else inverse + first, num_used, identity
    if num_used == last - first:
        return slice(first, last), num_used, inverse
    return np.flatnonzero(is_used) + first, num_used, (np.cumsum(is_used) - 1)[inverse]


def _cut_lists(group: CutGroup, position: int, rows: Rows) -> IdArray:
    """The lists of the rows, one after another."""
    values, starts_U, lengths_U = group.values[position], group.starts_FU[position], group.lengths_FU[position]
    if isinstance(rows, slice) and group.is_packed[position]:
        if rows.start == rows.stop:
            return values[:0]
        return values[starts_U.item(rows.start) : starts_U.item(rows.stop - 1) + lengths_U.item(rows.stop - 1)]
    return take_lists(values, np.ascontiguousarray(starts_U[rows]), lengths_U[rows])


def _cut_packed(groups: Sequence[CutGroup], rows_of: Sequence[Rows]) -> tuple[IdArray, tuple[int, ...], None]:
    """(values, how many belong to each feature, None) of lists that follow one another."""
    pieces, num_stored = [], []
    for position in range(len(groups[0].keys)):
        own = [_cut_lists(group, position, rows) for group, rows in zip(groups, rows_of, strict=True)]
        num_stored.append(sum(len(piece) for piece in own))
        pieces += own
    return np.concatenate(pieces), tuple(num_stored), None


def _cut_windows(
    groups: Sequence[CutGroup], rows_of: Sequence[Rows]
) -> tuple[IdArray, tuple[int, ...], IdArray | None]:
    """(buffer, how many values belong to each feature, starts in the buffer) of lists that overlap."""
    pieces: list[IdArray] = []
    starts: list[IdArray] = []
    num_stored: list[int] = []
    begin = 0
    for position in range(len(groups[0].keys)):
        first = begin
        for group, rows in zip(groups, rows_of, strict=True):
            piece, starts_U = _cut_region(group, position, rows)
            pieces.append(piece)
            starts.append(starts_U + begin)
            begin += len(piece)
        num_stored.append(begin - first)
    num_values = sum(int(group.lengths_FU[:, rows].sum()) for group, rows in zip(groups, rows_of, strict=True))
    if num_values < MIN_FACTOR * begin:
        return _cut_packed(groups, rows_of)
    return np.concatenate(pieces), tuple(num_stored), np.concatenate(starts)


def _cut_region(group: CutGroup, position: int, rows: Rows) -> tuple[IdArray, IdArray]:
    """The part of the buffer that the rows read and their starts in it; their lists apart if those are shorter."""
    starts_U, lengths_U = group.starts_FU[position, rows], group.lengths_FU[position, rows]
    num_values = int(lengths_U.sum())
    if num_values:
        first, last = int(starts_U.min()), int((starts_U + lengths_U).max())
        if last - first <= num_values:
            return group.values[position][first:last], starts_U - first
    packed_U: IdArray = np.cumsum(lengths_U, dtype=np.int64) - lengths_U
    return _cut_lists(group, position, rows), packed_U


def _empty_group(keys: Sequence[str]) -> Group:
    return Group(
        keys=tuple(keys),
        values=torch.empty(0, dtype=torch.int64),
        lengths_FU=torch.empty(0, dtype=torch.int32),
        num_stored=(0,) * len(keys),
    )
