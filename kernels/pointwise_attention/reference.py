"""The definition of pointwise attention inside windows in torch: every window padded, masked and cut out again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.windows import window_rows_of


def pointwise_attention(
    packed_NE: Tensor,
    bias_R: Tensor,
    starts_W: Tensor,
    lengths_W: Tensor,
    num_heads: int,
    num_values: int,
    scale: float,
    is_last_only: bool,
) -> Tensor:
    num_windows, width = len(lengths_W), packed_NE.shape[1] // 3
    longest = max(int(lengths_W.max()), 1) if num_windows else 1
    steps_L = torch.arange(longest, device=lengths_W.device)
    is_real_WL = steps_L[None, :] < lengths_W[:, None]
    padded = packed_NE.new_zeros(num_windows, longest, 3 * width)
    padded[is_real_WL] = packed_NE[window_rows_of(starts_W, lengths_W)]
    query, key, value = padded.view(num_windows, longest, 3, num_heads, width // num_heads).permute(2, 0, 3, 1, 4)
    queries_WQ = (lengths_W - 1).clamp(min=0)[:, None] if is_last_only else steps_L.expand(num_windows, -1)
    at = queries_WQ[:, None, :, None].expand(-1, num_heads, -1, query.shape[3])
    distances_WQL = queries_WQ[:, :, None] - steps_L
    is_seen_WQL = (distances_WQL >= 0) & is_real_WL[:, None, :]
    scores = query.gather(2, at) @ key.transpose(2, 3) + bias_R[distances_WQL.clamp(min=0)][:, None]
    weights = functional.silu(scores) * scale * is_seen_WQL[:, None].to(scores.dtype)
    attended_WQD: Tensor = (weights @ value).transpose(1, 2).reshape(num_windows, queries_WQ.shape[1], width)
    return attended_WQD[:, 0] if is_last_only else attended_WQD[is_real_WL]
