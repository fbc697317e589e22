"""How a row group is laid out so that batches can be cut from it without comparing or hashing anything.

Shape suffixes: R = rows (samples) of a row group, F = features of a group, U = distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kernels.buffers import empty_array, join_arrays
from recmill.data.ikjt.distinct import (
    DistinctBlock,
    DistinctGroup,
    IdArray,
    LengthArray,
    is_packed,
    stack_rows,
    take_lists,
)

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
