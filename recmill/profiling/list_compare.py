"""Compares the lists of neighbouring rows and counts distinct lists, one column at a time."""

# N = rows, V = values of all lists

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa

from kernels import dedup_rows


@dataclass(frozen=True)
class ListColumn:
    """The lists of a column: row i is values_V[offsets[i]:offsets[i + 1]]."""

    values_V: np.ndarray
    offsets: np.ndarray  # int64, N + 1

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> Self:
        """From a list column, or from a plain one as lists of one value."""
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # an empty column has no chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        if pa.types.is_list(array.type):
            return cls(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
        return cls(array.to_numpy(), np.arange(len(array) + 1))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def identity_N(self) -> np.ndarray:
        """A number per row, equal where the lists have the same bytes."""
        return dedup_rows([self.values_V], [self.offsets], num_threads=1)[1]

    @property
    def same_as_previous_N(self) -> np.ndarray:
        """Whether a row's list equals that of the row before; False for the first."""
        same: np.ndarray = np.diff(self.identity_N, prepend=-1) == 0
        return same

    def count_distinct(self, group_N: np.ndarray, rows: np.ndarray) -> int:
        """How many pairs (group, list) are distinct among `rows`."""
        pairs = np.sort(group_N[rows] * len(self) + self.identity_N[rows])  # np.unique takes five times as long
        return int(np.count_nonzero(np.diff(pairs, prepend=-1)))


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
        starts = np.cumsum(lengths[long]) - lengths[long]
        positions = np.repeat(left[long] - starts, lengths[long]) + np.arange(lengths[long].sum())
        differs = values_V[positions] != values_V[positions + np.repeat(right[long] - left[long], lengths[long])]
        equal[long[np.logical_or.reduceat(differs, starts)]] = False
    return equal


def shifted_by_one(lists: ListColumn, rows: np.ndarray, *, first: int = 0) -> int:
    """How many of `rows` (from `first` on) equal the list before them but for one new value at one end.

    The list grew by one, or kept its length and lost one at the other end. At least one value must have stayed.
    """
    rows = rows[rows >= first]
    lengths, starts = np.diff(lists.offsets), lists.offsets[:-1]
    growth = lengths[rows] - lengths[rows - 1]
    rows = rows[((growth == 0) | (growth == 1)) & (lengths[rows] >= 2)]
    now, before, kept = starts[rows], starts[rows - 1], lengths[rows] - 1
    appended = spans_equal(lists.values_V, now, before + lengths[rows - 1] - kept, kept)
    prepended = spans_equal(lists.values_V, now + 1, before, kept)
    return int((appended | prepended).sum())
