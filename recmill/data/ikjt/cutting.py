"""Batches cut from deduplicated row groups: which distinct rows a slice of samples uses, and their lists, once.

Nothing is hashed or compared here. Repeats were found once per row group; what remains is renumbering.

Shape suffixes: R = rows (samples) of a row group, F = features of a group, U = distinct rows, B = samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.buffers import join_arrays
from kernels.merge_windows import merge_windows
from recmill.data.ikjt.build import GroupTensors
from recmill.data.ikjt.distinct import (
    MIN_FACTOR,
    DistinctBlock,
    DistinctGroup,
    IdArray,
    LengthArray,
    Rows,
    take_lists,
)
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor


def cut_ids(
    slices: Sequence[tuple[DistinctBlock, int, int]], keys: Sequence[str], *, dedup: Sequence[Sequence[str]] | None
) -> KeyedJaggedTensor | InverseKeyedJaggedTensor:
    """The ids of the rows [start, stop) of each block: deduplicated, or one list per sample if `dedup` is None."""
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


def _join_features(groups: Sequence[GroupTensors], keys: Sequence[str], num_samples: int) -> KeyedJaggedTensor:
    """All features, one list per sample, in the order of `keys`."""
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


def _cut_group(slices: Sequence[tuple[DistinctGroup, int, int]], num_samples: int) -> GroupTensors:
    """One group of a batch: the rows that each slice uses, one slice after another."""
    if all(group.ids_FR is not None for group, _, _ in slices):
        return _cut_single_ids(slices, num_samples)
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
    return GroupTensors(
        keys=groups[0].keys,
        values=torch.from_numpy(values),
        lengths_FU=torch.from_numpy(lengths_FU.reshape(-1)),
        num_stored=num_stored,
        inverse_B=None if num_rows == num_samples else torch.from_numpy(inverse_B),
        starts_FU=None if starts_FU is None else torch.from_numpy(starts_FU),
    )


def _cut_single_ids(slices: Sequence[tuple[DistinctGroup, int, int]], num_samples: int) -> GroupTensors:
    pieces = [group.ids_FR[:, start:stop] for group, start, stop in slices if group.ids_FR is not None]
    keys = slices[0][0].keys
    return GroupTensors(
        keys=keys,
        values=torch.from_numpy(np.concatenate(pieces, axis=1).reshape(-1)),
        lengths_FU=torch.ones(len(keys) * num_samples, dtype=torch.int32),
        num_stored=(num_samples,) * len(keys),
    )


def _used_rows(group: DistinctGroup, start: int, stop: int) -> tuple[Rows, int, LengthArray | None]:
    """The distinct rows of the samples [start, stop), their number, and each sample's position among them.

    Without positions, the rows are those of the samples, one by one.
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
    if num_used == stop - start:  # no repeats: in the order of the samples, so that the batch needs no inverse
        return inverse, num_used, None
    if num_used == last - first:
        return slice(first, last), num_used, inverse - first
    place_of = np.cumsum(is_used, dtype=np.int32) - 1
    return np.flatnonzero(is_used) + first, num_used, place_of[inverse - first]


def _cut_packed(groups: Sequence[DistinctGroup], rows_of: Sequence[Rows]) -> tuple[IdArray, tuple[int, ...], None]:
    """(values, number of values of each feature, None) of lists that follow one another."""
    pieces: list[list[IdArray]] = [[] for _ in groups[0].keys]
    for group, rows in zip(groups, rows_of, strict=True):
        for own, piece in zip(pieces, _cut_lists(group, rows), strict=True):
            own.append(piece)
    num_stored = tuple(sum(map(len, own)) for own in pieces)
    return join_arrays([piece for own in pieces for piece in own]), num_stored, None


def _cut_lists(group: DistinctGroup, rows: Rows) -> list[IdArray]:
    """The lists of the rows, one after another, for each feature."""
    if isinstance(rows, slice) and group.is_packed:
        last_F = group.starts_FU[:, rows.stop - 1] + group.lengths_FU[:, rows.stop - 1]
        edges = zip(group.values, group.starts_FU[:, rows.start].tolist(), last_F.tolist(), strict=True)
        return [values[begin:end] for values, begin, end in edges]
    lengths_FW, starts_FW = group.lengths_FU[:, rows], group.starts_FU[:, rows]
    if group.values[0] is group.values[-1]:
        taken = take_lists(group.values[0], starts_FW.reshape(-1), lengths_FW.reshape(-1))
        return np.split(taken, np.cumsum(lengths_FW.sum(axis=1))[:-1])
    return [take_lists(*lists) for lists in zip(group.values, starts_FW, lengths_FW, strict=True)]


def _cut_windows(
    groups: Sequence[DistinctGroup], rows_of: Sequence[Rows], lengths_FU: LengthArray
) -> tuple[IdArray, tuple[int, ...], IdArray] | None:
    """(buffer, number of values of each feature, starts in the buffer) of lists that overlap, if that saves.

    Values that windows cover are copied once: windows of a session overlap, and so do those of a user's sessions.
    """
    pieces: list[IdArray] = []
    starts: list[IdArray] = []
    begin = 0
    for position in range(len(groups[0].keys)):
        sources = [
            (group.values[position], group.starts_FU[position, rows], group.lengths_FU[position, rows])
            for group, rows in zip(groups, rows_of, strict=True)
        ]
        piece, starts_U = merge_windows(sources)
        pieces.append(piece)
        starts.append(starts_U + begin)
        begin += len(piece)
    if int(lengths_FU.sum()) < MIN_FACTOR * begin:
        return None
    return join_arrays(pieces), tuple(map(len, pieces)), join_arrays(starts)


def _empty_group(keys: Sequence[str]) -> GroupTensors:
    return GroupTensors(
        keys=tuple(keys),
        values=torch.empty(0, dtype=torch.int64),
        lengths_FU=torch.empty(0, dtype=torch.int32),
        num_stored=(0,) * len(keys),
    )
