"""Distinct rows expanded to one row per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("reference", "cpu", "triton")


# U = distinct rows, B = batch, D = embedding width, N = values of all lists
def expand_rows(distinct_UD: Tensor, inverse_B: Tensor, *, kernel: str | None = None, num_threads: int = 0) -> Tensor:
    """distinct_UD[inverse_B], with a gradient that always sums the copies of a row in the same order.

    Forward takes any dtype, backward float32, float64 and bfloat16 (summed in float32); any shape after the first
    dimension; `inverse_B` int64 or int32. The bits of the gradient do not depend on the number of threads.
    """
    backend = pick_backend(kernel, distinct_UD, BACKENDS)
    if backend == "reference":
        from kernels.expand_rows import reference

        return reference.expand_rows(distinct_UD, inverse_B)
    from kernels.expand_rows import ops

    expanded_BD: Tensor = ops.expand_rows(distinct_UD, inverse_B, backend, num_threads)
    return expanded_BD


def expand_jagged(
    values: Tensor,
    offsets: Tensor,
    inverse_B: Tensor,
    *,
    num_values: int | None = None,
    kernel: str | None = None,
    num_threads: int = 0,
) -> tuple[Tensor, Tensor]:
    """The lists `inverse_B` of a jagged tensor: `(values, offsets)` with B lists, with a gradient as in expand_rows.

    `values` is (N,) or (N, D...), `offsets` int64 with U + 1 entries. Passing `num_values`, the number of values of the
    expanded lists, saves a synchronisation on CUDA and keeps torch.compile in one graph.
    """
    backend = pick_backend(kernel, values, BACKENDS)
    from kernels.expand_rows import reference

    expanded_offsets = reference.expand_offsets(offsets, inverse_B)
    if backend == "reference":
        return reference.expand_jagged(values, offsets, inverse_B), expanded_offsets
    from kernels.expand_rows import ops

    total = int(expanded_offsets[-1]) if num_values is None else num_values
    expanded = ops.expand_jagged(values, offsets, inverse_B, expanded_offsets, total, backend, num_threads)
    return expanded, expanded_offsets
