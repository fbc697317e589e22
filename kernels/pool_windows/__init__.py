"""The weighted mean of the rows of every window of a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor


# N = rows of the buffer, D = their width, H = heads, W = windows
def pool_windows(
    rows_ND: Tensor,
    scores_NH: Tensor | None,
    starts_W: Tensor,
    lengths_W: Tensor,
    *,
    kernel: str | None = None,
) -> Tensor:
    """The mean of each window's rows, weighted by the softmax of their scores inside the window: [W, H, D].

    Without scores all rows of a window weigh the same, and H is 1. An empty window gives zeros. Windows may overlap: a
    row is scored once, however many windows contain it. float32 on the CPU runs compiled, and the bits of the gradient
    do not depend on the number of threads. All other tensors use the reference.
    """
    from kernels.autograd import is_compiled_float

    check_windows(starts_W, lengths_W)
    if scores_NH is not None and (scores_NH.dim() != 2 or len(scores_NH) != len(rows_ND)):
        raise ValueError(f"scores_NH: shape is {tuple(scores_NH.shape)}, expected [{len(rows_ND)}, heads]")
    if pick_backend(kernel, rows_ND) == "reference" or not is_compiled_float(rows_ND):
        from kernels.pool_windows import reference

        return reference.pool_windows(rows_ND, scores_NH, starts_W, lengths_W)
    from kernels.pool_windows import ops

    if not rows_ND.requires_grad and (scores_NH is None or not scores_NH.requires_grad):
        return ops.pool(rows_ND, scores_NH, starts_W, lengths_W)[0]
    pooled_WHD: Tensor = ops.PoolWindows.apply(rows_ND, scores_NH, starts_W, lengths_W)  # type: ignore[no-untyped-call]
    return pooled_WHD
