"""Dense columns side by side, in the layout of a batch.

Shape suffixes: R = rows, F = columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.buffers import empty_array

FloatArray = npt.NDArray[np.float32]


def stack_columns(
    columns: Sequence[FloatArray], num_rows: int, *, kernel: str | None = None
) -> tuple[FloatArray, int | None]:
    """`(stacked_RF, column)`: the columns side by side, and the first column with a NaN or an infinity, or None."""
    if pick_backend(kernel, None) == "reference":
        from kernels.stack_columns import reference

        return reference.stack_columns(columns, num_rows)
    stacked_RF: FloatArray = empty_array((num_rows, len(columns)), np.float32)
    wrong = _cpu.stack_columns([np.ascontiguousarray(column) for column in columns], num_rows, stacked_RF)
    return stacked_RF, None if wrong < 0 else wrong
