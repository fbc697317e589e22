"""The parts of a buffer that windows cover, each once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.buffers import address_of, empty_array
from kernels.jagged import item_bytes, pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor

    from kernels._cpu import WindowSource

IdArray = npt.NDArray[np.int64]

BACKENDS = ("reference", "cpu")


# N = values, M = values that some window covers, W = windows
def merge_windows(
    values_N: Tensor, starts_W: Tensor, lengths_W: Tensor, *, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """`(values_M, starts_W)`: what the windows cover of the values, in order, and where each of them begins there.

        values = [a, b, c, d, e, f, g, h]     windows = [f, g], [b, c, d], [c, d, e]
        gives    [b, c, d, e, f, g]           starts  = [4, 0, 1]

    Windows that overlap or touch share a part. An empty window begins at 0.
    """
    check_windows(starts_W, lengths_W)
    if pick_backend(kernel, values_N, BACKENDS) == "reference":
        from kernels.merge_windows import reference

        return reference.merge_windows(values_N, starts_W, lengths_W)
    starts_W, lengths_W = starts_W.contiguous(), lengths_W.contiguous()
    source = (
        address_of(values_N, name="values_N"),
        item_bytes(values_N),
        len(values_N),
        address_of(starts_W, name="starts_W", dtypes=("int64",)),
        address_of(lengths_W, name="lengths_W", dtypes=("int64",)),
        8,
        len(starts_W),
    )
    parts, new_starts_W = starts_W.new_empty(3 * len(starts_W)), starts_W.new_empty(len(starts_W))
    num_parts, total = _cpu.merge_windows([source], parts.data_ptr(), new_starts_W.data_ptr())
    values_M = values_N.new_empty(total, *values_N.shape[1:])
    _cpu.copy_parts([source], parts.data_ptr(), num_parts, values_M.data_ptr())
    return values_M, new_starts_W


def merge_sources(sources: list[WindowSource], num_windows: int) -> tuple[IdArray, IdArray]:
    """The same of int64 values that lie in several arrays, one array after another, in one call.

    A source is (address of values, 8, their number, address of int64 starts, address of lengths, bytes of a length,
    number of windows), so that a caller who cuts many batches from the same arrays looks their addresses up once.
    """
    parts, new_starts_W = np.empty(3 * num_windows, dtype=np.int64), np.empty(num_windows, dtype=np.int64)
    num_parts, total = _cpu.merge_windows(sources, parts.ctypes.data, new_starts_W.ctypes.data)
    values_M = empty_array(total, np.int64)
    _cpu.copy_parts(sources, parts.ctypes.data, num_parts, values_M.ctypes.data)
    return values_M, new_starts_W
