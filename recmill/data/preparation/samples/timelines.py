"""Users' events in time order: sessions, requests and what came before each.

Events are sorted by user and time. N = events.

    user      7  7  7  7  9  9
    time      1  5  5  8  2  3
    before    0  1  1  3  4  5      # events of the user before this position came before the event's request
    first     0  0  0  0  4  4      # the user's first event
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recmill.artifacts import InputError
from recmill.data.sources.lists import position_in_run, starts_of_runs

Ints = npt.NDArray[np.integer[Any]]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SESSION_BITS = 24  # a session's id is its user's number and its own number among the user's sessions


@dataclass(frozen=True, kw_only=True)
class Timelines:
    """What follows from users, times and requests alone."""

    first_N: Int64s
    request_N: Int64s  # the first event of the request
    before_N: Int64s
    session_N: Int64s

    @classmethod
    def of(
        cls, user_N: Ints, time_N: Int64s, *, request_N: Ints | None, session_N: Ints | None, gap_ms: int
    ) -> Timelines:
        """`session_N` holds given ids; without it a session ends where the next event is later than `gap_ms`."""
        is_first = starts_of_runs(user_N)
        first_N = _carry(is_first)
        before_N = opener_N = _carry(is_first | starts_of_runs(time_N))
        if request_N is not None:
            opener_N = _first_of_groups(user_N, request_N)
            before_N = before_N[opener_N]
        number_N: Int64s
        if session_N is None:
            is_start = is_first.copy()
            is_start[1:] |= np.diff(time_N) > gap_ms
            started: Int64s = np.cumsum(is_start)
            number_N = started - started[first_N]
        else:
            start_N = _first_of_groups(user_N, session_N)
            started = np.cumsum(start_N == np.arange(len(user_N)))
            number_N = started[start_N] - started[first_N]
        if len(number_N) and int(number_N.max()) >= 1 << SESSION_BITS:
            raise InputError(f"a user has more than {1 << SESSION_BITS:,} sessions; expected a larger gap")
        ids_N = (user_N.astype(np.int64) << SESSION_BITS) | number_N
        return cls(first_N=first_N, request_N=opener_N, before_N=before_N, session_N=ids_N)


def _carry(is_start: Bools) -> Int64s:
    """For each position the nearest start at or before it."""
    positions: Int64s = np.arange(len(is_start), dtype=np.int64)
    return np.maximum.accumulate(np.where(is_start, positions, 0))


def _first_of_groups(user_N: Ints, group_N: Ints) -> Int64s:
    """For each event the position of the first event of the same user and group."""
    order = np.lexsort((group_N, user_N))  # stable: positions ascend inside a group
    is_start = starts_of_runs(group_N[order]) | starts_of_runs(user_N[order])
    first: Int64s = np.empty(len(order), dtype=np.int64)
    first[order] = order[_carry(is_start)]
    return first


def settle_ties(user_N: Ints, time_N: Int64s, columns: Sequence[npt.NDArray[Any]]) -> Int64s | None:
    """An order of each user's events at the same time that follows from their columns; None: as they are."""
    same = (user_N[1:] == user_N[:-1]) & (time_N[1:] == time_N[:-1])
    if not same.any():
        return None
    is_tied = np.zeros(len(user_N), dtype=np.bool_)
    is_tied[1:] |= same
    is_tied[:-1] |= same
    tied = np.flatnonzero(is_tied)
    order: Int64s = np.arange(len(user_N), dtype=np.int64)
    keys = [*(column[tied] for column in reversed(columns)), time_N[tied], user_N[tied]]
    order[tied] = tied[np.lexsort(keys)]
    return order


def number_repeats(keys: Sequence[Ints]) -> Int64s:
    """0, 1, 2, ... for rows with equal keys, in their order."""
    order = np.lexsort(tuple(keys))
    is_start = np.logical_or.reduce([starts_of_runs(key[order]) for key in keys])
    number: Int64s = np.empty(len(order), dtype=np.int64)
    number[order] = position_in_run(is_start)
    return number
