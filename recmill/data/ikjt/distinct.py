"""Decoded rows of a row group with each repeated list held once: what the reader hands to transforms and batches.

Shape suffixes: R = rows (samples) of the row group, U = distinct rows of a group, F = dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from kernels import dedup_rows, take_rows, take_windows, window_rows
from recmill.artifacts import InputError
from recmill.data.ikjt.build import MIN_FACTOR
from recmill.data.schema import Schema

if TYPE_CHECKING:
    from recmill.data.ikjt.batch import RowBlock

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctGroup:
    """Features that share one inverse. Distinct row u of the f-th feature is

        values[f][starts[f][u] : starts[f][u] + lengths[f][u]]

    so lists may lie one after another or be overlapping windows of a history. `inverse_R` maps a sample to its
    distinct row; None means that every sample has its own (U = R).
    """

    keys: tuple[str, ...]
    values: tuple[IdArray, ...]
    starts: tuple[IdArray, ...]
    lengths: tuple[npt.NDArray[np.int32], ...]
    inverse_R: npt.NDArray[np.int32] | None = None

    @property
    def num_distinct(self) -> int:
        return len(self.lengths[0])

    def size_in_bytes(self) -> int:
        lists = sum(
            v.nbytes + s.nbytes + n.nbytes for v, s, n in zip(self.values, self.starts, self.lengths, strict=True)
        )
        return lists + (0 if self.inverse_R is None else self.inverse_R.nbytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistinctBlock:
    """All samples of a row group. The groups hold every id feature of the schema exactly once."""

    dense_RF: npt.NDArray[np.float32]
    label_R: npt.NDArray[np.float32]
    groups: tuple[DistinctGroup, ...]

    def __len__(self) -> int:
        return int(self.label_R.shape[0])

    def size_in_bytes(self) -> int:
        return self.dense_RF.nbytes + self.label_R.nbytes + sum(group.size_in_bytes() for group in self.groups)


def find_distinct(block: RowBlock, keys: Sequence[str], groups: Sequence[Sequence[str]]) -> DistinctBlock:
    """The rows of a block whose id features are `keys`, with the given groups deduplicated over the row group.

    What is kept of a group are copies of its distinct lists, so the columns they come from can go. A feature in no
    group, and a group that never repeats, stays where it is.
    """
    position_of = {key: position for position, key in enumerate(keys)}
    found = [_find_group(block, group, [position_of[key] for key in group]) for group in groups]
    grouped = {key for group in groups for key in group}
    found += [_plain_group(block, [key], [position_of[key]]) for key in keys if key not in grouped]
    return DistinctBlock(dense_RF=block.dense_RF, label_R=block.label_R, groups=tuple(found))


def _find_group(block: RowBlock, keys: Sequence[str], positions: Sequence[int]) -> DistinctGroup:
    values = [as_tensor(block.values[position]) for position in positions]
    offsets = [as_tensor(block.offsets[position].astype(np.int64, copy=False)) for position in positions]
    unique_U, inverse_R = dedup_rows(values, offsets, num_threads=1)
    num_distinct = len(unique_U)
    if num_distinct == len(inverse_R):
        return _plain_group(block, keys, positions)
    stored, lengths_FU = take_rows(values, offsets, unique_U, num_threads=1)
    per_feature = lengths_FU.view(len(keys), num_distinct).numpy()
    ends_FU = per_feature.cumsum(axis=1)
    edges = np.cumsum([0, *(int(ends_U[-1]) for ends_U in ends_FU)])
    return DistinctGroup(
        keys=tuple(keys),
        values=tuple(stored.numpy()[first:last] for first, last in pairwise(edges)),
        starts=tuple(ends_FU - per_feature),
        lengths=tuple(per_feature.astype(np.int32)),
        inverse_R=inverse_R.int().numpy(),
    )


def _plain_group(block: RowBlock, keys: Sequence[str], positions: Sequence[int]) -> DistinctGroup:
    return DistinctGroup(
        keys=tuple(keys),
        values=tuple(block.values[position] for position in positions),
        starts=tuple(block.offsets[position][:-1].astype(np.int64) for position in positions),
        lengths=tuple(np.diff(block.offsets[position]).astype(np.int32, copy=False) for position in positions),
    )


def regroup(block: DistinctBlock, groups: Sequence[Sequence[str]]) -> DistinctBlock:
    """The block with the given groups, which hold all its features, made from whatever groups it has.

    Rows are the same if the stored groups number them the same, so nothing is compared and no value is copied.
    """
    if [list(group) for group in groups] == [list(group.keys) for group in block.groups]:
        return block
    source_of = {key: group for group in block.groups for key in group.keys}
    joined = tuple(_join([source_of[key] for key in keys], keys, len(block)) for keys in groups)
    return DistinctBlock(dense_RF=block.dense_RF, label_R=block.label_R, groups=joined)


def _join(sources: Sequence[DistinctGroup], keys: Sequence[str], num_rows: int) -> DistinctGroup:
    """One group of `keys`, the f-th of them taken from the f-th of `sources`."""
    inverses = {id(source): source.inverse_R for source in sources}
    rows_of: dict[int, npt.NDArray[np.integer] | None] = dict.fromkeys(
        inverses
    )  # where a source's rows are, if not as they were
    inverse_R = sources[0].inverse_R
    if len(inverses) > 1:
        if any(inverse is None for inverse in inverses.values()):
            first_U, inverse_R = np.arange(num_rows), None
        else:
            each = torch.arange(num_rows + 1)
            columns = [as_tensor(inverse) for inverse in inverses.values() if inverse is not None]
            unique_U, joint_R = dedup_rows(columns, [each] * len(columns), num_threads=1)
            first_U, inverse_R = unique_U.numpy(), joint_R.int().numpy()
        rows_of = {name: first_U if inverse is None else inverse[first_U] for name, inverse in inverses.items()}
    picked = []
    for source, key in zip(sources, keys, strict=True):
        at, rows = source.keys.index(key), rows_of[id(source)]
        starts, lengths = source.starts[at], source.lengths[at]
        picked.append((source.values[at], *((starts, lengths) if rows is None else (starts[rows], lengths[rows]))))
    values, all_starts, all_lengths = zip(*picked, strict=True)
    return DistinctGroup(keys=tuple(keys), values=values, starts=all_starts, lengths=all_lengths, inverse_R=inverse_R)


def find_windows(block: DistinctBlock, keys: Sequence[str]) -> DistinctBlock:
    """The block with the lists of the named features as windows of a shared buffer, where that saves `MIN_FACTOR`."""
    groups = []
    for group in block.groups:
        values, starts = list(group.values), list(group.starts)
        for position in [position for position, key in enumerate(group.keys) if key in keys]:
            lengths_U = group.lengths[position]
            if not is_packed(starts[position], lengths_U):
                continue
            offsets = np.concatenate([starts[position], starts[position][-1:] + lengths_U[-1:]])
            buffer, _, window_starts = window_rows(as_tensor(values[position]), as_tensor(offsets))
            if MIN_FACTOR * len(buffer) <= int(offsets[-1] - offsets[0]):
                values[position], starts[position] = buffer.numpy(), window_starts.numpy()
        groups.append(replace(group, values=tuple(values), starts=tuple(starts)))
    return replace(block, groups=tuple(groups))


def check_ranges(block: DistinctBlock, schema: Schema, *, where: str) -> None:
    """Raise for ids outside their table: an embedding lookup would read or write foreign memory."""
    for group in block.groups:
        columns = zip(group.keys, group.values, group.starts, group.lengths, strict=True)
        for key, values, starts_U, lengths_U in columns:
            num_rows = schema.feature(key).num_rows
            if not values.size or (int(values.min()) >= 0 and int(values.max()) < num_rows):
                continue
            used = take_lists(values, starts_U, lengths_U)  # what lies outside of all lists may be anything
            wrong = np.flatnonzero((used < 0) | (used >= num_rows))
            if wrong.size:
                distinct = int(np.searchsorted(np.cumsum(lengths_U), wrong[0], side="right"))
                row = distinct if group.inverse_R is None else int(np.argmax(group.inverse_R == distinct))
                raise InputError(
                    f"{where}: column {key!r}, row {row}: id {int(used[wrong[0]])} lies outside [0, {num_rows})"
                    + (" after its transforms" if schema.feature(key).transforms else "")
                )


def is_packed(starts_U: IdArray, lengths_U: npt.NDArray[np.int32]) -> bool:
    """Whether each list begins where the one before it ends, so that a range of rows is one run of values."""
    return bool(len(starts_U) and np.array_equal(starts_U[1:], starts_U[:-1] + lengths_U[:-1]))


def as_tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """The array as a tensor, not copied. By way of Arrow: torch.from_numpy warns of arrays that are read-only."""
    if array.flags.writeable or not len(array):
        return torch.from_numpy(array if len(array) else array.copy())
    return from_dlpack(pa.array(array))


def take_lists(values: IdArray, starts_W: IdArray, lengths_W: npt.NDArray[np.int32]) -> IdArray:
    """values[start : start + length] of every list, one after another."""
    lengths = torch.from_numpy(lengths_W.astype(np.int64))
    starts = as_tensor(np.ascontiguousarray(starts_W))
    taken: IdArray = take_windows(as_tensor(values), starts, lengths, num_threads=1).numpy()
    return taken
