"""Dense columns side by side, as a row of a batch has them.

Shape suffixes: R = rows, F = columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.buffers import empty_array

BACKENDS = ("reference", "cpu")

FloatArray = npt.NDArray[np.float32]


def stack_columns(
    columns: Sequence[FloatArray], num_rows: int, *, kernel: str | None = None
) -> tuple[FloatArray, int | None]:
    """`(stacked_RF, column)`: the columns side by side, and the first that holds a NaN or an infinity, else None."""
    if kernel not in (None, *BACKENDS):
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
    for column in columns:
        if column.dtype != np.float32 or column.shape != (num_rows,):
            raise ValueError(f"expected {num_rows} numbers of float32, received {column.dtype} {column.shape}")
    if kernel == "reference":
        from kernels.stack_columns import reference

        return reference.stack_columns(columns, num_rows)
    whole = [np.ascontiguousarray(column) for column in columns]
    addresses_F = np.array([column.__array_interface__["data"][0] for column in whole], dtype=np.uint64)
    stacked_RF: FloatArray = empty_array((num_rows, len(columns)), np.float32)
    wrong = _cpu.stack_columns(addresses_F.ctypes.data, len(columns), num_rows, stacked_RF.ctypes.data)
    return stacked_RF, None if wrong < 0 else wrong
