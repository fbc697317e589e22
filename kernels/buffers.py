"""What a compiled kernel may know of an array: where it starts, once dtype, layout and device are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray | Tensor


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
