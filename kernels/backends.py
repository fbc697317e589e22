"""Which implementation of an op runs, and the checks that several ops share.

Row b of a jagged feature is values[offsets[b] : offsets[b + 1]].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
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


def count_jagged_rows(values: Sequence[Array], offsets: Sequence[Array]) -> int:
    """The number of rows that all features of a group have; ValueError if they differ."""
    if not values or len(values) != len(offsets):
        raise ValueError(f"received {len(values)} values and {len(offsets)} offsets, expected one of each per feature")
    for feature, own in enumerate(offsets):
        if own.ndim != 1 or len(own) == 0 or len(own) != len(offsets[0]):
            raise ValueError(
                f"offsets of feature {feature}: shape is {tuple(own.shape)}, "
                f"expected {len(offsets[0])} offsets (rows + 1) as in feature 0"
            )
        if str(own.dtype) not in ("torch.int64", "int64"):
            raise ValueError(f"offsets of feature {feature}: dtype is {own.dtype}, expected int64")
    return len(offsets[0]) - 1


def call_in_torch(reference: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a reference written in torch; for numpy arrays, numpy arrays."""
    import torch

    is_numpy = False

    def convert(argument: Any) -> Any:
        nonlocal is_numpy
        if isinstance(argument, np.ndarray):
            is_numpy = True
            return torch.from_numpy(argument.copy())
        return list(map(convert, argument)) if isinstance(argument, list | tuple) else argument

    found = reference(*map(convert, arguments), **options)
    if not is_numpy:
        return found
    return tuple(own.numpy() for own in found) if isinstance(found, tuple) else found.numpy()
