"""The streams of a deduplicated row group as arrays: which distinct list a row has, ids from symbols, windows.

recmill/data/deduplicated.py and popular_ids.py define the streams. They come from files, so everything is checked:
ValueError says what does not fit.

Shape suffixes: S = sessions, R = rows, U = distinct rows, C = rows that changed, N = ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.buffers import empty_array

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]
IdArray = npt.NDArray[np.int64]


def decode_inverse(
    num_rows_S: IntArray,
    changed_bits: Bytes,
    again_C: IntArray,
    *,
    num_bits: int,
    first_bit: int = 0,
    kernel: str | None = None,
) -> tuple[IntArray, IdArray]:
    """`(inverse_R, num_distinct_S)`: each row's distinct row among those of all sessions, and their number per session.

        sessions of 4 and 1 rows      changed = no, yes, yes      again = 0, 1
        gives  inverse = 0, 0, 1, 0 | 2      num_distinct = 2, 1

    Bits are ordered as in Arrow, lowest first: `num_bits` of them from `first_bit` on.
    """
    if first_bit < 0 or num_bits < 0 or first_bit + num_bits > 8 * len(changed_bits):
        raise ValueError(f"received {8 * len(changed_bits)} bits, expected {num_bits} from {first_bit} on")
    if pick_backend(kernel, num_rows_S) == "reference":
        from kernels.decode_streams import reference

        bits = np.unpackbits(changed_bits, bitorder="little")[first_bit : first_bit + num_bits].astype(np.bool_)
        return reference.decode_inverse(num_rows_S, bits, again_C)
    inverse_R = empty_array(num_bits + len(num_rows_S), np.int32)
    num_distinct_S = empty_array(len(num_rows_S), np.int64)
    _cpu.decode_inverse(num_rows_S, changed_bits, first_bit, again_C, inverse_R, num_distinct_S)
    return inverse_R, num_distinct_S


def decode_symbols(
    symbols_N: Bytes,
    rest: Bytes,
    *,
    begins: IdArray,
    num_rest: IntArray,
    first_escape: int,
    popular: IdArray,
    kernel: str | None = None,
) -> IdArray:
    """The ids of the symbols. Symbol s stands for begins[s], followed by num_rest[s] bytes of `rest`.

    Without following bytes begins[s] is the id. Below `first_escape` one byte follows; added to begins[s], it is a
    position in `popular`. From `first_escape` on, the following bytes are the id's low bytes.
    """
    if pick_backend(kernel, symbols_N) == "reference":
        from kernels.decode_streams import reference

        return reference.decode_symbols(
            symbols_N, rest, begins=begins, num_rest=num_rest, first_escape=first_escape, popular=popular
        )
    ids_N = empty_array(len(symbols_N), np.int64)
    _cpu.decode_symbols(symbols_N, rest, begins, num_rest, first_escape, popular, ids_N)
    return ids_N


def decode_windows(
    values: IdArray,
    steps_U: IntArray,
    lengths: IntArray,
    num_distinct_S: IdArray,
    *,
    begins_S: IdArray | None = None,
    kernel: str | None = None,
) -> tuple[IdArray, IdArray, IntArray]:
    """`(values, starts_U, lengths_U)`: the windows of each session into its sequence, which lies in `values`.

    Steps lead from one window's end to the next, a session's first step from 0. Lengths are stored as steps too, or one
    number holds for all: the length, cut off at the sequence's begin. Without `begins_S` the sequences follow one
    another, each as long as its last end. With it sequences are shared: each begins at its entry of `begins_S`, and
    only the parts that some window covers are copied, in ascending order.
    """
    if pick_backend(kernel, values) == "reference":
        from kernels.decode_streams import reference

        return reference.decode_windows(values, steps_U, lengths, num_distinct_S, begins_S=begins_S)
    num_sessions = len(num_distinct_S)
    starts_U, lengths_U = empty_array(len(steps_U), np.int64), empty_array(len(steps_U), np.int32)
    parts_2S = np.empty((2, num_sessions if begins_S is not None else 0), np.int64)  # where parts begin, their sizes
    num_parts, total = _cpu.decode_windows(
        len(values), steps_U, lengths, num_distinct_S, begins_S, starts_U, lengths_U, parts_2S
    )
    if begins_S is None:
        return values, starts_U, lengths_U
    used = empty_array(total, np.int64)
    _cpu.take_windows(values, parts_2S[0, :num_parts], parts_2S[1, :num_parts], used, 1)
    return used, starts_U, lengths_U
