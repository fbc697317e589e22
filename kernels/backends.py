"""Which implementation of an op runs, and the checks that several ops share.

Row b of a jagged feature is values[offsets[b] : offsets[b + 1]].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.buffers import Array


def pick_backend(kernel: str | None, array: Array | None, backends: tuple[str, ...] = ("reference", "cpu")) -> str:
    """`kernel` if it is given, else the backend for the device of `array`."""
    if kernel is None:
        if array is None or isinstance(array, np.ndarray) or array.device.type == "cpu":
            return "cpu"
        return "triton" if "triton" in backends else "reference"
    if kernel not in backends:
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(backends)}")
    return kernel


def count_jagged_rows(values: Sequence[Tensor], offsets: Sequence[Tensor]) -> int:
    """The number of rows that all features of a group have; ValueError if they differ."""
    if not values or len(values) != len(offsets):
        raise ValueError(f"received {len(values)} values and {len(offsets)} offsets, expected one of each per feature")
    for feature, own in enumerate(offsets):
        if own.dim() != 1 or len(own) == 0 or len(own) != len(offsets[0]):
            raise ValueError(
                f"offsets of feature {feature}: shape is {tuple(own.shape)}, "
                f"expected {len(offsets[0])} offsets (rows + 1) as in feature 0"
            )
        if str(own.dtype) != "torch.int64":
            raise ValueError(f"offsets of feature {feature}: dtype is {own.dtype}, expected torch.int64")
    return len(offsets[0]) - 1
