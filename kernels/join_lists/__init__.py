"""Lists of id features in a block of rows, and batches that are cut from several such blocks.

Shape suffixes: K = features, R = rows of a block, B = rows of a batch, N = ids of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kernels import _cpu
from kernels.backends import pick_backend
from kernels.recycled import recycled_array, recycled_arrays

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
    ends_R = recycled_array(block.num_rows + 1, np.int64)
    found = _cpu.scan_lists(block.compiled, None if bounds is None else np.array(bounds, dtype=np.int64), ends_R)
    return ends_R, None if found < 0 else found


def pack_lists(
    block: ListBlock, bounds: Sequence[int], *, kernel: str | None = None
) -> tuple[PackedLists, IdArray] | None:
    """The block in one piece of memory, so that what it was decoded to can be freed, and `num_values_R` as above.

    None if an id lies outside [0, bound). Bounds are at most 2^31.
    """
    counts = [int(own[-1]) - int(own[0]) for own in block.offsets]
    # Ids, then offsets, of each feature.
    sizes = [-(-num_bytes // 64) * 64 for count in counts for num_bytes in (4 * count, 4 * (block.num_rows + 1))]
    places = np.cumsum([0, *sizes])
    packed = PackedLists(
        piece=pa.py_buffer(recycled_array(max(1, int(places[-1])), np.uint8)),
        values_at=places[:-1:2].copy(),
        offsets_at=places[1::2].copy(),
        counts=np.array(counts, dtype=np.int64),
        num_rows=block.num_rows,
    )
    if pick_backend(kernel, None) == "reference":
        from kernels.join_lists import reference

        ends_R, wrong = reference.scan_lists(block, bounds)
        if wrong is None:
            reference.pack_lists(block, packed)
        return None if wrong is not None else (packed, ends_R)
    ends_R = recycled_array(block.num_rows + 1, np.int64)
    found = _cpu.pack_lists(
        block.compiled,
        np.array(bounds, dtype=np.int64),
        packed.piece,
        packed.values_at,
        packed.offsets_at,
        ends_R,
    )
    return None if found >= 0 else (packed, ends_R)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """Rows of several blocks. The ids of a feature follow one another; this is the layout of a KeyedJaggedTensor."""

    values_N: IdArray
    lengths_KB: LengthArray
    counts: list[int]  # ids per feature
    numbers: list[npt.NDArray[Any]]  # B rows each


def join_lists(
    pieces: Sequence[tuple[Lists, int, int]],
    *,
    num_values: int,
    numbers: Sequence[Sequence[npt.NDArray[Any]]] = (),
    kernel: str | None = None,
) -> Joined:
    """Rows [start, stop) of each block, feature by feature; at least one block. They have `num_values` ids.

    `numbers` holds arrays with one row per row of a block, each as a list with one array per block.
    """
    if pick_backend(kernel, None) == "reference":
        from kernels.join_lists import reference

        values_N, lengths_KB, counts = reference.join_lists(pieces)
        joined = [reference.join_numbers(own, [piece[1:] for piece in pieces]) for own in numbers]
        return Joined(values_N=values_N, lengths_KB=lengths_KB, counts=counts, numbers=joined)
    num_features = pieces[0][0].num_features
    num_rows = sum(max(0, stop - start) for _, start, stop in pieces)
    kinds: list[tuple[int | tuple[int, ...], npt.DTypeLike]] = [
        (num_values, np.int64),
        ((num_features, num_rows), np.int32),
        *(((num_rows, *own[0].shape[1:]), own[0].dtype) for own in numbers),
    ]
    values_N, lengths_KB, *joined = recycled_arrays(kinds)
    ranges_P2 = np.array([piece[1:] for piece in pieces], dtype=np.int64)
    counts_K = np.empty(num_features, np.int64)
    blocks = [block.compiled for block, _, _ in pieces]
    _cpu.join_lists(blocks, ranges_P2, values_N, lengths_KB, counts_K, numbers, joined)
    return Joined(values_N=values_N, lengths_KB=lengths_KB, counts=counts_K.tolist(), numbers=joined)
