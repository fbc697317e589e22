"""The definition of the expansion and of its gradient in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_rows(distinct_UD: Tensor, inverse_B: Tensor) -> Tensor:
    return distinct_UD.index_select(0, inverse_B)


def sum_rows(gradient_BD: Tensor, inverse_B: Tensor, num_distinct: int) -> Tensor:
    """Row u is the sum of gradient_BD over inverse_B == u, from the first to the last row; 16-bit floats as float32."""
    wide = torch.float32 if gradient_BD.dtype in (torch.bfloat16, torch.float16) else gradient_BD.dtype
    sums_UD = torch.zeros(num_distinct, *gradient_BD.shape[1:], dtype=wide, device=gradient_BD.device)
    return sums_UD.index_add_(0, inverse_B, gradient_BD.to(wide)).to(gradient_BD.dtype)
