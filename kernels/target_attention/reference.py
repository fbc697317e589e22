"""The definition of target attention in torch: every pair of a sample and a row of its window expanded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.windows import window_rows_of


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
) -> Tensor:
    num_pairs = int(lengths_B.sum())
    rows_P = window_rows_of(starts_B, lengths_B, num_values=num_pairs)
    samples_P = torch.repeat_interleave(lengths_B, output_size=num_pairs)
    history_PD = rows_ND[rows_P]
    hidden_PK = share_NK[rows_P] + share_BK[samples_P] + (history_PD * target_BD[samples_P]) @ product_KD.T
    weights_P = functional.prelu(hidden_PK, slope_K) @ score_K
    return torch.zeros_like(target_BD).index_add(0, samples_P, history_PD * weights_P[:, None])
