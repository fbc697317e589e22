"""Lists of id features in a block of rows, and batches that are cut from several such blocks.

Shape suffixes: K = features, R = rows of a block, B = rows of a batch, N = ids of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.buffers import empty_array

IdArray = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class ListBlock:
    """Row r of feature k is values[k][offsets[k][r] : offsets[k][r + 1]]; ids are int64, offsets int32 or int64."""

    values: tuple[IdArray, ...]
    offsets: tuple[npt.NDArray[np.integer], ...]
    num_rows: int

    @cached_property
    def compiled(self) -> _cpu.ListBlock:
        """The block as the kernels read it: checked once for all batches that are cut from it."""
        return _cpu.ListBlock(self.values, self.offsets, self.num_rows)

    @property
    def num_features(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in (*self.values, *self.offsets))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLists:
    """The lists of a ListBlock in one piece of memory, with ids of 4 bytes: half as much to hold, and no array each.

    The `counts[k]` ids of feature k begin at byte `values_at[k]`, its offsets, int32, at `offsets_at[k]`.
    """

    piece: pa.Buffer
    values_at: IdArray
    offsets_at: IdArray
    counts: IdArray
    num_rows: int

    @cached_property
    def compiled(self) -> _cpu.ListBlock:
        return _cpu.ListBlock(self.piece, self.values_at, self.offsets_at, self.counts, self.num_rows)

    @property
    def num_features(self) -> int:
        return len(self.counts)

    @property
    def nbytes(self) -> int:
        return int(self.piece.size)

    @property
    def values(self) -> tuple[npt.NDArray[np.integer], ...]:
        places = zip(self.values_at.tolist(), self.counts.tolist(), strict=True)
        return tuple(np.frombuffer(self.piece, np.uint32, count=count, offset=begin) for begin, count in places)

    @property
    def offsets(self) -> tuple[npt.NDArray[np.integer], ...]:
        size = self.num_rows + 1
        return tuple(
            np.frombuffer(self.piece, np.int32, count=size, offset=begin) for begin in self.offsets_at.tolist()
        )


Lists = ListBlock | PackedLists


def scan_lists(
    block: Lists, bounds: Sequence[int] | None = None, *, kernel: str | None = None
) -> tuple[IdArray, int | None]:
    """`(num_values_R, feature)`: the number of ids of all features in the rows before r (one entry more than rows), and
    the first feature with an id outside [0, bound), or None. Ids are not checked without bounds.
    """
    if pick_backend(kernel, None) == "reference":
        from kernels.join_lists import reference

        return reference.scan_lists(block, bounds)
    ends_R = np.empty(block.num_rows + 1, np.int64)
    found = _cpu.scan_lists(block.compiled, None if bounds is None else np.array(bounds, dtype=np.int64), ends_R)
    return ends_R, None if found < 0 else found


def join_lists(
    pieces: Sequence[tuple[Lists, int, int]], *, num_values: int, kernel: str | None = None
) -> tuple[IdArray, LengthArray, list[int]]:
    """`(values_N, lengths_KB, counts)`: rows [start, stop) of each block, feature by feature; at least one block.

    There are `num_values` ids, counts[k] of them in feature k. This is the layout of a KeyedJaggedTensor.
    """
    if pick_backend(kernel, None) == "reference":
        from kernels.join_lists import reference

        return reference.join_lists(pieces)
    num_features = pieces[0][0].num_features
    ranges_P2 = np.array([piece[1:] for piece in pieces], dtype=np.int64)
    num_rows = max(0, int((ranges_P2[:, 1] - ranges_P2[:, 0]).sum()))
    values_N, lengths_KB = empty_array(num_values, np.int64), empty_array((num_features, num_rows), np.int32)
    counts_K = np.empty(num_features, np.int64)
    _cpu.join_lists([block.compiled for block, _, _ in pieces], ranges_P2, values_N, lengths_KB, counts_K)
    return values_N, lengths_KB, counts_K.tolist()
