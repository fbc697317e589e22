"""The rows of every sample's window, weighted for the sample's target: the Deep Interest Network's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.backends import pick_backend
from kernels.windows import check_windows

if TYPE_CHECKING:
    from torch import Tensor

LANES = 8


# N = rows of a buffer, D = their width, B = samples, K = hidden units
def target_attention(
    rows_ND: Tensor,
    share_NK: Tensor,
    target_BD: Tensor,
    share_BK: Tensor,
    product_KD: Tensor,
    slope_K: Tensor,
    score_K: Tensor,
    starts_B: Tensor,
    lengths_B: Tensor,
    *,
    kernel: str | None = None,
) -> Tensor:
    """The sum of the rows of each sample's window, each times its weight for the sample: [B, D].

    The hidden units of a row n and a sample b are share_NK[n] + share_BK[b] + product_KD @ (rows_ND[n] * target_BD[b]);
    the weight is score_K . prelu(hidden, slope_K). Rows are read in place, however many samples and windows contain
    them, and nothing is stored per pair. float32 on the CPU with D and K multiples of 8 runs compiled, and the bits of
    the gradient do not depend on the number of threads. All other tensors use the reference.
    """
    from kernels.autograd import is_compiled_float

    check_windows(starts_B, lengths_B)
    if share_NK.shape[0] != rows_ND.shape[0] or share_BK.shape[0] != len(starts_B) or len(target_BD) != len(starts_B):
        raise ValueError(
            f"received {len(share_NK)} shares of {len(rows_ND)} rows, {len(share_BK)} shares and {len(target_BD)} "
            f"targets of {len(starts_B)} samples"
        )
    tensors = (rows_ND, share_NK, target_BD, share_BK, product_KD, slope_K, score_K, starts_B, lengths_B)
    is_whole = product_KD.shape[0] % LANES == 0 and product_KD.shape[1] % LANES == 0
    if pick_backend(kernel, rows_ND) == "reference" or not is_compiled_float(rows_ND) or not is_whole:
        from kernels.target_attention import reference

        return reference.target_attention(*tensors)
    from kernels.target_attention.ops import TargetAttention

    attended_BD: Tensor = TargetAttention.apply(*tensors)  # type: ignore[no-untyped-call]
    return attended_BD
