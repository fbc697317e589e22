"""Compares the lists of neighbouring rows and counts distinct lists, one column at a time."""

# N = rows, V = values of all lists

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class ListColumn:
    """The lists of a column: row i is values_V[offsets[i]:offsets[i + 1]]."""

    values_V: np.ndarray  # int64
    offsets: np.ndarray  # int64, N + 1

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> Self:
        """From a list column, or from a plain one as lists of one value; floats are compared by their bits."""
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # an empty column has no chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        if pa.types.is_list(array.type):
            return cls(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
        values = array.to_numpy()
        bits = values.view(np.int32) if values.dtype == np.float32 else values
        return cls(bits.astype(np.int64), np.arange(len(values) + 1))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths


def positions_in(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Positions of all values of the spans, one span after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions: np.ndarray = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    return positions


def spans_equal(values_V: np.ndarray, left: np.ndarray, right: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Whether values[left:left + length] == values[right:right + length], for every span; empty ones are equal."""
    equal = np.ones(len(lengths), bool)
    some = np.flatnonzero(lengths)
    # Most lists that differ do so at an end, so compare the ends first.
    left_end, right_end = left[some] + lengths[some] - 1, right[some] + lengths[some] - 1
    agree = (values_V[left[some]] == values_V[right[some]]) & (values_V[left_end] == values_V[right_end])
    equal[some[~agree]] = False
    long = some[agree & (lengths[some] > 2)]
    if len(long):
        positions = positions_in(left[long], lengths[long])
        differs = values_V[positions] != values_V[positions + np.repeat(right[long] - left[long], lengths[long])]
        starts = np.cumsum(lengths[long]) - lengths[long]
        equal[long[np.logical_or.reduceat(differs, starts)]] = False
    return equal


def same_as_previous(lists: ListColumn) -> np.ndarray:
    """For every row, whether its list equals that of the row before; False for the first."""
    same = np.zeros(len(lists), bool)
    lengths, starts = lists.lengths, lists.offsets[:-1]
    rows = np.flatnonzero(lengths[1:] == lengths[:-1]) + 1
    same[rows] = spans_equal(lists.values_V, starts[rows], starts[rows - 1], lengths[rows])
    return same


def shifted_by_one(lists: ListColumn, rows: np.ndarray, *, first: int = 0) -> int:
    """How many of `rows` (from `first` on) equal the list before them but for one new value at one end.

    The list grew by one, or kept its length and lost one at the other end. At least one value must have stayed.
    """
    rows = rows[rows >= first]
    lengths, starts = lists.lengths, lists.offsets[:-1]
    growth = lengths[rows] - lengths[rows - 1]
    rows = rows[((growth == 0) | (growth == 1)) & (lengths[rows] >= 2)]
    now, before, kept = starts[rows], starts[rows - 1], lengths[rows] - 1
    appended = spans_equal(lists.values_V, now, before + lengths[rows - 1] - kept, kept)
    prepended = spans_equal(lists.values_V, now + 1, before, kept)
    return int((appended | prepended).sum())


def hash_lists(lists: ListColumn) -> np.ndarray:
    """A 64-bit hash of every list. Equal lists have equal hashes; whether equal hashes mean equal lists is checked."""
    lengths, first = lists.lengths, int(lists.offsets[0])
    hashes = lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    if lists.offsets[-1] == first:
        return hashes
    values = lists.values_V[first : int(lists.offsets[-1])].astype(np.uint64)
    place = np.arange(len(values), dtype=np.uint64) - np.repeat(lists.offsets[:-1] - first, lengths).astype(np.uint64)
    values += place * np.uint64(0xD6E8FEB86659FD93)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(29)
    values *= np.uint64(0x94D049BB133111EB)
    some = np.flatnonzero(lengths)
    hashes[some] += np.add.reduceat(values, lists.offsets[:-1][some] - first)
    return hashes


def count_distinct(lists: ListColumn, hashes: np.ndarray, group: np.ndarray, rows: np.ndarray) -> int:
    """How many pairs (group, list) are distinct among `rows`. Equal hashes are confirmed by comparing the lists."""
    keys = hashes[rows] ^ (group[rows].astype(np.uint64) * np.uint64(0xA24BAED4963EE407))
    order = np.argsort(keys)
    rows, keys = rows[order], keys[order]
    lengths, starts = lists.lengths, lists.offsets[:-1]
    pairs = np.flatnonzero(keys[1:] == keys[:-1])
    left, right = rows[pairs], rows[pairs + 1]
    equal = (lengths[left] == lengths[right]) & (group[left] == group[right])
    comparable = np.flatnonzero(equal)
    left, right = left[comparable], right[comparable]
    equal[comparable] = spans_equal(lists.values_V, starts[left], starts[right], lengths[left])
    if equal.all():
        return len(rows) - len(pairs)
    # Different lists with the same hash are rare: compare their contents.
    collided = np.isin(keys, keys[pairs[~equal]])
    contents = {
        (int(group[row]), lists.values_V[starts[row] : starts[row] + lengths[row]].tobytes()) for row in rows[collided]
    }
    agreeing = int(equal.sum()) - int((equal & np.isin(keys[pairs], keys[pairs[~equal]])).sum())
    return int((~collided).sum()) - agreeing + len(contents)
