"""Causal attention without softmax inside every window of a buffer of rows: HSTU's (arXiv 2402.17152)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor


# N = rows of the buffer, D = width of all heads, R = longest distance + 1, W = windows, T = rows of all windows
def pointwise_attention(
    packed_NE: Tensor,
    bias_R: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    *,
    num_heads: int,
    scale: float,
    is_last_only: bool = False,
    num_values: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Each row of each window sums the values of the rows up to itself: [T, D], window after window.

    The weight of a value is scale * silu(query . key + bias_R[distance]). It does not depend on the window, so windows
    that overlap share the weights of all pairs of rows. `packed_NE` is [N, 3 * D]: queries, keys and values of a row,
    each of them head by head. With `is_last_only` the result is that of every window's last row: [W, D], zeros for an
    empty window. `num_values` is T, if known. float32 on the CPU runs compiled, and the bits of the gradient do not
    depend on the number of threads. All other tensors use the reference.
    """
    from kernels.autograd import is_compiled_float

    check_windows(starts_W, lengths_W)
    if packed_NE.dim() != 2 or packed_NE.shape[1] % (3 * num_heads):
        raise ValueError(f"packed_NE: shape is {tuple(packed_NE.shape)}, expected [N, 3 * D] with {num_heads} heads")
    if num_values is None or is_last_only:
        num_values = len(lengths_W) if is_last_only else int(lengths_W.sum())
    options = (num_heads, num_values, scale, is_last_only)
    if pick_backend(kernel, packed_NE) == "reference" or not is_compiled_float(packed_NE):
        from kernels.pointwise_attention import reference

        return reference.pointwise_attention(packed_NE, bias_R, starts_W, lengths_W, *options)
    from kernels.pointwise_attention import ops

    attended: Tensor = ops.PointwiseAttention.apply(packed_NE, bias_R, starts_W, lengths_W, *options)  # type: ignore[no-untyped-call]
    return attended
