"""Lists of id features as they lie in a block of rows, and batches that are cut from several such blocks.

Shape suffixes: K = features, R = rows of a block, B = rows of a batch, N = ids of a batch, X = entries a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import _cpu
from kernels.buffers import empty_array

BACKENDS = ("reference", "cpu")

IdArray = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class ListBlock:
    """Row r of feature k is values[k][offsets[k][r] : offsets[k][r + 1]]; ids are int64, offsets int32 or int64."""

    values: tuple[IdArray, ...]
    offsets: tuple[npt.NDArray[np.integer], ...]
    num_rows: int

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses, which another process must not take for its own."""
        return {name: value for name, value in vars(self).items() if name != "places_KX"}

    @cached_property
    def places_KX(self) -> IdArray:
        """What the kernel is told of each feature: struct Lists in cpu.cpp."""
        found = []
        for values, offsets in zip(self.values, self.offsets, strict=True):
            if len(offsets) != self.num_rows + 1 or offsets.dtype not in (np.int32, np.int64):
                raise ValueError(f"received {len(offsets)} {offsets.dtype} offsets for {self.num_rows} rows")
            if values.dtype != np.int64 or not (values.flags.c_contiguous and offsets.flags.c_contiguous):
                raise ValueError(f"expected contiguous arrays with ids of int64, received {values.dtype}")
            found.append((_address(values), len(values), _address(offsets), offsets.itemsize))
        return np.array(found, dtype=np.int64).reshape(len(found), 4)


def scan_lists(
    block: ListBlock, bounds: Sequence[int] | None = None, *, kernel: str | None = None
) -> tuple[IdArray, int | None]:
    """`(num_values_R, feature)`: ids of all features in the rows before r, with one entry more than rows, and the first
    feature with an id outside of [0, bound), None if there is none or no bounds are given.
    """
    if bounds is not None and len(bounds) != len(block.values):
        raise ValueError(f"received {len(bounds)} bounds for {len(block.values)} features")
    if _picks_reference(kernel):
        from kernels.join_lists import reference

        return reference.scan_lists(block, bounds)
    ends_R = np.empty(block.num_rows + 1, np.int64)
    bounds_K = None if bounds is None else np.array(bounds, dtype=np.int64)
    found = _cpu.scan_lists(
        _address(block.places_KX),
        len(block.values),
        block.num_rows,
        0 if bounds_K is None else _address(bounds_K),
        _address(ends_R),
    )
    return ends_R, None if found < 0 else found


def join_lists(
    pieces: Sequence[tuple[ListBlock, int, int]], *, num_values: int, kernel: str | None = None
) -> tuple[IdArray, LengthArray, list[int]]:
    """`(values_N, lengths_KB, counts)`: rows [start, stop) of each block, feature by feature; at least one block.

    `num_values` ids in all, counts[k] of them are feature k's. That is the layout of a KeyedJaggedTensor.
    """
    if _picks_reference(kernel):
        from kernels.join_lists import reference

        return reference.join_lists(pieces)
    num_features = len(pieces[0][0].values)
    for block, start, stop in pieces:
        if not (0 <= start <= stop <= block.num_rows and len(block.values) == num_features):
            raise ValueError(f"rows {start} to {stop} of {block.num_rows}, {len(block.values)} features")
    pieces_PX = np.array([(_address(block.places_KX), start, stop) for block, start, stop in pieces], dtype=np.int64)
    num_rows = int((pieces_PX[:, 2] - pieces_PX[:, 1]).sum())
    values_N, lengths_KB = empty_array(num_values, np.int64), empty_array((num_features, num_rows), np.int32)
    counts_K = np.empty(num_features, np.int64)
    _cpu.join_lists(
        _address(pieces_PX),
        len(pieces),
        num_features,
        _address(values_N),
        num_values,
        _address(lengths_KB),
        _address(counts_K),
    )
    return values_N, lengths_KB, counts_K.tolist()


def _address(array: npt.NDArray[Any]) -> int:
    """`ctypes.data` in half of the time: a block has some fifty arrays."""
    return int(array.__array_interface__["data"][0])


def _picks_reference(kernel: str | None) -> bool:
    if kernel not in (None, *BACKENDS):
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(BACKENDS)}")
    return kernel == "reference"
