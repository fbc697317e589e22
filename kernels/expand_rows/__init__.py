"""Distinct rows expanded to one row per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend
from kernels.take_rows import take_windows
from kernels.windows import window_rows_of

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu", "triton")


# U = distinct rows, B = batch, D = embedding width, N = values of all lists
def expand_rows(distinct_UD: Tensor, inverse_B: Tensor, *, kernel: str | None = None) -> Tensor:
    """distinct_UD[inverse_B], with a gradient that always sums the copies of a row in the same order.

    Forward takes any dtype, backward float32, float64 and bfloat16 (summed in float32); any shape after the first
    dimension; `inverse_B` int64 or int32. The bits of the gradient do not depend on the number of threads.
    """
    backend = pick_backend(kernel, distinct_UD, BACKENDS)
    if backend == "reference":
        from kernels.expand_rows import reference

        return reference.expand_rows(distinct_UD, inverse_B)
    from kernels.expand_rows import ops

    expanded_BD: Tensor = ops.expand_rows(distinct_UD, inverse_B, backend)
    return expanded_BD


def sum_rows(rows_BD: Tensor, inverse_B: Tensor, num_distinct: int) -> Tensor:
    """[U, D]: rows with the same number summed, always first to last; the gradient of `expand_rows`."""
    from kernels.expand_rows import ops

    summed_UD: Tensor = ops.sum_rows(rows_BD, inverse_B, num_distinct, pick_backend(None, rows_BD, BACKENDS))
    return summed_UD


def expand_jagged(
    values: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    *,
    num_values: int | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The lists `inverse_B` of a jagged tensor: `(values, offsets)` with B lists, with a gradient as in expand_rows.

    `values` is (N,) or (N, D...), `offsets` int64 with U + 1 entries. Passing `num_values`, the number of values of the
    expanded lists, saves a synchronisation on CUDA and keeps torch.compile in one graph.
    """
    import torch

    starts_B = offsets[:-1].index_select(0, inverse_B)
    lengths_B = offsets[1:].index_select(0, inverse_B) - starts_B
    expanded_offsets = torch.cat([offsets.new_zeros(1), lengths_B.cumsum(0)])
    if not values.requires_grad and kernel is None and not torch.compiler.is_compiling():
        return take_windows(values.contiguous(), starts_B, lengths_B, num_values=num_values), expanded_offsets
    rows = window_rows_of(starts_B, lengths_B, num_values=num_values)
    return expand_rows(values, rows, kernel=kernel), expanded_offsets
