"""Self-attention inside every window of a buffer of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor


# N = rows of the buffer, D = width of all heads, W = windows, T = rows of all windows
def window_attention(
    packed_NE: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    *,
    num_heads: int,
    num_values: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """The attention of each row of each window to the rows of its window: [T, D], window after window.

    `packed_NE` is [N, 3 * D]: queries, keys and values of a row, each of them head by head. Windows may overlap, so a
    row is projected once, however many windows contain it. `num_values` is T, if known. float32 on the CPU runs
    compiled, and the bits of the gradient do not depend on the number of threads. All other tensors use the reference.
    """
    from kernels.autograd import is_compiled_float

    check_windows(starts_W, lengths_W)
    if packed_NE.dim() != 2 or packed_NE.shape[1] % (3 * num_heads):
        raise ValueError(f"packed_NE: shape is {tuple(packed_NE.shape)}, expected [N, 3 * D] with {num_heads} heads")
    total = int(lengths_W.sum()) if num_values is None else num_values
    if pick_backend(kernel, packed_NE) == "reference" or not is_compiled_float(packed_NE):
        from kernels.window_attention import reference

        return reference.window_attention(packed_NE, starts_W, lengths_W, num_heads, total)
    from kernels.window_attention import ops

    if not packed_NE.requires_grad:  # autograd's function takes as long as a short window
        return ops.attend(packed_NE, starts_W, lengths_W, num_heads, total)[0]
    attended_TD: Tensor = ops.WindowAttention.apply(packed_NE, starts_W, lengths_W, num_heads, total)  # type: ignore[no-untyped-call]
    return attended_TD
