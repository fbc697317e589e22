"""Chooses how many of the most read rows of each table are hot, so that most samples read hot rows only.

Rows of a table become hot in the order of their counts, so a hot set is one depth per table. A sample is served when
its least popular row of every table is above that table's depth: a single shallow table is enough to lose it. Growing
from nothing therefore gains nothing for a long time; shrinking from everything shows clearly what to give up.

Shape suffixes: N = samples, T = tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]

CUT_SHARES = (0.01, 0.04, 0.16)  # of the samples still served that one step may give up
NUM_NEEDS = 32  # frequent samples that are tried
MAX_FILLS = 500


def served(deepest_NT: IdArray, depths_T: IdArray) -> npt.NDArray[np.bool_]:
    """Which samples read hot rows only; `deepest_NT` is the rank of their least popular row per table, -1 if none."""
    return np.asarray((deepest_NT < depths_T).all(axis=1))


def choose_depths(
    deepest_NT: IdArray,
    counts: Sequence[IdArray],
    *,
    row_bytes_T: IdArray,
    whole_T: npt.NDArray[np.bool_],
    num_rows_T: IdArray,
    budget_bytes: int,
) -> IdArray:
    """Rows of each table that are hot; `counts` are the tables' counts, falling, and `whole_T` tables hold all rows.

    The best of three candidates: giving up samples cut by cut, adding samples one by one with the cheapest first, and
    one threshold of reads per byte for all tables. If the rows of one frequent sample alone serve more samples than
    that, samples are added to those rows instead.
    """
    limits_T = np.where(whole_T, num_rows_T, np.array([len(own) for own in counts], np.int64))
    floor_T = np.where(whole_T, num_rows_T, 0)
    everything_T = np.minimum(limits_T, deepest_NT.max(axis=0, initial=-1) + 1)

    def spend_rest(start_T: IdArray) -> IdArray:
        depths_T = _fill(deepest_NT, start_T, limits_T, row_bytes_T, budget_bytes)
        return spread_rest(depths_T, counts, row_bytes_T, whole_T, budget_bytes)

    def num_served(depths_T: IdArray) -> int:
        return int(served(deepest_NT, depths_T).sum())

    by_samples = _give_up(deepest_NT, everything_T, floor_T, row_bytes_T, budget_bytes)
    by_reads = spread_rest(floor_T, counts, row_bytes_T, whole_T, budget_bytes)
    best_T = max(spend_rest(by_samples), spend_rest(floor_T), by_reads, key=num_served)
    need_T = max(_frequent_needs(deepest_NT, floor_T, limits_T, row_bytes_T, budget_bytes), key=num_served)
    return spend_rest(need_T) if num_served(need_T) > num_served(best_T) else best_T


def _give_up(
    deepest_NT: IdArray, depths_T: IdArray, floor_T: IdArray, row_bytes_T: IdArray, budget_bytes: int
) -> IdArray:
    """Lower the depths until they fit, each time where a lost sample frees the most bytes."""
    depths_T = np.maximum(depths_T, floor_T)
    alive_NT = deepest_NT[served(deepest_NT, depths_T)]
    while (depths_T * row_bytes_T).sum() > budget_bytes:
        best, chosen = 0.0, None
        ranked_NT = np.sort(alive_NT, axis=0)
        for table in np.flatnonzero(depths_T > floor_T).tolist():
            for depth, num_lost in _cuts(ranked_NT[:, table], int(floor_T[table])):
                freed = (int(depths_T[table]) - depth) * int(row_bytes_T[table])
                if freed / max(num_lost, 0.5) > best:
                    best, chosen = freed / max(num_lost, 0.5), (table, depth)
        if chosen is None:
            return floor_T.copy()
        depths_T[chosen[0]] = chosen[1]
        alive_NT = alive_NT[alive_NT[:, chosen[0]] < chosen[1]]
    return depths_T


def _cuts(ranked_N: IdArray, floor: int) -> list[tuple[int, int]]:
    """(depth, samples lost) of some lower depths of a table, from the ranks that samples still need, ascending."""
    num_samples = len(ranked_N)
    if not num_samples:
        return [(floor, 0)]
    found = []
    for share in CUT_SHARES:
        kept = num_samples - max(1, int(share * num_samples))
        depth = int(ranked_N[kept - 1]) + 1 if kept else floor
        if depth > ranked_N[-1]:  # many samples end at the same row: go below all of them
            kept = int(np.searchsorted(ranked_N, ranked_N[-1]))
            depth = int(ranked_N[kept - 1]) + 1 if kept else floor
        depth = max(depth, floor)
        found.append((depth, num_samples - int(np.searchsorted(ranked_N, depth))))
    return found


def _frequent_needs(
    deepest_NT: IdArray, floor_T: IdArray, limits_T: IdArray, row_bytes_T: IdArray, budget_bytes: int
) -> list[IdArray]:
    """The depths that serve the most frequent samples that fit, and the least that there can be."""
    needs_MT, times_M = np.unique(np.maximum(deepest_NT + 1, floor_T), axis=0, return_counts=True)
    fits_M = (needs_MT <= limits_T).all(axis=1) & ((needs_MT * row_bytes_T).sum(axis=1) <= budget_bytes)
    return [floor_T, *needs_MT[fits_M][np.argsort(-times_M[fits_M], kind="stable")[:NUM_NEEDS]]]


def _fill(
    deepest_NT: IdArray, depths_T: IdArray, limits_T: IdArray, row_bytes_T: IdArray, budget_bytes: int
) -> IdArray:
    """Spend what is left on the samples that need the fewest bytes."""
    depths_T = depths_T.copy()
    for _ in range(MAX_FILLS):
        left = budget_bytes - int((depths_T * row_bytes_T).sum())
        open_NT = deepest_NT[~served(deepest_NT, depths_T) & (deepest_NT < limits_T).all(axis=1)]
        if not len(open_NT):
            break
        needs_N = (np.maximum(open_NT + 1 - depths_T, 0) * row_bytes_T).sum(axis=1)
        cheapest = int(needs_N.argmin())
        if needs_N[cheapest] > left:
            break
        depths_T = np.maximum(depths_T, open_NT[cheapest] + 1)
    return depths_T


def spread_rest(
    depths_T: IdArray,
    counts: Sequence[IdArray],
    row_bytes_T: IdArray,
    whole_T: npt.NDArray[np.bool_],
    budget_bytes: int,
) -> IdArray:
    """Depths grown to the lowest count per byte, equal for all tables, that fits the budget."""

    def depths_at(reads_per_byte: float) -> IdArray:
        found = depths_T.copy()
        for table, own in enumerate(counts):
            if not whole_T[table]:
                depth = int(np.searchsorted(-own, -reads_per_byte * int(row_bytes_T[table]), side="right"))
                found[table] = max(found[table], depth)
        return found

    low, high = 0.0, max((float(own[0]) for own in counts if len(own)), default=0.0) + 1.0
    if (depths_at(low) * row_bytes_T).sum() <= budget_bytes:
        return depths_at(low)
    for _ in range(60):
        middle = (low + high) / 2
        fits = (depths_at(middle) * row_bytes_T).sum() <= budget_bytes
        low, high = (low, middle) if fits else (middle, high)
    return depths_at(high)
