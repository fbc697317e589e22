"""The definition of attention inside windows in torch: every window padded, masked and cut out again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.windows import window_rows_of


def window_attention(packed_NE: Tensor, starts_W: Tensor, lengths_W: Tensor, num_heads: int, num_values: int) -> Tensor:
    width = packed_NE.shape[1] // 3
    longest = max(int(lengths_W.max()), 1) if len(lengths_W) else 1
    is_real_WL = torch.arange(longest, device=lengths_W.device)[None, :] < lengths_W[:, None]
    rows_T = window_rows_of(starts_W, lengths_W, num_values=num_values)
    padded = packed_NE.new_zeros(len(lengths_W), longest, 3 * width)
    padded[is_real_WL] = packed_NE[rows_T]
    heads = padded.view(len(lengths_W), longest, 3, num_heads, width // num_heads).permute(2, 0, 3, 1, 4)
    mask_W11L = is_real_WL[:, None, None, :] | (lengths_W == 0)[:, None, None, None]
    attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask_W11L)
    return attended.transpose(1, 2).reshape(len(lengths_W), longest, width)[is_real_WL]
