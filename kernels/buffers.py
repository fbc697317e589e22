"""What a compiled kernel may know of an array: where it starts, once dtype, layout and device are checked.

And arrays that are cheap to allocate again and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray | Tensor

MIN_POOLED_BYTES = 65_536


def empty_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array whose contents are not set, of Arrow's memory pool unless it is small.

    The pool keeps pages for the next array. glibc gives blocks of a megabyte back to the kernel, and to fault them in
    again takes longer than to fill them: 20 arrays of 160,000 numbers 7.8 ns a number, 0.7 from the pool.
    """
    num_bytes = (shape if isinstance(shape, int) else math.prod(shape)) * np.dtype(dtype).itemsize
    if num_bytes < MIN_POOLED_BYTES:
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(num_bytes), dtype).reshape(shape)


def join_arrays(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The pieces, equal in dtype and shape but for their lengths, one after another in a new array; at least one."""
    shape = (sum(map(len, pieces)), *pieces[0].shape[1:])
    return np.concatenate(pieces, out=empty_array(shape, pieces[0].dtype))


def dtype_name(array: Array) -> str:
    """ "int64" for both numpy's and torch's."""
    return str(array.dtype).removeprefix("torch.")


def address_of(array: Array, *, name: str, dtypes: tuple[str, ...] | None = None) -> int:
    """The address of a contiguous CPU array (numpy or torch) whose dtype is one of `dtypes`."""
    if dtypes is not None and dtype_name(array) not in dtypes:
        raise ValueError(f"{name}: dtype is {dtype_name(array)}, expected {' or '.join(dtypes)}")
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: must be contiguous")
        return int(array.ctypes.data)
    if array.device.type != "cpu":
        raise ValueError(f"{name}: is on {array.device}, the CPU kernel wants it on the CPU")
    if not array.is_contiguous():
        raise ValueError(f"{name}: must be contiguous")
    return int(array.data_ptr())


def size_of(array: Array) -> int:
    """The number of elements."""
    return int(array.size) if isinstance(array, np.ndarray) else int(array.numel())
