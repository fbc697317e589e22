"""The definition of `decode_inverse`, `decode_symbols` and `decode_windows` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]
IdArray = npt.NDArray[np.int64]


def decode_inverse(num_rows_S: IntArray, changed: npt.NDArray[np.bool_], again_C: IntArray) -> tuple[IntArray, IdArray]:
    events = iter(again_C.tolist() if len(again_C) else [0] * int(changed.sum()))
    changes = iter(changed.tolist())
    if (num_rows_S < 1).any() or int(num_rows_S.sum()) != len(changed) + len(num_rows_S):
        raise ValueError(f"the sessions have {num_rows_S.tolist()} rows and {len(changed)} bits")
    inverse: list[int] = []
    num_distinct: list[int] = []
    for num_rows in num_rows_S.tolist():
        base = sum(num_distinct)
        seen, current = 1, 0
        inverse.append(base)
        for _ in range(num_rows - 1):
            if next(changes):
                older = next(events, None)
                if older is None or not 0 <= older <= seen:
                    raise ValueError(f"a change names list {older} of {seen}")
                current = older - 1 if older else seen
                seen += not older
            inverse.append(base + current)
        num_distinct.append(seen)
    if next(events, None) is not None:
        raise ValueError(f"{int(changed.sum())} rows changed, expected {len(again_C)} as listed")
    return np.array(inverse, np.int32), np.array(num_distinct, np.int64)


def decode_symbols(
    symbols_N: Bytes, rest: Bytes, *, begins: IdArray, num_rest: IntArray, first_escape: int, popular: IdArray
) -> IdArray:
    ids_N: IdArray = begins[symbols_N]
    counts_N = num_rest[symbols_N]
    starts_N = np.cumsum(counts_N) - counts_N
    if int(counts_N.sum()) != len(rest):
        raise ValueError(f"the symbols need {int(counts_N.sum())} following bytes, received {len(rest)}")
    in_block = np.flatnonzero((counts_N > 0) & (symbols_N < first_escape))
    positions = ids_N[in_block] + rest[starts_N[in_block]]
    if (positions >= len(popular)).any():
        raise ValueError(f"a symbol names popular id {int(positions.max())} of {len(popular)}")
    ids_N[in_block] = popular[positions]
    for byte in range(int(num_rest.max())):
        own = np.flatnonzero((counts_N > byte) & (symbols_N >= first_escape))
        ids_N[own] |= rest[starts_N[own] + byte].astype(np.int64) << (8 * byte)
    return ids_N


def decode_windows(
    values: IdArray, steps_U: IntArray, lengths: IntArray, num_distinct_S: IdArray, *, begins_S: IdArray | None
) -> tuple[IdArray, IdArray, IntArray]:
    """P = used parts of shared sequences."""
    num_windows, num_values = len(steps_U), len(values)
    if int(num_distinct_S.sum()) != num_windows or len(lengths) not in (1, num_windows):
        raise ValueError(f"received {num_windows} windows and {len(lengths)} lengths for {num_distinct_S.tolist()}")
    session_U = np.repeat(np.arange(len(num_distinct_S)), num_distinct_S)
    ends_U = _add_up(steps_U, session_U)
    lengths_U = np.minimum(ends_U, lengths[0]) if len(lengths) == 1 else _add_up(lengths, session_U)
    highest_S = np.zeros(len(num_distinct_S), np.int64)
    np.maximum.at(highest_S, session_U, ends_U)
    first_S = np.cumsum(highest_S) - highest_S if begins_S is None else begins_S
    if (lengths_U < 0).any() or (lengths_U > ends_U).any() or (first_S + highest_S > num_values).any():
        raise ValueError(f"a window does not lie in its sequence; there are {num_values} values")
    starts_U = first_S[session_U] + ends_U - lengths_U
    if begins_S is None:
        return values, starts_U, lengths_U.astype(np.int32)
    known_P, part_S = np.unique(begins_S, return_inverse=True)
    low_P, high_P = np.full(len(known_P), np.iinfo(np.int64).max), known_P.copy()
    np.minimum.at(low_P, part_S[session_U], starts_U)
    np.maximum.at(high_P, part_S[session_U], starts_U + lengths_U)
    sizes_P = high_P - low_P
    starts_U += (np.cumsum(sizes_P) - sizes_P - low_P)[part_S[session_U]]
    parts = [values[low:high] for low, high in zip(low_P.tolist(), high_P.tolist(), strict=True)]
    return np.concatenate([values[:0], *parts]), starts_U, lengths_U.astype(np.int32)


def _add_up(steps_U: npt.NDArray[Any], session_U: IdArray) -> IdArray:
    """Running sums of the steps, which restart with each session."""
    sums_U = np.cumsum(steps_U, dtype=np.int64)
    first_U = np.searchsorted(session_U, session_U)
    sums_U += steps_U[first_U] - sums_U[first_U]
    return sums_U
