"""Which items become negatives. A negative is never an item that the user has as a positive.

Draws are hashes of the seed and the positive (its user, time, item and number among equal ones), so that every engine
draws the same. P = positives, K = negatives per positive, C = candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.data.preparation.samples.timelines import Bools, Int64s, Ints
from recmill.data.sources.lists import position_in_run, starts_of_runs

ATTEMPTS = 16  # then the next item that is free, in the order of the items
UInt64s = npt.NDArray[np.uint64]


def mixed(*keys: Any) -> UInt64s:
    """One well-mixed 64-bit number per row of the keys (splitmix64)."""
    state = np.zeros(1, dtype=np.uint64)  # an array: numpy warns when a scalar overflows
    for key in keys:
        state = (np.atleast_1d(key).astype(np.uint64) ^ state) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


@dataclass(frozen=True, kw_only=True)
class Positives:
    """The items that users have as positives, as sorted pairs."""

    pairs: Int64s
    num_items: int

    @classmethod
    def of(cls, user_P: Ints, item_P: Ints, *, num_items: int) -> Positives:
        return cls(pairs=np.unique(user_P.astype(np.int64) * num_items + item_P), num_items=num_items)

    def contain(self, user_C: Ints, item_C: Ints) -> Bools:
        wanted = user_C.astype(np.int64) * self.num_items + item_C
        if not len(self.pairs):
            return np.zeros(len(wanted), dtype=np.bool_)
        found = np.searchsorted(self.pairs, wanted)
        found[found == len(self.pairs)] = 0
        is_found: Bools = self.pairs[found] == wanted
        return is_found

    def items_of(self, user: int) -> Int64s:
        low, high = np.searchsorted(self.pairs, [user * self.num_items, (user + 1) * self.num_items])
        return self.pairs[low:high] - user * self.num_items


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Items and how often each is drawn: `ends[i]` is the sum of the weights up to item i."""

    ends: Int64s

    def draw(self, key_P: UInt64s, user_P: Ints, positives: Positives, *, per_positive: int, seed: int) -> Int64s:
        """`per_positive` items per positive, [P, K]; -1 where the user has every item as a positive."""
        num_drawn = len(key_P) * per_positive
        key_D, user_D = np.repeat(key_P, per_positive), np.repeat(user_P, per_positive)
        number_D = np.tile(np.arange(per_positive, dtype=np.uint64), len(key_P))
        item_D = np.empty(num_drawn, dtype=np.int64)
        open_D = np.arange(num_drawn)
        for attempt in range(ATTEMPTS):
            hashed = mixed(key_D[open_D], number_D[open_D], seed * ATTEMPTS + attempt)
            item_D[open_D] = np.searchsorted(self.ends, (hashed % np.uint64(self.ends[-1])).astype(np.int64), "right")
            open_D = open_D[positives.contain(user_D[open_D], item_D[open_D])]
            if not len(open_D):
                break
        for drawn in open_D:
            item_D[drawn] = self._next_free(int(item_D[drawn]), positives.items_of(int(user_D[drawn])))
        return item_D.reshape(-1, per_positive)

    def _next_free(self, item: int, taken: Int64s) -> int:
        weights = np.diff(self.ends, prepend=0)
        free = np.setdiff1d(np.flatnonzero(weights), taken)
        if not len(free):
            return -1
        return int(free[np.searchsorted(free, item) % len(free)])


def keep_negatives(
    is_candidate_N: Bools, is_positive_N: Bools, group_N: Int64s, key_N: UInt64s, *, per_positive: int
) -> Bools:
    """The candidates with the smallest keys of each group, at most `per_positive` per positive of the group."""
    candidates = np.flatnonzero(is_candidate_N)
    order = candidates[np.lexsort((key_N[candidates], group_N[candidates]))]
    groups, counts = np.unique(group_N[is_positive_N], return_counts=True)
    kept = np.zeros(len(group_N), dtype=np.bool_)
    if not len(groups) or not len(order):
        return kept
    found = np.minimum(np.searchsorted(groups, group_N[order]), len(groups) - 1)
    allowed = np.where(groups[found] == group_N[order], counts[found] * per_positive, 0)
    kept[order[position_in_run(starts_of_runs(group_N[order])) < allowed]] = True
    return kept
