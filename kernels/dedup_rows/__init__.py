"""Which rows of a batch are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernels import _cpu
from kernels.backends import call_in_torch, count_jagged_rows, pick_backend
from kernels.buffers import OfOneKind, empty_like_kind

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu", "triton")


# B = rows, U = distinct rows
def dedup_rows(
    values: Sequence[OfOneKind], offsets: Sequence[OfOneKind], *, kernel: str | None = None, num_threads: int = 0
) -> tuple[OfOneKind, OfOneKind]:
    """The distinct rows of a group of jagged features: `(unique_rows_U, inverse_B)`, both int64.

        feature a:   [7, 9]  [7, 9]  [4]   [7, 9]
        feature b:   [1]     [1]     []    [2]
        unique_rows = [0, 2, 3]            # first occurrences, in their order
        inverse     = [0, 0, 1, 2]         # row -> position in unique_rows

    A row consists of the lists of all features; two rows are the same if all their bytes are (so weights can be one of
    the features, -0.0 is not 0.0, and a NaN equals itself). Hashes only find candidates, which are then compared.
    All arguments are numpy arrays or all are tensors. `values` may be of any dtype; `offsets` are int64, B + 1 per
    feature, and need not start at 0: slices of a KeyedJaggedTensor's offsets work. The result does not depend on the
    number of threads (0: as many as OpenMP offers if there is enough work).
    """
    num_rows = count_jagged_rows(values, offsets)
    backend = pick_backend(kernel, values[0], BACKENDS)
    if backend == "reference":
        from kernels.dedup_rows import reference

        return call_in_torch(reference.dedup_rows, values, offsets)  # type: ignore[no-any-return]
    if backend == "triton":
        from kernels.dedup_rows import triton_impl

        return triton_impl.dedup_rows(values, offsets)  # type: ignore[arg-type, return-value]
    unique_rows, inverse = (empty_like_kind(offsets[0], num_rows, is_index=True) for _ in range(2))
    num_unique = _cpu.dedup_rows(values, offsets, unique_rows, inverse, num_threads)
    unique_rows = unique_rows[:num_unique]
    # Copied: a view would keep, and pickle, all B.
    return unique_rows.copy() if isinstance(unique_rows, np.ndarray) else unique_rows.clone(), inverse


def distinct_rows(rows_BF: Tensor) -> tuple[Tensor, Tensor]:
    """`dedup_rows` of the rows of a matrix."""
    import torch

    rows_BF = rows_BF.contiguous()
    return dedup_rows([rows_BF], [torch.arange(len(rows_BF) + 1, device=rows_BF.device)])
