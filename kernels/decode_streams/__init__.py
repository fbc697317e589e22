"""The streams of a deduplicated row group as arrays: which distinct list a row has, ids from symbols, windows.

What they mean, recmill/data/storage/deduplicated.py and popular_ids.py say. Streams come from files, so all of them are
checked: ValueError says what does not fit.

Shape suffixes: S = sessions, R = rows, U = distinct rows, C = rows that changed, N = ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.buffers import empty_array

BACKENDS = ("reference", "cpu")

Array = npt.NDArray[Any]
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
    """`(inverse_R, num_distinct_S)`: each row's distinct row among those of all sessions, and how many a session has.

        sessions of 4 and 1 rows      changed = no, yes, yes      again = 0, 1
        gives  inverse = 0, 0, 1, 0 | 2      num_distinct = 2, 1

    Bits are Arrow's, lowest first, `num_bits` of them from `first_bit` on.
    """
    if first_bit < 0 or num_bits < 0 or first_bit + num_bits > 8 * len(changed_bits):
        raise ValueError(f"received {8 * len(changed_bits)} bits, expected {num_bits} from {first_bit} on")
    num_rows = num_bits + len(num_rows_S)
    if _picks_reference(kernel):
        from kernels.decode_streams import reference

        bits = np.unpackbits(changed_bits, bitorder="little")[first_bit : first_bit + num_bits].astype(np.bool_)
        return reference.decode_inverse(num_rows_S, bits, again_C)
    inverse_R, num_distinct_S = empty_array(num_rows, np.int32), empty_array(len(num_rows_S), np.int64)
    _cpu.decode_inverse(
        _address(num_rows_S, np.int32),
        len(num_rows_S),
        _address(changed_bits, np.uint8),
        first_bit,
        num_bits,
        _address(again_C, np.int32),
        len(again_C),
        inverse_R.ctypes.data,
        num_rows,
        num_distinct_S.ctypes.data,
    )
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
    """The ids of the symbols. Symbol s is begins[s], and num_rest[s] bytes of `rest` are its own:

    none for an id, one that is added to a position in `popular` below `first_escape`, from there on an id's low bytes.
    """
    if not len(begins) == len(num_rest) == 256:
        raise ValueError(f"received {len(begins)} begins and {len(num_rest)} counts, expected 256 of each")
    if _picks_reference(kernel):
        from kernels.decode_streams import reference

        return reference.decode_symbols(
            symbols_N, rest, begins=begins, num_rest=num_rest, first_escape=first_escape, popular=popular
        )
    ids_N = empty_array(len(symbols_N), np.int64)
    _cpu.decode_symbols(
        _address(symbols_N, np.uint8),
        len(symbols_N),
        _address(rest, np.uint8),
        len(rest),
        _address(begins, np.int64),
        _address(num_rest, np.int32),
        first_escape,
        _address(popular, np.int64),
        len(popular),
        ids_N.ctypes.data,
    )
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

    Steps lead from one window's end to the next, a session's first from 0; lengths likewise, or one number holds: as
    long as that, or as the end allows. Without `begins_S` the sequences lie one after another, each as long as its last
    end. With it they are shared: each begins where `begins_S` says, and of each only the part that some window needs is
    copied, by rising begin.
    """
    if _picks_reference(kernel):
        from kernels.decode_streams import reference

        return reference.decode_windows(values, steps_U, lengths, num_distinct_S, begins_S=begins_S)
    num_sessions, is_shared = len(num_distinct_S), begins_S is not None
    if begins_S is not None and len(begins_S) != num_sessions:
        raise ValueError(f"received {len(begins_S)} begins for {num_sessions} sessions")
    starts_U, lengths_U = empty_array(len(steps_U), np.int64), empty_array(len(steps_U), np.int32)
    parts_2S = np.empty(2 * num_sessions if is_shared else 0, np.int64)  # where the parts begin, then their sizes
    num_parts, total = _cpu.decode_windows(
        _address(steps_U, np.int32),
        len(steps_U),
        _address(lengths, np.int32),
        len(lengths),
        _address(num_distinct_S, np.int64),
        num_sessions,
        0 if begins_S is None else _address(begins_S, np.int64),
        len(values),
        starts_U.ctypes.data,
        lengths_U.ctypes.data,
        parts_2S.ctypes.data,
    )
    if not is_shared:
        return values, starts_U, lengths_U
    parts, used = parts_2S.ctypes.data, empty_array(total, np.int64)
    sizes = parts + parts_2S.itemsize * num_sessions
    address = _address(values, np.int64)
    _cpu.take_windows(address, values.itemsize, len(values), parts, sizes, num_parts, used.ctypes.data, total, 1)
    return used, starts_U, lengths_U


def _picks_reference(kernel: str | None) -> bool:
    if kernel not in (None, *BACKENDS):
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
    return kernel == "reference"


def _address(array: Array, dtype: type[np.generic]) -> int:
    """As `buffers.address_of`, in a third of the time: a row group has some thirty streams, most of them short."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"expected a contiguous array of {dtype.__name__}, received {array.dtype} {array.shape}")
    return array.ctypes.data
