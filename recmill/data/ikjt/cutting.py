"""Cuts batches from row groups that store each repeated list once: first a row group is packed, then batches are cut.

Nothing is hashed or compared here. Repeats were found once per row group; what remains is renumbering.

Shape suffixes: R = rows (samples) of a row group, F = features of a group, U = distinct rows, B = samples of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.buffers import empty_array, join_arrays
from kernels.merge_windows import merge_windows
from recmill.data.ikjt.build import GroupTensors
from recmill.data.ikjt.distinct import (
    MIN_FACTOR,
    DistinctBlock,
    DistinctGroup,
    IdArray,
    LengthArray,
    Rows,
    is_packed,
    stack_rows,
    take_lists,
)
from recmill.data.ikjt.tensor import InverseKeyedJaggedTensor

# With more breaks than this share of samples, hardly any slice is a run, and its lists are picked one by one.
MAX_BREAKS = 0.01
MAX_EXPANDED_LENGTH = 2.0  # mean length of lists that are expanded for the whole row group


def pack_block(
    block: DistinctBlock,
    *,
    dedup: Sequence[Sequence[str]] | None,
    windows: Sequence[str] = (),
    expand: frozenset[str] = frozenset(),
) -> DistinctBlock:
    """The block laid out for batches in which the groups `dedup` are deduplicated; `block` has these groups already.

    Features in `expand` get one list per sample here, once. All blocks of a batch must agree on them.
    """
    deduplicated = {key for group in dedup or () for key in group}
    groups: list[DistinctGroup] = []
    short: list[DistinctGroup] = []
    plain: list[DistinctGroup] = []
    for group in block.groups:
        is_stored_once = deduplicated.issuperset(group.keys)
        keeps_windows = dedup is not None and not set(windows).isdisjoint(group.keys)
        if is_stored_once or keeps_windows:
            groups.append(_pack_group(group, is_expanded=not is_stored_once, keeps_windows=keeps_windows))
        elif expand.issuperset(group.keys):
            short.append(group)
        elif group.inverse_R is None:
            plain.append(group)
        else:
            groups.append(_pack_group(group, is_expanded=True))
    # Together: what a batch costs besides copying grows with the number of groups.
    if plain:
        groups.append(_pack_group(_merge(plain), is_expanded=True))
    if short:
        merged = _single_ids(short, len(block)) or _pack_group(_merge(list(map(_expand, short))), is_expanded=True)
        groups.append(merged)
    row_bytes_R, new_bytes_R = _count_bytes(block, groups)
    return replace(block, groups=tuple(groups), row_bytes_R=row_bytes_R, new_bytes_R=new_bytes_R)


def short_features(block: DistinctBlock) -> frozenset[str]:
    """Features whose lists are so short that one per sample costs less to hold than to pick for every batch."""
    return frozenset(
        key
        for group in block.groups
        for key, _, _, lengths_U in group.features()
        if int(lengths_U.sum()) <= MAX_EXPANDED_LENGTH * len(lengths_U)
    )


def _single_ids(groups: Sequence[DistinctGroup], num_rows: int) -> DistinctGroup | None:
    """The features as one id per sample, if all their lists have length 1: no lists to walk, here or in a batch."""
    if any((lengths_U != 1).any() for group in groups for lengths_U in group.lengths_FU):
        return None
    keys = tuple(key for group in groups for key in group.keys)
    ids_FR = empty_array((len(keys), num_rows), np.int64)
    position = 0
    for group in groups:
        inverse_R = None if group.inverse_R is None else group.inverse_R.astype(np.intp)
        for _, values, starts_U, _ in group.features():
            if inverse_R is None:
                np.take(values, starts_U, out=ids_FR[position], mode="clip")
            else:
                np.take(values[starts_U], inverse_R, out=ids_FR[position], mode="clip")
            position += 1
    return DistinctGroup(
        keys=keys,
        values=tuple(ids_FR),
        starts_FU=np.broadcast_to(np.arange(num_rows), ids_FR.shape),
        lengths_FU=np.broadcast_to(np.int32(1), ids_FR.shape),
        is_packed=True,
        is_expanded=True,
        ids_FR=ids_FR,
    )


def _expand(group: DistinctGroup) -> DistinctGroup:
    """The group with one list per sample."""
    if group.inverse_R is None:
        return group
    lengths_FR = group.lengths_FU[:, group.inverse_R]
    lists = zip(group.values, group.starts_FU[:, group.inverse_R], lengths_FR, strict=True)
    return DistinctGroup(
        keys=group.keys,
        values=tuple(take_lists(values, starts_R, lengths_R) for values, starts_R, lengths_R in lists),
        starts_FU=np.cumsum(lengths_FR, axis=1, dtype=np.int64) - lengths_FR,
        lengths_FU=lengths_FR,
    )


def _merge(groups: Sequence[DistinctGroup]) -> DistinctGroup:
    """One group from several without an inverse."""
    return DistinctGroup(
        keys=tuple(key for group in groups for key in group.keys),
        values=tuple(values for group in groups for values in group.values),
        starts_FU=stack_rows([starts_U for group in groups for starts_U in group.starts_FU]),
        lengths_FU=stack_rows([lengths_U for group in groups for lengths_U in group.lengths_FU]),
    )


def _pack_group(group: DistinctGroup, *, is_expanded: bool, keeps_windows: bool = False) -> DistinctGroup:
    """The group with gaps between its lists closed, and in one buffer if lists have to be picked one by one."""
    values, starts = list(group.values), list(group.starts_FU)
    all_packed = True
    for position, (_, own_values, starts_U, lengths_U) in enumerate(group.features()):
        is_run = is_packed(starts_U, lengths_U)
        if not is_run and not keeps_windows and int(lengths_U.sum()) <= len(own_values):
            # Shortened lists leave gaps: closed once here rather than in every batch.
            values[position] = take_lists(own_values, starts_U, lengths_U)
            starts[position], is_run = np.cumsum(lengths_U, dtype=np.int64) - lengths_U, True
        all_packed &= is_run
    is_same = all(new is old for new, old in zip(values, group.values, strict=True))
    starts_FU = group.starts_FU if is_same else stack_rows(starts)
    breaks_R = None if group.inverse_R is None else _count_breaks(group.inverse_R)
    is_scattered = breaks_R is not None and (is_expanded or int(breaks_R[-1]) > MAX_BREAKS * len(breaks_R))
    if not keeps_windows and (is_scattered or not all_packed):
        begins_F = np.cumsum([0, *map(len, values[:-1])], dtype=np.int64)
        values = [join_arrays(values)] * len(values)
        starts_FU = starts_FU + begins_F[:, None]
    return replace(
        group,
        values=tuple(values),
        starts_FU=np.ascontiguousarray(starts_FU),
        lengths_FU=np.ascontiguousarray(group.lengths_FU),
        breaks_R=breaks_R,
        is_packed=all_packed,
        is_expanded=is_expanded,
        keeps_windows=keeps_windows,
    )


def _count_breaks(inverse_R: LengthArray) -> LengthArray:
    steps_R = np.diff(inverse_R, prepend=inverse_R[:1])
    breaks_R: LengthArray = np.cumsum((steps_R != 0) & (steps_R != 1), dtype=np.int32)
    return breaks_R


def _count_bytes(block: DistinctBlock, groups: Sequence[DistinctGroup]) -> tuple[IdArray, IdArray]:
    """(bytes of each row with all its lists, running sum of the bytes that are new in each row)."""
    fixed = 4 * (int(block.dense_RF.shape[1]) + int(block.label_RT.shape[1]))
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
