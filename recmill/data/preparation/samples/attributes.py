"""Attributes of users, items and other keys, looked up by the key's code and the time of the event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.data.preparation.samples.timelines import Int64s, Ints

Column = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ListTable:
    """Lists of rows by number: list n is values[starts[n] : starts[n] + lengths[n]]; number 0 stands for a null."""

    starts: Int64s
    lengths: Ints
    values: Int64s


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """Rows sorted by code and, for attributes that change, by when they take effect.

    codes        0   2   2   5
    valid_from   9   1   7   4          # None if each code has one row
    columns      {"price": [...], ...}
    """

    num_codes: int  # of all keys, with rows or without
    codes: Ints
    valid_from: Int64s | None
    columns: Mapping[str, Column]

    def rows_at(self, code_N: Ints, time_N: Int64s) -> Int64s:
        """The row of each code at its time, or -1."""
        if not len(self.codes):
            return np.full(len(code_N), -1, dtype=np.int64)
        if self.valid_from is None:
            return self._row_of_code[code_N]  # the last element is for code -1, a null
        ranks, stored = self._stored
        wanted = code_N.astype(np.int64) * (len(ranks) + 1) + np.searchsorted(ranks, time_N, "right")
        found = np.searchsorted(stored, wanted, "right") - 1
        return np.where((found >= 0) & (self.codes[np.maximum(found, 0)] == code_N), found, -1)

    @cached_property
    def _row_of_code(self) -> Int64s:
        rows = np.full(self.num_codes + 1, -1, dtype=np.int64)
        rows[self.codes] = np.arange(len(self.codes))
        return rows

    @cached_property
    def _stored(self) -> tuple[Int64s, Int64s]:
        """One number per row: its code, then the rank of its time among all times at which rows take effect."""
        assert self.valid_from is not None
        ranks = np.unique(self.valid_from)
        return ranks, self.codes.astype(np.int64) * (len(ranks) + 1) + np.searchsorted(ranks, self.valid_from, "right")

    def look_up(self, column: str, row_N: Int64s) -> Column:
        """The column at these rows; -1 gives row 0 of a vocabulary, or NaN for a dense value."""
        values = self.columns[column]
        missing: Any = np.nan if values.dtype.kind == "f" else 0
        if not len(values):
            return np.full(len(row_N), missing, dtype=values.dtype)
        return np.where(row_N >= 0, values[np.maximum(row_N, 0)], values.dtype.type(missing))
