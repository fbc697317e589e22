"""The definition of the functions of this package in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kernels.join_lists import IdArray, LengthArray, ListBlock, Lists, PackedLists


def scan_lists(block: Lists, bounds: Sequence[int] | None) -> tuple[IdArray, int | None]:
    num_values_R = np.zeros(block.num_rows + 1, np.int64)
    wrong = []
    for feature, offsets in enumerate(block.offsets):
        num_values_R += offsets - offsets[0]
        used = block.values[feature][offsets[0] : offsets[-1]].astype(np.int64)
        if bounds is not None and ((used < 0) | (used >= bounds[feature])).any():
            wrong.append(feature)
    return num_values_R, min(wrong, default=None)


def pack_lists(block: ListBlock, packed: PackedLists) -> None:
    lists = zip(block.values, block.offsets, packed.values, packed.offsets, strict=True)
    for values, offsets, new_values, new_offsets in lists:
        new_values[:] = values[offsets[0] : offsets[-1]]
        new_offsets[:] = offsets - offsets[0]


def join_lists(pieces: Sequence[tuple[Lists, int, int]]) -> tuple[IdArray, LengthArray, list[int]]:
    num_features = len(pieces[0][0].values)
    ids: list[IdArray] = []
    lengths: list[LengthArray] = []
    for feature in range(num_features):
        offsets = [block.offsets[feature][start : stop + 1] for block, start, stop in pieces]
        values = [block.values[feature][own[0] : own[-1]] for (block, _, _), own in zip(pieces, offsets, strict=True)]
        ids.append(np.concatenate(values).astype(np.int64))
        lengths.append(np.concatenate([np.diff(own) for own in offsets]).astype(np.int32))
    num_rows = sum(stop - start for _, start, stop in pieces)
    joined: npt.NDArray[np.int64] = np.concatenate(ids) if ids else np.empty(0, np.int64)
    stacked: npt.NDArray[np.int32] = np.stack(lengths) if lengths else np.empty((0, num_rows), np.int32)
    return joined, stacked, [len(own) for own in ids]


def join_numbers(arrays: Sequence[npt.NDArray[Any]], ranges: Sequence[tuple[int, int]]) -> npt.NDArray[Any]:
    return np.concatenate([array[start:stop] for array, (start, stop) in zip(arrays, ranges, strict=True)])
