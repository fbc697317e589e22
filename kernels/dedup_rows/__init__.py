"""Which rows of a batch are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernels import _cpu
from kernels.jagged import count_jagged_rows, describe_lists, pick_backend

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu", "triton")
ALL_BITS = 2**64 - 1


# B = rows, U = distinct rows
def dedup_rows(
    values: Sequence[Tensor], offsets: Sequence[Tensor], *, kernel: str | None = None, num_threads: int = 0
) -> tuple[Tensor, Tensor]:
    """The distinct rows of a group of jagged features: `(unique_rows_U, inverse_B)`, both int64.

        feature a:   [7, 9]  [7, 9]  [4]   [7, 9]
        feature b:   [1]     [1]     []    [2]
        unique_rows = [0, 2, 3]            # first occurrences, in their order
        inverse     = [0, 0, 1, 2]         # row -> position in unique_rows

    A row is the lists of all features together; two rows are the same if all their bytes are (so weights can be one of
    the features, -0.0 is not 0.0, and a NaN is itself). A hash only proposes, equality decides. `values` may be of any
    dtype; `offsets` are int64, B + 1 for each feature, and need not start at 0: slices of a KeyedJaggedTensor's work.
    The result is the same at any number of threads (0: as OpenMP offers, where there is work enough).
    """
    num_rows = count_jagged_rows(values, offsets)
    backend = pick_backend(kernel, values[0], BACKENDS)
    if backend == "reference":
        from kernels.dedup_rows import reference

        return reference.dedup_rows(values, offsets)
    if backend == "triton":
        from kernels.dedup_rows import triton_impl

        return triton_impl.dedup_rows(values, offsets)
    return _dedup_on_cpu(values, offsets, num_rows, num_threads)


def distinct_rows(rows_BF: Tensor) -> tuple[Tensor, Tensor]:
    """`dedup_rows` of the rows of a matrix."""
    import torch

    rows_BF = rows_BF.contiguous()
    return dedup_rows([rows_BF], [torch.arange(len(rows_BF) + 1, device=rows_BF.device)])


def _dedup_on_cpu(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    num_rows: int,
    num_threads: int,
    *,
    allow_avx2: bool = True,
    hash_mask: int = ALL_BITS,  # fewer bits make hashes collide: tests show that the result does not change
) -> tuple[Tensor, Tensor]:
    import torch

    unique_rows, inverse = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.int64)
    features = describe_lists(values, offsets)
    num_unique = _cpu.dedup_rows(
        features, num_rows, unique_rows.data_ptr(), inverse.data_ptr(), num_threads, allow_avx2, hash_mask
    )
    return unique_rows[:num_unique].clone(), inverse  # a view would keep, and pickle, all B
