"""Batches cut from deduplicated row groups: which distinct rows a slice of samples uses, and their lists, once.

Nothing is hashed or compared here. Repeats were found once for the row group, and what follows is numbering.

Shape suffixes: R = rows (samples) of a row group, F = features of a group, U = distinct rows, B = samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.buffers import empty_array, join_arrays
from kernels.merge_windows import merge_sources
from recmill.data.ikjt.build import MIN_FACTOR, Group
from recmill.data.ikjt.distinct import DistinctBlock, DistinctGroup, IdArray, is_packed, take_lists
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor

FloatArray = npt.NDArray[np.float32]
LengthArray = npt.NDArray[np.int32]
# With more breaks than this share of samples, hardly a slice is a run, and its lists are picked one by one.
MAX_BREAKS = 0.01
MAX_EXPANDED_LENGTH = 2.0  # mean length of lists that are expanded for the whole row group

Rows = slice | npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutGroup:
    """A group as batches take it: distinct lists, and for each sample which of them are its own.

    Samples in a row mostly use distinct rows in a row: `breaks_R` counts, up to each sample, those whose distinct row
    is neither the one before nor the next. Between two samples with the same count, all rows in between are used.
    """

    keys: tuple[str, ...]
    values: tuple[IdArray, ...]  # of each feature; one buffer for all if the lists have to be picked one by one
    starts_FU: IdArray  # with one more entry than rows: where the last list ends, if they are packed
    lengths_FU: LengthArray
    inverse_R: LengthArray | None
    breaks_R: LengthArray | None
    is_packed: bool  # each list begins where the one before it ends, so a range of rows is one run of values
    is_expanded: bool  # batches hold a list a sample, though the lists are stored once
    keeps_windows: bool
    ids_FR: IdArray | None = None  # one id a sample: all there is of features whose lists have length 1

    @property
    def nbytes(self) -> int:
        if self.ids_FR is not None:
            return self.ids_FR.nbytes
        arrays: list[npt.NDArray[Any]] = [*self.values, self.starts_FU, self.lengths_FU]
        arrays += [array for array in (self.inverse_R, self.breaks_R) if array is not None]
        return sum(array.nbytes for array in arrays)


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


def prepare_block(
    block: DistinctBlock,
    *,
    dedup: Sequence[Sequence[str]] | None,
    windows: Sequence[str] = (),
    expand: frozenset[str] = frozenset(),
) -> CutBlock:
    """The block ready for batches in which the groups `dedup` are deduplicated; `block` has these groups already.

    Groups of the features `expand` get one list a sample here, once. All blocks of a batch must agree on them.
    """
    deduplicated = {key for group in dedup or () for key in group}
    groups: list[CutGroup] = []
    short: list[DistinctGroup] = []
    plain: list[DistinctGroup] = []
    for group in block.groups:
        is_stored_once = deduplicated.issuperset(group.keys)
        keeps_windows = dedup is not None and not set(windows).isdisjoint(group.keys)
        if is_stored_once or keeps_windows:
            groups.append(_prepare_group([group], is_expanded=not is_stored_once, keeps_windows=keeps_windows))
        elif expand.issuperset(group.keys):
            short.append(group)
        elif group.inverse_R is None:
            plain.append(group)
        else:
            groups.append(_prepare_group([group], is_expanded=True, keeps_windows=False))
    # Together: what a batch costs beside copying grows with the number of groups.
    if plain:
        groups.append(_prepare_group(plain, is_expanded=True, keeps_windows=False))
    if short:
        groups.append(_single_ids(short, len(block)) or _prepare_expanded(short))
    row_bytes_R, new_bytes_R = _count_bytes(block, groups)
    arrays = (block.dense_RF, block.label_R, row_bytes_R, new_bytes_R)
    return CutBlock(
        dense_RF=block.dense_RF,
        label_R=block.label_R,
        groups=tuple(groups),
        row_bytes_R=row_bytes_R,
        new_bytes_R=new_bytes_R,
        nbytes=sum(group.nbytes for group in groups) + sum(array.nbytes for array in arrays),
    )


def short_features(block: DistinctBlock) -> frozenset[str]:
    """Features whose lists are so short that one a sample costs less to hold than to pick for every batch."""
    return frozenset(
        key
        for group in block.groups
        for key, lengths_U in zip(group.keys, group.lengths, strict=True)
        if int(lengths_U.sum()) <= MAX_EXPANDED_LENGTH * len(lengths_U)
    )


def _single_ids(groups: Sequence[DistinctGroup], num_rows: int) -> CutGroup | None:
    """The features as one id a sample, if all their lists have length 1: no lists to walk, here or in a batch."""
    if any((lengths_U != 1).any() for group in groups for lengths_U in group.lengths):
        return None
    num_features = sum(len(group.keys) for group in groups)
    ids_FR = empty_array((num_features, num_rows), np.int64)
    position = 0
    for group in groups:
        inverse_R = None if group.inverse_R is None else group.inverse_R.astype(np.intp)
        for values, starts_U in zip(group.values, group.starts, strict=True):
            if inverse_R is None:
                np.take(values, starts_U, out=ids_FR[position], mode="clip")
            else:
                np.take(values[starts_U], inverse_R, out=ids_FR[position], mode="clip")
            position += 1
    return CutGroup(
        keys=tuple(key for group in groups for key in group.keys),
        values=(),
        starts_FU=np.empty((0, 0), dtype=np.int64),
        lengths_FU=np.empty((0, 0), dtype=np.int32),
        inverse_R=None,
        breaks_R=None,
        is_packed=True,
        is_expanded=True,
        keeps_windows=False,
        ids_FR=ids_FR,
    )


def _prepare_expanded(groups: Sequence[DistinctGroup]) -> CutGroup:
    """The features with one list a sample."""
    return _prepare_group([_expand_group(group) for group in groups], is_expanded=True, keeps_windows=False)


def _as_lists(group: CutGroup) -> CutGroup:
    """Single ids as the lists of length 1 that they are."""
    if group.ids_FR is None:
        return group
    num_features, num_rows = group.ids_FR.shape
    starts_FU = np.broadcast_to(np.arange(num_rows + 1, dtype=np.int64), (num_features, num_rows + 1))
    lengths_FU = np.ones((num_features, num_rows), dtype=np.int32)
    return replace(group, values=tuple(group.ids_FR), starts_FU=starts_FU, lengths_FU=lengths_FU, ids_FR=None)


def _expand_group(group: DistinctGroup) -> DistinctGroup:
    """The group with one list a sample."""
    if group.inverse_R is None:
        return group
    features = zip(group.values, group.starts, group.lengths, strict=True)
    values, starts, lengths = zip(*(_expand_lists(*own, group.inverse_R) for own in features), strict=True)
    return DistinctGroup(keys=group.keys, values=values, starts=starts, lengths=lengths)


def _expand_lists(
    values: IdArray, starts_U: IdArray, lengths_U: LengthArray, inverse_R: LengthArray
) -> tuple[IdArray, IdArray, LengthArray]:
    lengths_R = lengths_U[inverse_R]
    return (
        take_lists(values, starts_U[inverse_R], lengths_R),
        np.cumsum(lengths_R, dtype=np.int64) - lengths_R,
        lengths_R,
    )


def _prepare_group(groups: Sequence[DistinctGroup], *, is_expanded: bool, keeps_windows: bool) -> CutGroup:
    """One group from one or several that share their inverse (or have none)."""
    columns = [column for group in groups for column in zip(group.values, group.starts, group.lengths, strict=True)]
    inverse_R, num_distinct = groups[0].inverse_R, groups[0].num_distinct
    values: list[IdArray] = []
    starts_FU = np.empty((len(columns), num_distinct + 1), dtype=np.int64)
    lengths_FU = np.empty((len(columns), num_distinct), dtype=np.int32)
    all_packed = True
    for position, (own_values, own_starts, own_lengths) in enumerate(columns):
        is_run = is_packed(own_starts, own_lengths)
        if not is_run and not keeps_windows and int(own_lengths.sum()) <= len(own_values):
            # Shortened lists leave gaps: closed once here rather than in every batch.
            own_values = take_lists(own_values, own_starts, own_lengths)
            own_starts, is_run = np.cumsum(own_lengths, dtype=np.int64) - own_lengths, True
        values.append(own_values)
        starts_FU[position, :-1] = own_starts
        starts_FU[position, -1:] = own_starts[-1:] + own_lengths[-1:]
        lengths_FU[position] = own_lengths
        all_packed &= is_run
    breaks_R = None if inverse_R is None else _count_breaks(inverse_R)
    is_scattered = breaks_R is not None and (is_expanded or int(breaks_R[-1]) > MAX_BREAKS * len(breaks_R))
    if not keeps_windows and (is_scattered or not all_packed):
        sizes = [len(own_values) for own_values in values]
        values = [join_arrays(values)]
        starts_FU += np.array([sum(sizes[:before]) for before in range(len(sizes))], dtype=np.int64)[:, None]
    return CutGroup(
        keys=tuple(key for group in groups for key in group.keys),
        values=tuple(values),
        starts_FU=starts_FU,
        lengths_FU=lengths_FU,
        inverse_R=inverse_R,
        breaks_R=breaks_R,
        is_packed=all_packed,
        is_expanded=is_expanded,
        keeps_windows=keeps_windows,
    )


def _count_breaks(inverse_R: LengthArray) -> LengthArray:
    steps_R = np.diff(inverse_R, prepend=inverse_R[:1])
    breaks_R: LengthArray = np.cumsum((steps_R != 0) & (steps_R != 1), dtype=np.int32)
    return breaks_R


def _count_bytes(block: DistinctBlock, groups: Sequence[CutGroup]) -> tuple[IdArray, IdArray]:
    """(bytes of each row with all its lists, running sum of the bytes that are new in each row)."""
    fixed = 4 * (int(block.dense_RF.shape[1]) + 1)
    row_bytes_R = np.full(len(block), fixed, dtype=np.int64)
    new_bytes_R = np.full(len(block), fixed, dtype=np.int64)
    for group in groups:
        if group.ids_FR is not None:
            row_bytes_R += 12 * len(group.keys)
            new_bytes_R += 12 * len(group.keys)
            continue
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
    slices: Sequence[tuple[CutBlock, int, int]], keys: Sequence[str], *, dedup: Sequence[Sequence[str]] | None
) -> KeyedJaggedTensor | InverseKeyedJaggedTensor:
    """The ids of the rows [start, stop) of each block: deduplicated, or as one list a sample if `dedup` is None."""
    num_samples = sum(stop - start for _, start, stop in slices)
    groups = [
        _cut_group([(block.groups[position], start, stop) for block, start, stop in slices], num_samples)
        for position in range(len(slices[0][0].groups) if slices else 0)
    ]
    if not slices:
        grouped = {key for group in dedup or () for key in group}
        plain = [key for key in keys if key not in grouped]
        groups = [_empty_group(group) for group in [*(dedup or ()), *([plain] if plain else [])]]
    if dedup is None:
        return _join_features(groups, keys, num_samples)
    order = {group[0]: position for position, group in enumerate(dedup)}
    groups.sort(key=lambda group: order.get(group.keys[0], len(order)))
    return InverseKeyedJaggedTensor(keys, groups, stride=num_samples)


def group_keys(keys: Sequence[str], dedup: Sequence[Sequence[str]]) -> list[list[str]]:
    """All groups of a batch: those to deduplicate, then every other feature alone."""
    grouped = {key for group in dedup for key in group}
    return [*(list(group) for group in dedup), *([key] for key in keys if key not in grouped)]


def _join_features(groups: Sequence[Group], keys: Sequence[str], num_samples: int) -> KeyedJaggedTensor:
    """All features, one list a sample, in the order of `keys`."""
    values: dict[str, torch.Tensor] = {}
    lengths: dict[str, torch.Tensor] = {}
    for group in groups:
        values.update(zip(group.keys, torch.split(group.values, list(group.num_stored)), strict=True))
        lengths.update(zip(group.keys, group.lengths_FU.view(len(group.keys), num_samples), strict=True))
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat([values[key] for key in keys]) if keys else torch.empty(0, dtype=torch.int64),
        lengths=torch.cat([lengths[key] for key in keys]) if keys else torch.empty(0, dtype=torch.int32),
        stride=num_samples,
        length_per_key=[len(values[key]) for key in keys],
    )


def _cut_group(slices: Sequence[tuple[CutGroup, int, int]], num_samples: int) -> Group:
    """One group of a batch: the rows that each slice uses, one slice after another."""
    if all(group.ids_FR is not None for group, _, _ in slices):
        return _cut_single_ids(slices, num_samples)
    slices = [(_as_lists(group), start, stop) for group, start, stop in slices]
    groups = [group for group, _, _ in slices]
    rows_of: list[Rows] = []
    inverse_B = np.empty(num_samples, dtype=np.int32)
    num_rows = at = 0
    for group, start, stop in slices:
        rows, num_used, numbers = _used_rows(group, start, stop)
        if numbers is not None:
            np.add(numbers, num_rows, out=inverse_B[at : at + stop - start])
        else:
            inverse_B[at : at + stop - start] = np.arange(num_rows, num_rows + num_used, dtype=np.int32)
        rows_of.append(rows)
        num_rows += num_used
        at += stop - start
    lengths_FU = np.concatenate(
        [group.lengths_FU[:, rows] for group, rows in zip(groups, rows_of, strict=True)], axis=1
    )
    windows = _cut_windows(groups, rows_of, lengths_FU) if groups[0].keeps_windows else None
    values, num_stored, starts_FU = windows or _cut_packed(groups, rows_of)
    return Group(
        keys=groups[0].keys,
        values=torch.from_numpy(values),
        lengths_FU=torch.from_numpy(lengths_FU.reshape(-1)),
        num_stored=num_stored,
        inverse_B=None if num_rows == num_samples else torch.from_numpy(inverse_B),
        starts_FU=None if starts_FU is None else torch.from_numpy(starts_FU),
    )


def _cut_single_ids(slices: Sequence[tuple[CutGroup, int, int]], num_samples: int) -> Group:
    pieces = [group.ids_FR[:, start:stop] for group, start, stop in slices if group.ids_FR is not None]
    keys = slices[0][0].keys
    return Group(
        keys=keys,
        values=torch.from_numpy(np.concatenate(pieces, axis=1).reshape(-1)),
        lengths_FU=torch.ones(len(keys) * num_samples, dtype=torch.int32),
        num_stored=(num_samples,) * len(keys),
    )


def _used_rows(group: CutGroup, start: int, stop: int) -> tuple[Rows, int, LengthArray | None]:
    """The distinct rows of the samples [start, stop), how many they are, and each sample's place among them.

    No places means that the rows are those of the samples, one by one.
    """
    if group.inverse_R is None or group.breaks_R is None:
        return slice(start, stop), stop - start, None
    inverse = group.inverse_R[start:stop]
    if group.is_expanded:
        return inverse, stop - start, None
    if group.breaks_R.item(start) == group.breaks_R.item(stop - 1):
        first, last = inverse.item(0), inverse.item(-1) + 1
        return slice(first, last), last - first, inverse - first
    first, last = int(inverse.min()), int(inverse.max()) + 1
    is_used = np.zeros(last - first, dtype=bool)
    is_used[inverse - first] = True
    num_used = int(np.count_nonzero(is_used))
    if num_used == stop - start:  # no repetition: in the order of the samples, so that the batch may go without inverse
        return inverse, num_used, None
    if num_used == last - first:
        return slice(first, last), num_used, inverse - first
    place_of = np.cumsum(is_used, dtype=np.int32) - 1
    return np.flatnonzero(is_used) + first, num_used, place_of[inverse - first]


def _cut_packed(groups: Sequence[CutGroup], rows_of: Sequence[Rows]) -> tuple[IdArray, tuple[int, ...], None]:
    """(values, how many belong to each feature, None) of lists that follow one another."""
    pieces: list[list[IdArray]] = [[] for _ in groups[0].keys]
    for group, rows in zip(groups, rows_of, strict=True):
        for own, piece in zip(pieces, _cut_lists(group, rows), strict=True):
            own.append(piece)
    num_stored = tuple(sum(map(len, own)) for own in pieces)
    return join_arrays([piece for own in pieces for piece in own]), num_stored, None


def _cut_lists(group: CutGroup, rows: Rows) -> list[IdArray]:
    """The lists of the rows, one after another, for each feature."""
    if isinstance(rows, slice) and group.is_packed:
        first, last = group.starts_FU[:, rows.start].tolist(), group.starts_FU[:, rows.stop].tolist()
        buffers = group.values if len(group.values) == len(group.keys) else group.values * len(group.keys)
        return [values[begin:end] for values, begin, end in zip(buffers, first, last, strict=True)]
    lengths_FW = group.lengths_FU[:, rows]
    starts_FW = group.starts_FU[:, :-1][:, rows]
    if len(group.values) == 1:
        taken = take_lists(group.values[0], starts_FW.reshape(-1), lengths_FW.reshape(-1))
        return np.split(taken, np.cumsum(lengths_FW.sum(axis=1))[:-1])
    return [
        take_lists(values, starts_W, lengths_W)
        for values, starts_W, lengths_W in zip(group.values, starts_FW, lengths_FW, strict=True)
    ]


def _cut_windows(
    groups: Sequence[CutGroup], rows_of: Sequence[Rows], lengths_FU: LengthArray
) -> tuple[IdArray, tuple[int, ...], IdArray] | None:
    """(buffer, how many values belong to each feature, starts in the buffer) of lists that overlap, if that saves.

    What windows cover is copied once, wherever they lie: windows of a session overlap, those of a user's sessions too.
    """
    pieces: list[IdArray] = []
    starts: list[IdArray] = []
    begin = 0
    for position in range(len(groups[0].keys)):
        kept: list[npt.NDArray[Any]] = []  # arrays whose addresses are in use
        sources = [_window_source(group, position, rows, kept) for group, rows in zip(groups, rows_of, strict=True)]
        piece, starts_U = merge_sources(sources, lengths_FU.shape[1])
        pieces.append(piece)
        starts.append(starts_U + begin)
        begin += len(piece)
    if int(lengths_FU.sum()) < MIN_FACTOR * begin:
        return None
    return join_arrays(pieces), tuple(map(len, pieces)), join_arrays(starts)


def _window_source(
    group: CutGroup, position: int, rows: Rows, kept: list[npt.NDArray[Any]]
) -> tuple[int, int, int, int, int, int, int]:
    values, num_distinct = group.values[position], group.lengths_FU.shape[1]
    if isinstance(rows, slice):
        starts = group.starts_FU.ctypes.data + 8 * (position * (num_distinct + 1) + rows.start)
        lengths = group.lengths_FU.ctypes.data + 4 * (position * num_distinct + rows.start)
        return values.ctypes.data, 8, len(values), starts, lengths, 4, rows.stop - rows.start
    own_starts, own_lengths = group.starts_FU[position, :-1][rows], group.lengths_FU[position, rows]
    kept += [own_starts, own_lengths]
    return values.ctypes.data, 8, len(values), own_starts.ctypes.data, own_lengths.ctypes.data, 4, len(own_starts)


def _empty_group(keys: Sequence[str]) -> Group:
    return Group(
        keys=tuple(keys),
        values=torch.empty(0, dtype=torch.int64),
        lengths_FU=torch.empty(0, dtype=torch.int32),
        num_stored=(0,) * len(keys),
    )
